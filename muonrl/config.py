"""Recipes: TOML files read into nested frozen dataclasses, with one clear line for whatever cannot be used.

A recipe states only what differs from the defaults below or from the recipe that it names with ``extends``. Every key is
checked by name, type and range, and the resolved configuration is written back with :func:`to_toml`.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from muonrl.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"
_T = TypeVar("_T")


def _at(default: _T, *, ge: float | None = None, gt: float | None = None, le: float | None = None) -> _T:
    """A field with a default and its bounds: at least ``ge``, above ``gt``, at most ``le``."""
    return field(default=default, metadata={"ge": ge, "gt": gt, "le": le})


@dataclass(frozen=True)
class RunConfig:
    """Length and bookkeeping of a run. ``eval_samples`` is the number of samples of each held-out task."""

    recipe: str = "tiny"
    seed: int = _at(0, ge=0, le=2**63 - 1)
    updates: int = _at(60, ge=1)
    rollouts_per_update: int = _at(48, ge=1)
    checkpoint_every: int = _at(20, ge=1)
    keep_checkpoints: int = _at(3, ge=1)
    eval_samples: int = _at(4, ge=0)
    threads_learner: int = _at(1, ge=1)
    threads_sampler: int = _at(1, ge=1)


@dataclass(frozen=True)
class TasksConfig:
    """Which tasks are trained on and which are held out; ``limit`` takes the first tasks of each split (0: all)."""

    source: str = "shipped"
    train_split: str = "train"
    heldout_split: str = "heldout"
    limit: int = _at(0, ge=0)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a new tiny policy, or ``path``: the folder of an existing checkpoint to start from instead."""

    hidden: int = _at(128, ge=8)
    layers: int = _at(4, ge=1)
    heads: int = _at(4, ge=1)
    kv_heads: int = _at(2, ge=1)
    head_dim: int = _at(32, ge=2)
    ffn: int = _at(384, ge=8)
    vocab: int = _at(2048, ge=300)
    tied: bool = True
    max_context: int = _at(512, ge=32)
    path: str = ""


@dataclass(frozen=True)
class WarmstartConfig:
    """Supervised steps on scripted demonstrations, of which ``oracle_share`` show the true repair, the rest a guess."""

    demonstrations: int = _at(4000, ge=1)
    steps: int = _at(1400, ge=0)
    batch_tokens: int = _at(2048, ge=1)
    lr_muon: float = _at(5e-3, ge=0)
    lr_adamw: float = _at(3e-3, ge=0)
    oracle_share: float = _at(0.3, ge=0, le=1)
    rename_share: float = _at(0.8, ge=0, le=1)
    seed: int = _at(0, ge=0, le=2**63 - 1)
    cache_dir: str = ""


@dataclass(frozen=True)
class AgentConfig:
    """The built-in agent loop: turns, tokens a reply, and how much of a tool's output the policy gets to read."""

    max_turns: int = _at(6, ge=1)
    max_new_tokens: int = _at(64, ge=1)
    view_lines: int = _at(10, ge=1)
    max_observation_chars: int = _at(800, ge=16)
    temperature: float = _at(1.0, gt=0)


@dataclass(frozen=True)
class SandboxConfig:
    """Where tools and tests run. ``process`` isolates nothing and needs ``allow_unsandboxed``."""

    backend: Literal["bubblewrap", "process"] = "bubblewrap"
    allow_unsandboxed: bool = False
    concurrency: int = _at(48, ge=1)
    tool_timeout: float = _at(10.0, gt=0)


@dataclass(frozen=True)
class GradingConfig:
    """``cache`` reuses the verdict of an identical resulting tree; ``timeout`` is seconds for one grading."""

    cache: bool = True
    timeout: float = _at(20.0, gt=0)


@dataclass(frozen=True)
class AlgorithmConfig:
    """Baseline, penalties, normalisation and collection: the quantities of docs/recipe.md."""

    baseline: Literal["spopp", "spo", "none"] = "spopp"
    normalization: Literal["action_token", "trajectory"] = "action_token"
    length_penalty: bool = True
    length_threshold: int = _at(2048, ge=0)
    length_strength: float = _at(0.5, ge=0)
    length_shape: Literal["linear", "step"] = "linear"
    tool_penalty: bool = True
    tool_strength: float = _at(0.5, ge=0)
    tool_error: Literal["any_error", "protocol_only"] = "any_error"
    penalty_clip: float = _at(0.25, ge=0)
    d_half: float = _at(0.06, gt=0)
    rho_min: float = _at(0.875, gt=0, le=0.9999)
    rho_max: float = _at(0.96, gt=0, le=1)
    sampling_floor: float = _at(0.05, gt=0)
    collection: Literal["first_finished", "oldest_first"] = "first_finished"


@dataclass(frozen=True)
class LossConfig:
    """The policy loss. ``dual_clip`` 0 is none; ``epochs`` is passes over the batch in an update."""

    clip_low: float = _at(0.2, ge=0, le=1)
    clip_high: float = _at(0.28, ge=0)
    dual_clip: float = _at(0.0, ge=0)
    is_mode: Literal["tis", "icepop", "none"] = "tis"
    is_high: float = _at(2.0, gt=0)
    is_low: float = _at(0.0, ge=0)
    agg: Literal["token_mean", "sequence_mean"] = "token_mean"
    proximal: Literal["batch", "publish", "rollout"] = "batch"
    epochs: int = _at(1, ge=1)
    loss_type: Literal["ppo", "cispo", "gspo"] = "ppo"
    entropy_coef: float = _at(0.0, ge=0)


@dataclass(frozen=True)
class OptimizerConfig:
    """``muon``: Muon on hidden matrices and AdamW on the rest; ``adamw``: AdamW on everything at ``lr_adamw``.

    ``max_grad_norm`` 0 does not clip; ``warmup_updates`` raises both rates linearly.
    """

    name: Literal["muon", "adamw"] = "muon"
    lr_muon: float = _at(1e-3, ge=0)
    lr_adamw: float = _at(3e-4, ge=0)
    momentum: float = _at(0.95, ge=0, le=0.9999)
    nesterov: bool = True
    ns_steps: int = _at(5, ge=1, le=99)
    weight_decay: float = _at(0.1, ge=0)
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    betas: tuple[float, float] = _at((0.9, 0.95), ge=0, le=0.99999)
    eps: float = _at(1e-8, gt=0)
    max_grad_norm: float = _at(1.0, ge=0)
    warmup_updates: int = _at(0, ge=0)


@dataclass(frozen=True)
class WeightsConfig:
    """``drain`` lets rollouts finish under the policy that began them; ``in_flight`` swaps weights beneath them."""

    mode: Literal["drain", "in_flight"] = "drain"


@dataclass(frozen=True)
class StalenessConfig:
    """``eta``: how many publications old a trained token may be; ``action``: what becomes of an older rollout."""

    eta: int = _at(1, ge=0)
    action: Literal["drop", "requeue", "wait"] = "drop"


@dataclass(frozen=True)
class Config:
    """A resolved recipe. Raises ConfigError when two values contradict each other."""

    run: RunConfig = RunConfig()
    tasks: TasksConfig = TasksConfig()
    model: ModelConfig = ModelConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
    agent: AgentConfig = AgentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    grading: GradingConfig = GradingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weights: WeightsConfig = WeightsConfig()
    staleness: StalenessConfig = StalenessConfig()

    def __post_init__(self) -> None:
        m, a, s = self.model, self.algorithm, self.loss
        wrong = [
            (
                m.heads % m.kv_heads != 0,
                f"model.heads = {m.heads} is no multiple of model.kv_heads = {m.kv_heads}",
            ),
            (m.head_dim % 2 != 0, f"model.head_dim = {m.head_dim} must be even (rotary embedding)"),
            (
                self.agent.max_new_tokens >= m.max_context,
                f"agent.max_new_tokens = {self.agent.max_new_tokens} leaves no room for a prompt in "
                f"model.max_context = {m.max_context}",
            ),
            (
                a.rho_min > a.rho_max,
                f"algorithm.rho_min = {a.rho_min} is above algorithm.rho_max = {a.rho_max}",
            ),
            (0 < s.dual_clip <= 1, f"loss.dual_clip = {s.dual_clip} must be above 1, or 0 for none"),
            (s.is_low > s.is_high, f"loss.is_low = {s.is_low} is above loss.is_high = {s.is_high}"),
        ]
        for bad, text in wrong:
            if bad:
                raise ConfigError(text)


_SECTIONS: dict[str, type] = get_type_hints(Config)
_TYPES: dict[str, dict[str, Any]] = {name: get_type_hints(cls) for name, cls in _SECTIONS.items()}
_BOUNDS = {name: {f.name: f.metadata for f in fields(cls)} for name, cls in _SECTIONS.items()}
_Layer = dict[str, dict[str, Any]]


def list_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes, sorted."""
    return tuple(sorted(p.stem for p in RECIPES.glob("*.toml")))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = (), seed: int | None = None) -> Config:
    """The configuration of a shipped recipe or of a TOML file, with ``section.key=value`` overrides and a seed on top.

    Raises ConfigError, one line, for an unknown recipe, section or key, a wrong type, a value out of range or values that
    contradict each other.
    """
    layer = _read(_locate(str(name_or_path), Path()), ())
    for text in overrides:
        _merge(layer, _parse_override(text))
    if seed is not None:
        _merge(layer, _check_layer({"run": {"seed": seed}}, "--seed"))
    return Config(**{name: cls(**layer.get(name, {})) for name, cls in _SECTIONS.items()})


def to_toml(config: Config) -> str:
    """The whole configuration as TOML text that :func:`load_recipe` reads back to an equal configuration."""
    lines: list[str] = []
    for section in fields(config):
        part = getattr(config, section.name)
        lines.append(f"[{section.name}]")
        lines += [f"{f.name} = {_toml_value(getattr(part, f.name))}" for f in fields(part)]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        # JSON escapes are a subset of TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _suggest(word: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    near = difflib.get_close_matches(word, names, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"{hint}; allowed: {', '.join(names)}"


def _locate(name: str, beside: Path) -> Path:
    """A shipped recipe by its name, else a file, relative to the folder ``beside``."""
    if name in list_recipes():
        return RECIPES / f"{name}.toml"
    if name.endswith(".toml") or "/" in name:
        return beside / name
    raise ConfigError(f"unknown recipe '{name}'{_suggest(name, list_recipes())}, or the path of a .toml file")


def _read(path: Path, seen: tuple[Path, ...]) -> _Layer:
    """The checked values of a recipe file laid over those of the recipe that it extends."""
    if path.resolve() in seen:
        raise ConfigError(f"recipe {path}: 'extends' leads back to itself")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: not valid TOML: {' '.join(str(error).split())}") from error
    parent = data.pop("extends", None)
    layer: _Layer = {}
    if parent is not None:
        if not isinstance(parent, str):
            raise ConfigError(f"recipe {path}: extends = {parent!r}: expected the name of a recipe")
        layer = _read(_locate(parent, path.parent), (*seen, path.resolve()))
    own = _check_layer(data, f"recipe {path}")
    own.setdefault("run", {}).setdefault("recipe", path.stem)
    _merge(layer, own)
    return layer


def _merge(base: _Layer, top: _Layer) -> None:
    for section, values in top.items():
        base.setdefault(section, {}).update(values)


def _parse_override(text: str) -> _Layer:
    """``section.key=value``: the value is TOML; what is no TOML value, or is meant for a text field, is taken as text."""
    where = f"--set {' '.join(text.split())}"
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise ConfigError(f"{where}: expected section.key=value")
    raw = raw.strip()
    try:
        parsed = tomllib.loads(f"value = {raw}")
        value: object = parsed["value"] if len(parsed) == 1 else raw
    except tomllib.TOMLDecodeError:
        value = raw
    if _TYPES.get(section, {}).get(key) is str and not isinstance(value, str):
        value = raw
    return _check_layer({section: {key: value}}, where)


def _check_layer(data: Mapping[str, object], where: str) -> _Layer:
    """Names, types and ranges of one source of values. ``where`` begins every message."""
    layer: _Layer = {}
    for section, values in data.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{where}: unknown section '{section}'{_suggest(section, _SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {section} = {values!r}: expected a section [{section}]")
        layer[section] = {}
        for key, value in values.items():
            if key not in _TYPES[section]:
                raise ConfigError(f"{where}: unknown key '{section}.{key}'{_suggest(key, _TYPES[section])}")
            problem, good = _coerce(value, _TYPES[section][key], _BOUNDS[section][key])
            if problem:
                raise ConfigError(f"{where}: {section}.{key} = {value!r}: {problem}")
            layer[section][key] = good
    return layer


def _coerce(value: object, kind: Any, bounds: Mapping[str, float | None]) -> tuple[str, object]:
    """What is wrong with ``value`` ('' for nothing), and the value in the field's own type."""
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        hint = _suggest(value, allowed) if isinstance(value, str) else f"; allowed: {', '.join(allowed)}"
        return ("", value) if value in allowed else (f"not a choice{hint}", None)
    if get_origin(kind) is tuple:
        size = len(get_args(kind))
        if not isinstance(value, list) or len(value) != size:
            return f"expected a list of {size} numbers", None
        parts = [_coerce(v, k, bounds) for v, k in zip(value, get_args(kind), strict=True)]
        return next((problem for problem, _ in parts if problem), ""), tuple(good for _, good in parts)
    if kind is bool or kind is str:
        expected = "true or false" if kind is bool else "a text in quotes"
        return ("", value) if isinstance(value, kind) else (f"expected {expected}", None)
    accepted = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, accepted):
        return ("expected a whole number" if kind is int else "expected a number"), None
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite", None
    if abs(value) > 2**63:
        return "too large", None
    return _out_of_range(value, bounds), kind(value)


def _out_of_range(value: float, bounds: Mapping[str, float | None]) -> str:
    ge, gt, le = bounds.get("ge"), bounds.get("gt"), bounds.get("le")
    low = (ge is not None and value < ge) or (gt is not None and value <= gt)
    high = le is not None and value > le
    if not low and not high:
        return ""
    words = [f"at least {ge}" if ge is not None else "", f"above {gt}" if gt is not None else ""]
    words.append(f"at most {le}" if le is not None else "")
    return "must be " + " and ".join(w for w in words if w)

"""Other Muons' state dicts and learning rates in the terms of this one, and back.

Momentum, with gradient G and factor mu; U is what is orthogonalized:

    ema:  M <- mu M + (1 - mu) G;   U = mu M + (1 - mu) G if nesterov else M
    sum:  M <- mu M + G;            U = mu M + G          if nesterov else M

As long as mu is constant, the sum is the average divided by 1 - mu, in M and in U, and orthogonalization does not see
the factor. What the others do was read in their code: torch 2.13; KellerJordan/Muon (an average since February 2025, a sum
before, as in most copies of it); MoonshotAI/Moonlight; microsoft/dion (Muon); gram-newton-schulz 0.1.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from muonrl_kernels.muon_matrices import BUFFER
from muonrl_kernels.muon_options import ADJUST_NAMES, MOMENTUM_STYLES, AdjustLr, lr_ratio

__all__ = ["LR_CONVENTIONS", "convert_lr", "convert_momentum"]

StateDict = dict[str, Any]

_OURS: Final = "muonrl"
_DEFAULTS: Final[Mapping[str, Any]] = {
    "algorithm": "muon",
    "momentum_style": "ema",
    "nesterov": True,
    "adjust_lr_fn": None,
    "flatten": False,
    "weight_decay": 0.0,
}
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Library:
    """How one optimizer names things.

    Attributes:
        style: "ema" or "sum".
        buffer: key of the momentum in a parameter's state.
        muon, adamw: our name of an option -> its name, for each kind of group; adamw None: there are no such groups.
        always: our options that its Muon groups have without saying so.
        moments: its keys for our exp_avg and exp_avg_sq.
        adjust: its values of "adjust_lr" -> ours; empty if it has no such option.
        fixed_muon, fixed_adamw: its options with one value, written into groups.
        step_in_group: whether AdamW's step counter is an option of the group instead of a parameter's state.
    """

    style: str
    buffer: str = BUFFER
    muon: Mapping[str, str] = field(default_factory=dict)
    adamw: Mapping[str, str] | None = None
    always: Mapping[str, Any] = field(default_factory=dict)
    moments: tuple[str, str] = _MOMENTS
    adjust: Mapping[str | None, str] = field(default_factory=dict)
    fixed_muon: Mapping[str, Any] = field(default_factory=dict)
    fixed_adamw: Mapping[str, Any] = field(default_factory=dict)
    step_in_group: bool = False


def _same(*names: str, **renamed: str) -> dict[str, str]:
    return {**{name: name for name in names}, **renamed}


_MUON: Final = ("lr", "momentum", "weight_decay")
_NORMS: Final[Mapping[str | None, str]] = {
    "rms_norm": "match_rms_adamw",
    "spectral_norm": "spectral_unclamped",
    None: "unscaled",
}
_ORIGINAL: Final[Mapping[str, Any]] = {"adjust_lr_fn": "original"}

_LIBRARIES: Final[Mapping[str, _Library]] = {
    "torch": _Library(
        "ema",
        muon=_same(*_MUON, "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    ),
    "keller_jordan": _Library(
        "ema",
        muon=_same(*_MUON),
        adamw=_same("lr", "betas", "eps", "weight_decay"),
        always={**_ORIGINAL, "nesterov": True},
        fixed_muon={"use_muon": True},
        fixed_adamw={"use_muon": False},
    ),
    "keller_jordan_2024": _Library(
        "sum", muon=_same("lr", "momentum", "nesterov", "ns_steps"), always={**_ORIGINAL, "weight_decay": 0.0}
    ),
    "moonlight": _Library(
        "sum",
        muon=_same("lr", "momentum", "nesterov", "ns_steps", weight_decay="wd"),
        adamw=_same("lr", weight_decay="wd", betas="adamw_betas", eps="adamw_eps"),
        always={"adjust_lr_fn": "match_rms_adamw"},
        moments=("moment1", "moment2"),
    ),
    "dion": _Library(
        "sum",
        buffer="momentum",
        muon=_same("lr", "weight_decay", "nesterov", "flatten", "algorithm", momentum="mu"),
        adamw=_same("lr", "weight_decay", "algorithm", eps="epsilon"),
        moments=("momentum", "variance"),
        adjust=_NORMS,
        fixed_muon={"epsilon": 1e-8, "beta1": 0.9, "beta2": 0.95, "step": 0},
        step_in_group=True,
    ),
    "gram_newton_schulz": _Library("sum", buffer="momentum", muon=_same(*_MUON, "nesterov"), adjust=_NORMS),
}


def convert_momentum(state_dict: Mapping[str, Any], to: str = "ema", *, source: str = _OURS) -> StateDict:
    """A copy of a Muon optimizer's state dict in another convention.

    Parameters keep their numbers, so the optimizer that loads the result must hold the same parameters in the same order
    (Moonlight's one group becomes a Muon and an AdamW group, in that order). Learning rates are kept together with the
    `adjust_lr_fn` that gives them their meaning. Options that the other side does not have are left out.

    Args:
        state_dict: what ``optimizer.state_dict()`` returned.
        to: "ema" or "sum" for a state dict of :class:`muonrl_kernels.Muon` in that momentum style, or the name of the
            optimizer that is to load it: "torch", "keller_jordan", "keller_jordan_2024" (before February 2025),
            "moonlight", "dion" or "gram_newton_schulz".
        source: "muonrl", or one of these names.

    Raises:
        ValueError: an unknown name, or a group that the other optimizer cannot express.
    """
    if source not in (_OURS, *_LIBRARIES):
        raise ValueError(f"source must be one of {', '.join((_OURS, *_LIBRARIES))}; got {source!r}")
    if to not in (*MOMENTUM_STYLES, *_LIBRARIES):
        raise ValueError(f"to must be one of {', '.join((*MOMENTUM_STYLES, *_LIBRARIES))}; got {to!r}")
    ours = _copied(state_dict)
    if source == "moonlight":
        ours = _divided(ours)
    if source != _OURS:
        ours = _read(ours, source, _LIBRARIES[source])
    if to in MOMENTUM_STYLES:
        return _restyled(ours, to)
    written = _write(_restyled(ours, _LIBRARIES[to].style), to, _LIBRARIES[to])
    return _merged(written) if to == "moonlight" else written


def _copied(state_dict: Mapping[str, Any]) -> StateDict:
    """Tensors are copied too: an optimizer that loads them would go on to change the other one's."""
    state = {
        key: {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": [dict(g) for g in state_dict["param_groups"]]}


def _restyled(ours: StateDict, to: str) -> StateDict:
    for group in ours["param_groups"]:
        if group.get("algorithm", "muon") != "muon" or group.get("momentum_style", "ema") == to:
            continue
        factor = 1.0 - group["momentum"]
        if factor <= 0.0:
            raise ValueError(f"sum and average convert by 1 - momentum > 0, got momentum {group['momentum']}")
        for key in group["params"]:
            entry = ours["state"].get(key, {})
            if BUFFER in entry:
                entry[BUFFER].mul_(factor) if to == "ema" else entry[BUFFER].div_(factor)
        group["momentum_style"] = to
    return ours


def _is_muon(group: Mapping[str, Any], name: str) -> bool:
    if name == "dion":
        if group["algorithm"] not in ("muon", "adamw"):
            raise ValueError(f"dion's groups of algorithm {group['algorithm']!r} have no counterpart")
        return bool(group["algorithm"] == "muon")
    if name == "gram_newton_schulz":
        return "adjust_lr" in group
    return bool(group.get("use_muon", True))


def _read(theirs: StateDict, name: str, library: _Library) -> StateDict:
    """Another optimizer's state dict (copied) as one of ours."""
    groups = []
    for group in theirs["param_groups"]:
        muon = _is_muon(group, name)
        names = library.muon if muon else library.adamw or _same("lr", "weight_decay", "betas", "eps")
        ours = {mine: group[their] for mine, their in names.items() if their in group}
        ours |= {"params": group["params"], "algorithm": "muon" if muon else "adamw"}
        if muon:
            ours |= {"momentum_style": library.style, **library.always}
            if library.adjust:
                ours |= _adjust_from(group["adjust_lr"], library)
        elif name == "dion":
            ours["betas"] = (group["beta1"], group["beta2"])
        if name == "dion" and muon:
            ours["batched_matrices"] = not group["flatten"]
        for key in group["params"]:
            if key in theirs["state"]:
                theirs["state"][key] = _read_entry(theirs["state"][key], group, muon, library)
        groups.append(ours)
    return {**theirs, "param_groups": groups}


def _adjust_from(value: Any, library: _Library) -> dict[str, Any]:
    """`adjust_lr_fn` for another's `adjust_lr`; its functions, (lr, shape) -> lr, are left to the constructor."""
    if callable(value):
        return {}
    if value not in library.adjust:
        raise ValueError(f"adjust_lr must be one of {', '.join(map(str, library.adjust))}; got {value!r}")
    return {"adjust_lr_fn": library.adjust[value]}


def _read_entry(
    entry: Mapping[str, Any], group: Mapping[str, Any], muon: bool, library: _Library
) -> dict[str, Any]:
    if muon:
        return {BUFFER: entry[library.buffer]} if library.buffer in entry else {}
    if library.moments[0] not in entry:
        return {}
    step = group["step"] if library.step_in_group else entry["step"]
    moments = {mine: entry[their] for mine, their in zip(_MOMENTS, library.moments, strict=True)}
    return {"step": torch.tensor(float(step)), **moments}


def _write(ours: StateDict, name: str, library: _Library) -> StateDict:
    """One of our state dicts (copied, in that momentum style) as another optimizer's."""
    groups = []
    for given in ours["param_groups"]:
        group = {**_DEFAULTS, **given}
        muon = group["algorithm"] == "muon"
        names = library.muon if muon else library.adamw
        if names is None:
            raise ValueError(f"{name} has no AdamW groups; convert a state dict without them")
        theirs = {their: group[mine] for mine, their in names.items() if mine in group}
        theirs |= {"params": group["params"], **(library.fixed_muon if muon else library.fixed_adamw)}
        if muon:
            _check_always(group, name, library)
            if library.adjust:
                theirs["adjust_lr"] = _adjust_to(group["adjust_lr_fn"], name, library)
        entries = [(key, ours["state"][key]) for key in group["params"] if key in ours["state"]]
        if name == "dion" and not muon:
            steps = {int(entry["step"]) for _, entry in entries if "step" in entry}
            if len(steps) > 1:
                raise ValueError(
                    f"dion counts AdamW's steps by group, but these parameters have {sorted(steps)}"
                )
            theirs |= {"step": max(steps, default=0), "beta1": group["betas"][0], "beta2": group["betas"][1]}
        for key, entry in entries:
            ours["state"][key] = _write_entry(entry, muon, library)
        groups.append(theirs)
    return {**ours, "param_groups": groups}


def _check_always(group: Mapping[str, Any], name: str, library: _Library) -> None:
    for key, value in library.always.items():
        mine = group[key] if key != "adjust_lr_fn" or group[key] is not None else "original"
        if mine != value:
            raise ValueError(f"{name} always has {key}={value!r}, this group has {mine!r}")


def _adjust_to(value: AdjustLr, name: str, library: _Library) -> str | None:
    for their, mine in library.adjust.items():
        if mine == value:
            return their
    raise ValueError(
        f"{name} has no adjust_lr for adjust_lr_fn={value!r}, only for {', '.join(library.adjust.values())}"
    )


def _write_entry(entry: Mapping[str, Any], muon: bool, library: _Library) -> dict[str, Any]:
    if muon:
        return {library.buffer: entry[BUFFER]} if BUFFER in entry else {}
    if "step" not in entry:
        return {}
    moments = {their: entry[mine] for mine, their in zip(_MOMENTS, library.moments, strict=True)}
    return moments if library.step_in_group else {"step": int(entry["step"]), **moments}


def _divided(theirs: StateDict) -> StateDict:
    """Moonlight marks parameters, not groups: each group as one of Muon parameters and one of the others."""
    groups = []
    for group in theirs["param_groups"]:
        for muon in (True, False):
            params = [k for k in group["params"] if theirs["state"].get(k, {}).get("use_muon", True) is muon]
            if params:
                groups.append({**group, "params": params, "use_muon": muon})
    if [k for g in groups for k in g["params"]] != sorted(k for g in groups for k in g["params"]):
        raise ValueError("Moonlight's Muon parameters must come before its AdamW parameters")
    return {**theirs, "param_groups": groups}


def _merged(theirs: StateDict) -> StateDict:
    """The inverse of :func:`_divided`: one group, and a mark in each parameter's state."""
    merged: dict[str, Any] = {"ns_steps": 5, "nesterov": True, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
    params: list[Any] = []
    for group in theirs["param_groups"]:
        for key, value in group.items():
            if key in ("lr", "wd") and merged.get(key, value) != value:
                raise ValueError(f"Moonlight has one {key} for all groups, got {merged[key]} and {value}")
        muon = "momentum" in group
        for key in group["params"]:
            theirs["state"][key] = {**theirs["state"].get(key, {}), "use_muon": muon}
        params += group["params"]
        merged |= group
    return {**theirs, "param_groups": [{**merged, "params": params}]}


LR_CONVENTIONS: Final[Mapping[str, str]] = {
    **{name: name for name in ADJUST_NAMES},
    "adamw": "match_rms_adamw",
    "torch": "original",
    "keller_jordan": "original",
    "moonlight": "match_rms_adamw",
    "dion": "spectral_unclamped",
    "gram_newton_schulz": "match_rms_adamw",
}
"""Names that :func:`convert_lr` knows -> the factor on the learning rate that is the default there.

AdamW's update has entries of root mean square about 0.2 (arXiv 2502.16982, section 2.2), which "match_rms_adamw" gives Muon.
"""


def convert_lr(lr: float, *, source: AdjustLr, to: AdjustLr, shape: Sequence[int]) -> float:
    """The learning rate that makes the same update of an [A, B] matrix (fan-out, fan-in) under another convention.

    An update is lr * factor(shape) * O, so this is lr * factor_source(shape) / factor_to(shape). Conventions whose factors
    depend on the shape in different ways have no common rate for all matrices of a model: give this optimizer
    the source's own `adjust_lr_fn` there.

    Args:
        lr: learning rate under `source`.
        source, to: a name of LR_CONVENTIONS, None for torch's, or a callable of the shape as for `adjust_lr_fn`.
        shape: (A, B) of the matrix.

    Raises:
        ValueError: an unknown name or a shape that is no matrix.
    """
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"shape must be (fan_out, fan_in) of a matrix, got {tuple(shape)}")
    factors = []
    for convention in (source, to):
        if convention is not None and not callable(convention) and convention not in LR_CONVENTIONS:
            raise ValueError(f"the conventions are {', '.join(LR_CONVENTIONS)}; got {convention!r}")
        known = LR_CONVENTIONS[convention] if isinstance(convention, str) else convention
        factors.append(lr_ratio(known, shape))
    return lr * factors[0] / factors[1]

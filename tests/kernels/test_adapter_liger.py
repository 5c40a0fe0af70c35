"""Liger's argument list: against the installed liger-kernel where there is one, else by what its losses are defined as."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import reference
from muonrl_kernels.adapters.liger import FusedLinearGRPOLoss
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

ROWS, LENGTH, HIDDEN, VOCAB = 5, 13, 12, 37
WRT = ("_input", "lin_weight", "bias")
needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"
)

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dapo": ({"beta": 0.0}, ()),
    "dapo with a reference": ({"beta": 0.2, "temperature": 0.8}, ("ref",)),
    "a reference model": ({"beta": 0.2, "epsilon_high": 0.4}, ("ref model",)),
    "a count of items": ({"beta": 0.0}, ("items",)),
    "no reference": ({"beta": 0.2, "use_ref_model": False}, ()),
    "on policy": ({"beta": 0.0}, ("no old",)),
    "weights": ({"beta": 0.0, "delta": 1.3}, ("weights",)),
    "weights of sequences": ({"beta": 0.0}, ("sequence weights",)),
    "grpo": ({"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": True}, ("ref",)),
    "bnpo": ({"loss_type": "bnpo", "beta": 0.0}, ()),
    "dr_grpo": ({"loss_type": "dr_grpo", "beta": 0.0, "max_completion_length": 20}, ()),
    "cispo": ({"loss_type": "cispo", "beta": 0.0, "epsilon_high": 1.2}, ()),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1}, ("ref",)),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0}, ()),
}


def inputs(extras: tuple[str, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight, bias = draw(ROWS, LENGTH, HIDDEN), draw(VOCAB, HIDDEN) / 3, 0.1 * draw(VOCAB)
    targets = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).long()
    mask[3] = 0
    flat = (hidden.reshape(-1, HIDDEN), weight, targets.reshape(-1))
    logp = reference.linear_logprob(*flat, bias=bias)[0].reshape(ROWS, LENGTH)
    found: dict[str, Any] = {
        "_input": hidden,
        "lin_weight": weight,
        "selected_token_ids": targets,
        "attention_mask": mask,
        "advantages": draw(ROWS) + 0.5,
        "bias": bias,
        "old_per_token_logps": logp + 0.4 * draw(ROWS, LENGTH),
        "ref_per_token_logps": logp + 0.4 * draw(ROWS, LENGTH),
        "ref_input": hidden + 0.1 * draw(ROWS, LENGTH, HIDDEN),
        "ref_weight": weight,
        "ref_bias": bias,
        "num_items_in_batch": torch.tensor(71.0),
    }
    absent = {"no old": "old_per_token_logps"}
    dropped = {name for extra, name in absent.items() if extra in extras}
    dropped |= set() if "ref" in extras else {"ref_per_token_logps"}
    dropped |= set() if "ref model" in extras else {"ref_input", "ref_weight", "ref_bias"}
    dropped |= set() if "items" in extras else {"num_items_in_batch"}
    found = {k: v for k, v in found.items() if k not in dropped}
    if "weights" in extras:
        found["vllm_is_ratio"] = torch.rand(ROWS, LENGTH, generator=generator) * 2
    if "sequence weights" in extras:
        found["vllm_is_ratio"] = torch.rand(ROWS, generator=generator) * 2
    return found


def results(loss: Any, given: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    given = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()
    }
    leaves = {k: v.clone().requires_grad_() if k in WRT else v for k, v in given.items()}
    value, metrics = loss(**leaves)
    value.backward()
    return {"loss": value.detach(), **{k: leaves[k].grad for k in WRT}}, metrics


@needs_liger
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_against_the_installed_liger(name: str) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    settings, extras = CASES[name]
    if "use_ref_model" not in settings:
        settings = {**settings, "use_ref_model": settings["beta"] != 0.0}
    given = inputs(extras)
    theirs, their_metrics = results(
        LigerFusedLinearGRPOLoss(compiled=False, **settings), given, torch.float32
    )
    ours, metrics = results(FusedLinearGRPOLoss(**settings), given, torch.float32)
    truth, _ = results(FusedLinearGRPOLoss(**settings), given, torch.float64)
    for key, value in truth.items():
        assert relative_error(theirs[key], value) < 2e-6, key
        assert_as_good_as(ours[key], theirs[key], value, what=key)
    if settings.get("use_bias_correction_kl"):
        metrics, their_metrics = metrics[1:], their_metrics[1:]  # their KL metric holds the ratio as well
    if name not in ("cispo", "weights", "no reference"):
        for a, b in zip(metrics, their_metrics, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)


@needs_liger
def test_the_arguments_are_theirs() -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    theirs, ours = (
        inspect.signature(kind.forward).parameters for kind in (LigerFusedLinearGRPOLoss, FusedLinearGRPOLoss)
    )
    assert list(ours) == list(theirs)
    built = inspect.signature(LigerFusedLinearGRPOLoss.__init__).parameters
    mine = inspect.signature(FusedLinearGRPOLoss.__init__).parameters
    for name, parameter in mine.items():
        if name not in ("self", "unused"):
            assert built[name].default == parameter.default, name
    assert all(n in mine or n.startswith(("sapo_temperature_", "vespo_")) for n in built)


def definition(given: dict[str, Any], settings: dict[str, Any]) -> Tensor:
    """The token losses of "dapo", "grpo" and "cispo" in plain PyTorch."""
    flat = (given["_input"].reshape(-1, HIDDEN), given["lin_weight"], given["selected_token_ids"].reshape(-1))
    logp = reference.linear_logprob(*flat, bias=given["bias"])[0].reshape(ROWS, LENGTH)
    a, mask = given["advantages"].unsqueeze(1), given["attention_mask"].to(logp.dtype)
    ratio = (logp - given.get("old_per_token_logps", logp.detach())).exp()
    kind = settings.get("loss_type", "dapo")
    if kind == "cispo":
        term = -ratio.clamp(max=settings["epsilon_high"]).detach() * a * logp
    else:
        term = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    if kind == "grpo":
        return ((term * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / ROWS
    return (term * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("settings", "extras"),
    [
        ({"beta": 0.0}, ()),
        ({"beta": 0.0}, ("no old",)),
        ({"beta": 0.0, "loss_type": "grpo"}, ()),
        ({"beta": 0.0, "loss_type": "cispo", "epsilon_high": 1.2}, ()),
    ],
    ids=str,
)
def test_by_definition(settings: dict[str, Any], extras: tuple[str, ...]) -> None:
    given = inputs(extras)
    ours, _ = results(FusedLinearGRPOLoss(**settings), given, torch.float32)
    by_definition = [
        results(lambda **given: (definition(given, settings), ()), given, kind)[0]
        for kind in (torch.float32, torch.float64)
    ]
    for key in ours:
        assert_as_good_as(ours[key], by_definition[0][key], by_definition[1][key], what=key)


def test_masked_slots_may_hold_anything() -> None:
    clean = inputs(("ref model",))
    dirty = dict(clean)
    out = clean["attention_mask"] == 0
    for name in ("_input", "ref_input"):
        dirty[name] = torch.where(out.unsqueeze(-1), torch.nan, clean[name])
    dirty["selected_token_ids"] = torch.where(out, -100, clean["selected_token_ids"])
    loss = FusedLinearGRPOLoss(beta=0.1)
    for key, value in results(loss, dirty, torch.float32)[0].items():
        assert_exactly(value, results(loss, clean, torch.float32)[0][key], key)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss_type": "sapo"}, "loss_type must be one of grpo"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "must be token with"),
        ({"loss_type": "luspo"}, "must be sequence with loss_type='luspo'"),
        ({"importance_sampling_level": "turn"}, "must be token or sequence"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"delta": 1.1}, "delta must be >= "),
    ],
    ids=str,
)
def test_what_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FusedLinearGRPOLoss(**settings)


def test_no_reference_where_one_is_needed() -> None:
    with pytest.raises(ValueError, match="use_ref_model needs ref_per_token_logps"):
        FusedLinearGRPOLoss()(**inputs(()))
    with pytest.raises(TypeError, match="unexpected arguments: epsilon"):
        FusedLinearGRPOLoss(epsilon=0.2)

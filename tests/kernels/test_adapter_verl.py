"""verl's interface and preset against verl's formulas, written down here in plain PyTorch from verl 0.9.1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import policy_loss
from muonrl_kernels.adapters.verl import make_policy_loss
from tests.kernels.cases import Tensors, cast, token_inputs, values_and_grads
from tests.numerics import assert_as_good_as, relative_error

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
    }
    fields["global_batch_info"] = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
    return SimpleNamespace(**(fields | changes))


def aggregate(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """Each mode by its definition; gradients are averaged over dp_size ranks afterwards."""
    loss, weight = torch.where(mask, loss, 0.0), mask.to(loss.dtype)
    ranks = info.get("dp_size", 1)
    if mode == "token-mean":
        return loss.sum() / (info.get("batch_num_tokens") or weight.sum()) * ranks
    if mode == "token-sum":
        return loss.sum() * ranks
    sequences = (
        (weight.sum(1) > 0).sum() if info.get("global_batch_size") is None else info["global_batch_size"]
    )
    if mode == "seq-mean-token-mean":
        return (loss.sum(1) / (weight.sum(1) + 1e-8)).sum() / sequences * ranks
    total = loss.sum() / sequences * ranks
    return total / (info.get("loss_scale_factor") or loss.shape[1]) if mode.endswith("norm") else total


def token_terms(logp: Tensor, old: Tensor, a: Tensor, mask: Tensor, kind: str, c: Any) -> Tensor:
    """The loss of each token before rollout weights."""
    delta = (logp - old).clamp(-20.0, 20.0)
    low, high = 1 - c.clip_ratio_low, 1 + c.clip_ratio_high
    if kind == "cispo":
        return -delta.exp().clamp(low, high).detach() * a * logp
    if kind == "gspo":
        mean = torch.where(mask, logp - old, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        delta = (logp - logp.detach() + mean.detach().unsqueeze(1)).clamp(max=10.0)
    ratio = delta.exp()
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    if kind == "gspo":
        return clipped
    return torch.where(a < 0, torch.minimum(-a * c.clip_ratio_c, clipped), clipped)


def formula(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: str,
    mode: str,
    c: Any,
    weights: Any = None,
) -> Tensor:
    terms = token_terms(logp, old_logp, advantages, mask, kind, c)
    terms = terms if weights is None else terms * weights
    return aggregate(terms, mask, mode, c.global_batch_info)


def case(kind: str) -> tuple[Tensors, Tensor]:
    """Tokens, some far off policy, and weights, some 0; for gspo both are constant over a sequence, as with GRPO."""
    inputs = cast(token_inputs(6, 21, spread=0.8, seed=5), torch.float32)
    inputs = {k: inputs[k] for k in ("logp", "old_logp", "advantages", "mask")}
    inputs["mask"][2] = False
    inputs["logp"] = inputs["logp"].clamp(max=0.0)
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(6, 21, generator=generator) * 2
    weights[0, :4] = 0.0
    if kind == "gspo":
        inputs["advantages"] = inputs["advantages"][:, :1].expand(6, 21).contiguous()
        weights = weights[:, :1].expand(6, 21)
    return inputs, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["vanilla", "gspo", "cispo"])
def test_every_mode(kind: str, mode: str, weighted: bool) -> None:
    inputs, weights = case(kind)
    info: dict[str, Any] = {
        "dp_size": 2,
        "batch_num_tokens": 117,
        "global_batch_size": 9,
        "loss_scale_factor": 40,
    }
    for c in (config(), config(global_batch_info=info)):
        w = weights if weighted else None
        eager = values_and_grads(formula, inputs, ("logp",), kind=kind, mode=mode, c=c, weights=w)
        exact = cast(inputs, torch.float64)
        truth = values_and_grads(formula, exact, ("logp",), kind=kind, mode=mode, c=c, weights=w)

        def ours(
            logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, c: Any = c, w: Any = w
        ) -> Tensor:
            compute = make_policy_loss(kind)
            return compute(old_logp, logp, advantages, mask, mode, c, w)[0]

        found = values_and_grads(ours, inputs, ("logp",))
        for name, a, b, d in zip(("loss", "logp"), found, eager, truth, strict=True):
            assert_as_good_as(a, b, d, what=name)


@pytest.mark.parametrize(
    ("level", "low"), [("token", None), ("token", 0.5), ("sequence", None), ("sequence", 0.5)]
)
def test_the_preset_with_rollout_log_probabilities(level: str, low: float | None) -> None:
    inputs, _ = case("vanilla")
    inputs = cast(inputs, torch.float64)
    generator = torch.Generator().manual_seed(7)
    rollout = inputs["old_logp"] + 0.3 * torch.randn(6, 21, generator=generator, dtype=torch.float64)
    log_w = torch.where(inputs["mask"], inputs["old_logp"] - rollout, 0.0)
    log_w = log_w if level == "token" else log_w.sum(1, keepdim=True).expand(6, 21)
    raw = log_w.clamp(-20, 20).exp()
    weights = raw.clamp(max=2.0) if low is None else raw * ((raw >= low) & (raw <= 2.0))
    assert (weights != raw).any()
    c = config(clip_ratio_low=0.2, clip_ratio_high=0.2)
    truth = values_and_grads(
        formula, inputs, ("logp",), kind="vanilla", mode="token-mean", c=c, weights=weights
    )
    how: dict[str, Any] = (
        {"is_level": level} if low is None else {"is_level": level, "is_mode": "icepop", "is_low": low}
    )
    ours = values_and_grads(
        policy_loss, inputs, ("logp",), rollout_logp=rollout, preset="verl", agg="token-mean", **how
    )
    # Tokens whose weight is zero still count among those that the mean is taken over.
    for a, b in zip(ours, truth, strict=True):
        assert relative_error(a, b) < 1e-12


def test_metrics() -> None:
    inputs, _ = case("vanilla")
    logp, old, a, mask = (inputs[k] for k in ("logp", "old_logp", "advantages", "mask"))
    _, metrics = make_policy_loss()(old, logp, a, mask, config=config())
    ratio = (logp - old).exp()[mask]
    a = a[mask]
    first, second = -a * ratio, -a * ratio.clamp(0.85, 1.28)
    lower = (torch.maximum(first, second) > -3 * a) & (a < 0)
    assert metrics["actor/pg_clipfrac"] == pytest.approx((second > first).float().mean().item())
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(lower.float().mean().item())
    assert lower.any()
    assert metrics["actor/ppo_kl"] == pytest.approx((old - logp)[mask].mean().item(), rel=1e-5)


def test_bad_arguments() -> None:
    row = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="loss_type must be one of vanilla, gspo, cispo, got 'gpg'"):
        make_policy_loss("gpg")
    compute = make_policy_loss()
    with pytest.raises(ValueError, match="loss_agg_mode must be one of token-mean.*got 'mean'"):
        compute(row, row, row, row, "mean", config())
    with pytest.raises(ValueError, match="config must be"):
        compute(row, row, row, row)
    alone = config(global_batch_info={"dp_size": 2})
    for mode, name in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        with pytest.raises(ValueError, match=f"{name} must be given with dp_size=2"):
            compute(row, row, row, row, mode, alone)

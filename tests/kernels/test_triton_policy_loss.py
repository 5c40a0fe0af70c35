"""The elementwise loss on Triton: options against fp64, exact zeros, poison, metrics, reductions over many programs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import policy_loss, reference
from muonrl_kernels.metrics import SUMS
from tests.kernels.cases import Tensors, cast, token_inputs, values_and_grads
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

BOUNDS = torch.tensor([0, 40, 40, 41, 100, 155])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.5, "is_mode": "none"},
    {"loss_type": "cispo", "beta": 0.1, "kl": "k1"},
    {"is_mode": "icepop", "is_low": 0.8, "is_high": 1.3, "beta": 0.1, "kl": "k2", "entropy_coef": 0.05},
    {"is_level": "sequence", "is_mode": "icepop", "is_high": 3.0, "is_low": 0.3, "beta": 0.1},
    {"agg": "sequence_mean", "is_high": 1.1, "is_low": 0.9},
    {"agg": "constant", "normalizer": 100.0, "beta": 0.3, "kl_weighted": True},
    {"normalizer": torch.tensor(77.0), "log_ratio_clamp": 0.25, "clip_low": 0.9, "clip_high": 9.0},
]


def there(inputs: Tensors, device: torch.device) -> Tensors:
    return {k: v.to(device) for k, v in inputs.items()}


def ours(inputs: Tensors, device: torch.device, wrt: tuple[str, ...] = ("logp",), **options: Any) -> Any:
    bounds = options.pop("cu_seqlens", None)
    options["cu_seqlens"] = None if bounds is None else bounds.to(device)
    results = values_and_grads(policy_loss, there(inputs, device), wrt, backend="triton", **options)
    return tuple(r.cpu() for r in results)


def metrics_of(inputs: Tensors, device: torch.device, **options: Any) -> dict[str, float]:
    return policy_loss(**there(inputs, device), backend="triton", **options)[1].as_dict()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 8.0])
def test_loss_and_gradients_against_fp64(
    triton_device: torch.device, options: dict[str, Any], spread: float
) -> None:
    inputs = cast(token_inputs(155, spread=spread), torch.float32)
    wrt = ("logp", "entropy") if options.get("entropy_coef") else ("logp",)
    arguments = {**options, "cu_seqlens": BOUNDS}
    truth = values_and_grads(reference.policy_loss, cast(inputs, torch.float64), wrt, **arguments)
    eager = values_and_grads(reference.policy_loss, inputs, wrt, **arguments)
    for name, a, b, c in zip(
        ("loss", *wrt), ours(inputs, triton_device, wrt, **arguments), eager, truth, strict=True
    ):
        assert_as_good_as(a, b, c, what=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_programs_add_up(triton_device: torch.device, dtype: torch.dtype) -> None:
    inputs = cast(token_inputs(3, 1201, spread=1.0), dtype)
    truth = values_and_grads(reference.policy_loss, cast(inputs, torch.float64), ("logp",), beta=0.1)
    loss, grad = ours(inputs, triton_device, beta=0.1)
    assert grad.dtype == dtype and grad.shape == (3, 1201) and loss.dtype == torch.float32
    assert relative_error(loss, truth[0]) < 1e-6
    assert relative_error(grad, truth[1]) < (1e-6 if dtype == torch.float32 else 2**-10)
    again = ours(inputs, triton_device, beta=0.1)
    assert_exactly(again[0], loss)


def definitions(inputs: Tensors, loss: float, low: float, high: float, dual: float, w_high: float) -> Any:
    """Every metric from its definition, in fp64, over the valid tokens."""
    x = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    valid = x["mask"] & x["rollout_logp"].isfinite() & x["old_logp"].isfinite()
    logp, old, rollout, ref, a, entropy = (
        x[k][valid] for k in ("logp", "old_logp", "rollout_logp", "ref_logp", "advantages", "entropy")
    )
    r, raw = (logp - old).exp(), (old - rollout).exp()
    w = raw.clamp(max=w_high)
    means = {
        "clip_low": (a < 0) & (r < low),
        "clip_high": (a > 0) & (r > high),
        "clip_dual": (a < 0) & (r > dual),
        "w_truncated": raw > w_high,
        "mean_w": w,
        "mean_ratio": r,
        "entropy": entropy,
        "abs_delta": (logp - old).abs(),
    }
    for name, z in (("theta_old", logp - old), ("old_rollout", old - rollout), ("ref", ref - logp)):
        means |= {f"k1_{name}": -z, f"k2_{name}": z**2 / 2, f"k3_{name}": z.expm1() - z}
    found = {name: values.double().mean().item() for name, values in means.items()}
    counts = {"n": int(valid.sum()), "dropped": int((x["mask"] & ~valid).sum()), "loss": loss}
    ess = (w.sum() ** 2 / (len(w) * (w**2).sum())).item()
    return {**found, **counts, "ess": ess, "min_ratio": r.min().item(), "max_ratio": r.max().item()}


@pytest.mark.parametrize("spread", [0.02, 0.6])
def test_every_metric_is_its_definition(triton_device: torch.device, spread: float) -> None:
    inputs = cast(token_inputs(5, 211, spread=spread), torch.float32)
    inputs["mask"][0, :3] = True
    inputs["rollout_logp"][0, 0], inputs["rollout_logp"][0, 1] = -math.inf, math.nan
    inputs["old_logp"][0, 2] = math.inf
    options = {"clip_low": 0.01, "clip_high": 0.02, "dual_clip": 1.03, "is_high": 1.01, "beta": 0.1}
    truth = reference.policy_loss(**cast(inputs, torch.float64), **options).item()
    expected = definitions(inputs, truth, 1 - 0.01, 1 + 0.02, 1.03, 1.01)
    assert all(0 < expected[k] < 1 for k in ("clip_low", "clip_high", "clip_dual", "w_truncated"))
    assert expected["dropped"] == 3
    values = metrics_of(inputs, triton_device, **options)
    assert set(values) == set(expected)
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=3e-6), name


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "dual", "count"),
    [(1.0, 0.5, None, "clip_high"), (-1.0, -0.5, None, "clip_low"), (-1.0, 2.0, 3.0, "clip_dual")],
)
def test_clipped_tokens_have_exactly_no_gradient(
    triton_device: torch.device, advantage: float, log_ratio: float, dual: float | None, count: str
) -> None:
    row = torch.full((2,), advantage)
    inputs = {"logp": torch.tensor([-1.0, -1.0]), "old_logp": torch.tensor([-1.0 - log_ratio, -1.0])}
    inputs |= {"advantages": row, "mask": row.bool()}
    _, grad = ours(inputs, triton_device, dual_clip=dual)
    assert grad[0].item() == 0.0 and grad[1].item() == -advantage / 2
    assert metrics_of(inputs, triton_device, dual_clip=dual)[count] == 0.5


def test_weights_are_detached(triton_device: torch.device) -> None:
    inputs = there(cast(token_inputs(20), torch.float32), triton_device)
    inputs = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    policy_loss(**inputs, beta=0.1, backend="triton")[0].backward()
    assert inputs["logp"].grad is not None and inputs["logp"].grad.any()
    assert all(inputs[k].grad is None for k in ("old_logp", "rollout_logp", "ref_logp", "advantages"))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options", [{"entropy_coef": 0.1}, {"is_level": "sequence"}, {"beta": 0.1, "agg": "sequence_mean"}]
)
def test_poison_in_masked_slots_changes_no_bit(
    triton_device: torch.device, poison: float, options: dict[str, Any]
) -> None:
    clean = cast(token_inputs(6, 117), torch.float32)
    mask = clean["mask"]
    dirty = {k: torch.where(mask, v, poison) if v.is_floating_point() else v for k, v in clean.items()}
    for a, b in zip(
        ours(dirty, triton_device, **options), ours(clean, triton_device, **options), strict=True
    ):
        assert_exactly(a, b)
    both = [policy_loss(**there(x, triton_device), backend="triton", **options)[1] for x in (dirty, clean)]
    assert_exactly(both[0].sums, both[1].sums)
    assert_exactly(both[0].extrema, both[1].extrema)


@pytest.mark.parametrize("field", ["rollout_logp", "old_logp"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_with_a_non_finite_sampling_probability_are_dropped(
    triton_device: torch.device, field: str, bad: float
) -> None:
    inputs = cast(token_inputs(30), torch.float32)
    first = int(inputs["mask"].nonzero()[0])
    without = {**inputs, "mask": inputs["mask"].clone()}
    without["mask"][first] = False
    inputs[field][first] = bad
    for a, b in zip(ours(inputs, triton_device), ours(without, triton_device), strict=True):
        assert_exactly(a, b)
    values = metrics_of(inputs, triton_device)
    assert values["dropped"] == 1 and values["n"] == without["mask"].sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [0, 8])
def test_nothing_valid(triton_device: torch.device, options: dict[str, Any], count: int) -> None:
    inputs = cast(token_inputs(2, 4), torch.float32)
    inputs = {k: v.reshape(-1)[:count] for k, v in inputs.items()}
    inputs["mask"] = torch.zeros(count, dtype=torch.bool)
    inputs["logp"] = torch.full((count,), math.nan)
    arguments = {**options, "cu_seqlens": torch.tensor([0, count])}
    loss, grad = ours(inputs, triton_device, **arguments)
    assert loss.item() == 0.0 and torch.equal(grad, torch.zeros(count))
    arguments["cu_seqlens"] = arguments["cu_seqlens"].to(triton_device)
    values = metrics_of(inputs, triton_device, **arguments)
    assert values["n"] == 0 and all(math.isfinite(v) for v in values.values())


def test_ratios_beyond_the_clamp_stay_finite_and_nothing_moves(triton_device: torch.device) -> None:
    inputs = {
        "logp": torch.tensor([0.0, -500.0, -1.0, 0.0]),
        "old_logp": torch.tensor([-500.0, 0.0, -1.0, -19.0]),
        "advantages": torch.tensor([-1.0, 1.0, 1.0, -1.0]),
        "mask": torch.ones(4, dtype=torch.bool),
        "rollout_logp": torch.tensor([-900.0, 900.0, -1.0, -19.0]),
        "entropy": torch.ones(4),
    }
    loss, grad = ours(inputs, triton_device)
    truth = values_and_grads(reference.policy_loss, cast(inputs, torch.float64), ("logp",))
    assert relative_error(loss, truth[0]) < 1e-6 and relative_error(grad, truth[1]) < 1e-6
    assert (grad == 0).tolist() == [True, True, False, False]
    assert all(math.isfinite(v) for v in metrics_of(inputs, triton_device).values())


@pytest.mark.parametrize("loss_type", ["ppo", "cispo"])
@pytest.mark.parametrize("field", ["logp", "advantages"])
def test_a_nan_in_a_valid_token_is_not_hidden(
    triton_device: torch.device, field: str, loss_type: Any
) -> None:
    inputs = cast(token_inputs(5), torch.float32)
    inputs["mask"] = torch.ones(5, dtype=torch.bool)
    inputs[field][3] = math.nan
    assert ours(inputs, triton_device, loss_type=loss_type)[0].isnan()


def test_micro_batches_with_the_whole_updates_normalizer_add_up(triton_device: torch.device) -> None:
    inputs = cast(token_inputs(700), torch.float32)
    count = inputs["mask"].sum().float().to(triton_device)
    whole = ours(inputs, triton_device)
    parts = [
        ours({k: v[s] for k, v in inputs.items()}, triton_device, normalizer=count)
        for s in (slice(0, 13), slice(13, 600), slice(600, 700))
    ]
    assert relative_error(torch.stack([p[0] for p in parts]).sum(), whole[0]) < 1e-6
    assert relative_error(torch.cat([p[1] for p in parts]), whole[1]) < 1e-6


def test_backward_scales_and_may_run_twice(triton_device: torch.device) -> None:
    inputs = there(cast(token_inputs(12), torch.float32), triton_device)
    logp = inputs.pop("logp").requires_grad_()
    loss, _ = policy_loss(logp, **inputs, backend="triton")
    (once,) = torch.autograd.grad(loss, logp, retain_graph=True)
    (scaled,) = torch.autograd.grad(3.0 * loss, logp, retain_graph=True)
    (again,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(scaled, 3 * once)
    assert_exactly(again, once)


def test_what_has_no_kernel_is_refused_by_name(triton_device: torch.device) -> None:
    inputs = there(token_inputs(3, 4), triton_device)
    with pytest.raises(RuntimeError, match=r"policy_loss in torch\.float64"):
        policy_loss(**inputs, backend="triton")
    with pytest.raises(RuntimeError, match="policy_loss in loss_type gspo"):
        policy_loss(**cast(inputs, torch.float32), loss_type="gspo", backend="triton")
    assert policy_loss(**inputs, loss_type="gspo")[0].isfinite()


def test_the_loss_is_among_the_sums(triton_device: torch.device) -> None:
    inputs = there(cast(token_inputs(30), torch.float32), triton_device)
    loss, metrics = policy_loss(**inputs, backend="triton")
    stored: Tensor = metrics.sums[SUMS.index("loss")]
    assert stored.item() == loss.item()

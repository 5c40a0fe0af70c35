"""The elementwise loss: options against fp64 autograd, exact zeros, poison, invariances."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl_kernels import policy_loss, reference
from tests.kernels.cases import cast, token_inputs, values_and_grads
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.5},
    {"loss_type": "cispo"},
    {"loss_type": "gspo"},
    {"loss_type": "gspo", "clip_low": 3e-2, "clip_high": 4e-2, "agg": "sequence_mean", "dual_clip": 1.02},
    {"is_mode": "none"},
    {"is_mode": "icepop", "is_low": 0.8, "is_high": 1.3},
    {"is_high": 1.1, "is_low": 0.9},
    {"is_level": "sequence"},
    {"is_mode": "icepop", "is_level": "sequence", "is_high": 3.0, "is_low": 0.3},
    {"agg": "sequence_mean"},
    {"agg": "sequence_mean", "normalizer": 11},
    {"agg": "constant", "normalizer": 100.0},
    {"normalizer": torch.tensor(77.0)},
    {"beta": 0.1},
    {"beta": 0.1, "kl": "k1"},
    {"beta": 0.3, "kl_weighted": True, "clip_high": 0.05},
    {"beta": 0.3, "kl": "k2", "kl_weighted": True, "loss_type": "gspo"},
    {"beta": 0.1, "kl": "k2", "entropy_coef": 0.05},
    {"log_ratio_clamp": 0.25, "clip_low": 0.9, "clip_high": 9.0},
]
LAYOUTS: list[tuple[tuple[int, ...], Any]] = [
    ((5, 31), None),
    ((155,), torch.tensor([0, 40, 40, 41, 100, 155])),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "bounds"), LAYOUTS, ids=["rows", "packed"])
def test_loss_and_gradients_against_fp64(
    options: dict[str, Any], shape: tuple[int, ...], bounds: Any
) -> None:
    inputs = token_inputs(*shape)
    wrt = ("logp", "entropy") if options.get("entropy_coef") else ("logp",)
    arguments = {**options, "cu_seqlens": bounds}
    single = cast(inputs, torch.float32)
    truth = values_and_grads(reference.policy_loss, cast(single, torch.float64), wrt, **arguments)
    exact = values_and_grads(policy_loss, cast(single, torch.float64), wrt, **arguments)
    ours = values_and_grads(policy_loss, single, wrt, **arguments)
    eager = values_and_grads(reference.policy_loss, single, wrt, **arguments)
    for name, a, b, c, d in zip(("loss", *wrt), ours, eager, exact, truth, strict=True):
        assert c.dtype == torch.float64 and relative_error(c, d) < 1e-13, name
        assert_as_good_as(a, b, d, what=name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    options=st.fixed_dictionaries(
        {
            "loss_type": st.sampled_from(["ppo", "cispo", "gspo"]),
            "clip_low": st.floats(0, 0.9),
            "clip_high": st.floats(0, 2),
            "is_mode": st.sampled_from(["tis", "icepop", "none"]),
            "is_level": st.sampled_from(["token", "sequence"]),
            "is_high": st.floats(1, 5),
            "is_low": st.none() | st.floats(0, 1),
            "agg": st.sampled_from(["token_mean", "sequence_mean"]),
            "beta": st.sampled_from([0.0, 0.3]),
            "kl": st.sampled_from(["k1", "k2", "k3"]),
        }
    ),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_options(options: dict[str, Any], spread: float, seed: int) -> None:
    inputs = token_inputs(4, 9, spread=spread, seed=seed)
    truth = values_and_grads(reference.policy_loss, inputs, ("logp",), **options)
    ours = values_and_grads(policy_loss, inputs, ("logp",), **options)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12 * float(b.abs().max()))


def test_gradcheck() -> None:
    inputs = token_inputs(3, 5, spread=0.05)
    rest = {k: v for k, v in inputs.items() if k not in ("logp", "entropy")}

    def loss(logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_loss(logp, entropy=entropy, entropy_coef=0.2, beta=0.1, **rest)[0]

    leaves = [inputs[k].clone().requires_grad_() for k in ("logp", "entropy")]
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "dual", "count"),
    [(1.0, 0.5, None, "clip_high"), (-1.0, -0.5, None, "clip_low"), (-1.0, 2.0, 3.0, "clip_dual")],
)
def test_clipped_tokens_have_exactly_no_gradient(
    advantage: float, log_ratio: float, dual: float | None, count: str
) -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0 - log_ratio, -1.0])
    loss, metrics = policy_loss(logp, old, torch.full((2,), advantage), torch.ones(2).bool(), dual_clip=dual)
    loss.backward()
    assert logp.grad is not None and logp.grad[0].item() == 0.0 and logp.grad[1].item() == -advantage / 2
    assert metrics.as_dict()[count] == 0.5


def test_the_other_side_of_the_clip_has_a_gradient() -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old, a = torch.tensor([-1.5, -0.5]), torch.tensor([-1.0, 1.0])
    loss, _ = policy_loss(logp, old, a, torch.ones(2).bool())
    loss.backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor([math.exp(0.5), -math.exp(-0.5)]) / 2)


def test_weights_are_detached() -> None:
    inputs = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in token_inputs(20).items()}
    loss, _ = policy_loss(**inputs, beta=0.1)
    loss.backward()
    assert inputs["logp"].grad is not None and inputs["logp"].grad.abs().sum() > 0
    assert all(inputs[k].grad is None for k in ("old_logp", "rollout_logp", "ref_logp", "advantages"))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "gspo", "is_level": "sequence"}, {"beta": 0.1, "agg": "sequence_mean"}]
)
def test_poison_in_masked_slots_changes_no_bit(poison: float, options: dict[str, Any]) -> None:
    clean = cast(token_inputs(6, 17), torch.float32)
    dirty = {
        k: torch.where(clean["mask"], v, poison) if v.is_floating_point() else v for k, v in clean.items()
    }
    for a, b in zip(
        values_and_grads(policy_loss, dirty, ("logp",), **options),
        values_and_grads(policy_loss, clean, ("logp",), **options),
        strict=True,
    ):
        assert_exactly(a, b)
    both = [policy_loss(**x, **options)[1] for x in (dirty, clean)]
    assert_exactly(both[0].sums, both[1].sums)
    assert_exactly(both[0].extrema, both[1].extrema)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["rollout_logp", "old_logp"])
def test_rows_with_a_non_finite_sampling_probability_are_dropped(bad: float, field: str) -> None:
    inputs = cast(token_inputs(3, 10), torch.float32)
    first = inputs["mask"].nonzero()[0]
    without = {**inputs, "mask": inputs["mask"].clone()}
    without["mask"][tuple(first)] = False
    inputs[field][tuple(first)] = bad
    for a, b in zip(*(values_and_grads(policy_loss, x, ("logp",)) for x in (inputs, without)), strict=True):
        assert_exactly(a, b)
    values = policy_loss(**inputs)[1].as_dict()
    assert values["dropped"] == 1 and values["n"] == without["mask"].sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_valid(options: dict[str, Any]) -> None:
    inputs = cast(token_inputs(2, 4), torch.float32)
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    inputs["logp"] = torch.full((2, 4), math.nan)
    loss, grad = values_and_grads(policy_loss, inputs, ("logp",), **options)
    assert loss.item() == 0.0 and torch.equal(grad, torch.zeros(2, 4))
    values = policy_loss(**inputs, **options)[1].as_dict()
    assert values["n"] == 0 and all(math.isfinite(v) for v in values.values())


def test_no_tokens_at_all() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, metrics = policy_loss(empty, empty.detach(), empty.detach(), empty.detach().bool())
    loss.backward()
    assert loss.item() == 0.0 and metrics.as_dict()["n"] == 0


def test_huge_and_tiny_ratios_stay_finite_and_outside_the_clamp_nothing_moves() -> None:
    logp = torch.tensor([0.0, -500.0, -1.0, 0.0], requires_grad=True)
    old = torch.tensor([-500.0, 0.0, -1.0, -19.0])
    a = torch.tensor([-1.0, 1.0, 1.0, -1.0])
    rollout = torch.tensor([-900.0, 900.0, -1.0, -19.0])
    loss, metrics = policy_loss(
        logp, old, a, torch.ones(4).bool(), rollout_logp=rollout, entropy=torch.ones(4)
    )
    loss.backward()
    assert loss.isfinite() and logp.grad is not None
    assert logp.grad[0] == 0 and logp.grad[1] == 0 and logp.grad[2] != 0 and logp.grad[3] != 0
    assert all(math.isfinite(v) for v in metrics.as_dict().values())


@pytest.mark.parametrize("agg", ["token_mean", "sequence_mean"])
def test_micro_batches_with_the_whole_updates_normalizer_add_up(agg: Any) -> None:
    inputs = token_inputs(8, 13)
    whole, grad = values_and_grads(policy_loss, inputs, ("logp",), agg=agg)
    normalizer = inputs["mask"].sum() if agg == "token_mean" else 8
    parts = [
        values_and_grads(
            policy_loss, {k: v[rows] for k, v in inputs.items()}, ("logp",), agg=agg, normalizer=normalizer
        )
        for rows in (slice(0, 3), slice(3, 4), slice(4, 8))
    ]
    assert sum(p[0] for p in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    assert relative_error(torch.cat([p[1] for p in parts]), grad) < 1e-12


def test_backward_scales_and_may_run_twice() -> None:
    inputs = cast(token_inputs(12), torch.float32)
    logp = inputs.pop("logp").requires_grad_()
    loss, _ = policy_loss(logp, **inputs)
    (once,) = torch.autograd.grad(loss, logp, retain_graph=True)
    (scaled,) = torch.autograd.grad(3.0 * loss, logp, retain_graph=True)
    (again,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(scaled, 3 * once)
    assert_exactly(again, once)


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    inputs = token_inputs(40)
    half = cast(inputs, torch.bfloat16)
    loss, grad = values_and_grads(policy_loss, half, ("logp",))
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    truth = values_and_grads(reference.policy_loss, cast(half, torch.float64), ("logp",))
    assert relative_error(loss, truth[0]) < 1e-6 and relative_error(grad, truth[1]) < 2**-8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "grpo"}, "loss_type"),
        ({"is_mode": "mask"}, "is_mode"),
        ({"is_level": "turn"}, "is_level"),
        ({"agg": "mean"}, "agg"),
        ({"kl": "k4"}, "kl"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"dual_clip": 3.0, "loss_type": "cispo"}, "dual_clip"),
        ({"is_high": 0.0}, "is_high"),
        ({"is_low": 3.0}, "is_low"),
        ({"log_ratio_clamp": 0.0}, "log_ratio_clamp"),
        ({"agg": "constant"}, "normalizer"),
        ({"normalizer": torch.ones(2)}, "one-element"),
        ({"beta": 0.1}, "ref_logp"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"loss_type": "gspo"}, "cu_seqlens"),
        ({"agg": "sequence_mean"}, "cu_seqlens"),
        ({"is_level": "sequence", "rollout_logp": torch.zeros(4)}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens must run"),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, "cu_seqlens is"),
        ({"entropy": torch.zeros(3)}, "entropy has shape"),
        ({"rollout_logp": torch.zeros(3)}, "rollout_logp has shape"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    row = torch.zeros(4)
    with pytest.raises(ValueError, match=text):
        policy_loss(row, row, row, row.bool(), **options)


def test_unknown_option() -> None:
    row = torch.zeros(4)
    with pytest.raises(TypeError, match="clip_hi"):
        policy_loss(row, row, row, row.bool(), clip_hi=0.3)  # type: ignore[call-arg]

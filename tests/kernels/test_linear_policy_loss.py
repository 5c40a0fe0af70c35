"""The loss through the head: gradients against fp64 and eager PyTorch, compaction, chunks, transforms of the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import linear_logprob, linear_policy_loss, policy_loss, reference
from tests.kernels.cases import Tensors, cast, linear_inputs, values_and_grads
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

WRT = ("hidden", "weight", "bias")
BOUNDS = torch.tensor([0, 60, 61, 61, 200, 257])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "cispo", "entropy_coef": 0.03},
    {"loss_type": "gspo", "agg": "sequence_mean", "entropy_coef": 0.03},
    {"loss_type": "gspo", "beta": 0.1},
    {"is_mode": "icepop", "is_low": 0.7, "is_level": "sequence", "dual_clip": 1.5},
    {"beta": 0.1, "kl": "k2", "agg": "constant", "normalizer": 300.0},
    {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3, "entropy_coef": 0.1},
    {"softcap": 3.0, "agg": "sequence_mean"},
]


def compare(inputs: Tensors, dtype: torch.dtype, **options: Any) -> None:
    """Loss and all gradients by the rule, on inputs rounded to `dtype` first."""
    heavy = {"hidden", "weight", "bias"}
    rounded = {
        k: v.to(dtype) if k in heavy else (v.float() if v.is_floating_point() else v)
        for k, v in inputs.items()
    }
    truth = values_and_grads(reference.linear_policy_loss, cast(rounded, torch.float64), WRT, **options)
    eager = values_and_grads(reference.linear_policy_loss, rounded, WRT, **options)
    ours = values_and_grads(linear_policy_loss, rounded, WRT, **options)
    assert ours[0].dtype == torch.float32
    for name, a, b, c in zip(("loss", *WRT), ours, eager, truth, strict=True):
        assert_as_good_as(a, b, c, what=name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_exact_in_fp64(options: dict[str, Any]) -> None:
    inputs = linear_inputs(257, 20, 101)
    arguments = {**options, "cu_seqlens": BOUNDS, "vocab_size": 97}
    inputs["targets"] %= 97
    truth = values_and_grads(reference.linear_policy_loss, inputs, WRT, **arguments)
    for rows in (None, 1, 50):
        ours = values_and_grads(linear_policy_loss, inputs, WRT, chunk_rows=rows, **arguments)
        for name, a, b in zip(("loss", *WRT), ours, truth, strict=True):
            assert relative_error(a, b) < 1e-12, (name, rows)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes_by_the_rule(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(linear_inputs(257, 252, 1021), dtype, cu_seqlens=BOUNDS, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_certain_of_their_token(dtype: torch.dtype) -> None:
    inputs = linear_inputs(129, 64, 211, sharp=30.0)
    logp = linear_logprob(inputs["hidden"], inputs["weight"], inputs["targets"])[0]
    assert (logp > -1e-3).any() and (logp < -30).any()
    compare(inputs, dtype, log_ratio_clamp=200.0)


def test_bf16_weight_gradient_does_not_depend_on_the_number_of_chunks() -> None:
    inputs = cast(linear_inputs(600, 16, 31), torch.float32)
    inputs.update({k: inputs[k].bfloat16() for k in WRT})
    truth = values_and_grads(reference.linear_policy_loss, cast(inputs, torch.float64), WRT)[2]
    one, many = (values_and_grads(linear_policy_loss, inputs, WRT, chunk_rows=rows)[2] for rows in (600, 2))
    assert relative_error(many, truth) < 1.1 * relative_error(one, truth)


def test_it_is_policy_loss_of_linear_logprob() -> None:
    inputs = linear_inputs(90, 16, 33)
    head = {k: inputs.pop(k) for k in ("hidden", "weight", "targets", "bias")}
    logp, entropy, _ = linear_logprob(**head)
    apart = policy_loss(logp, entropy=entropy, **inputs)
    whole = linear_policy_loss(**head, **inputs)
    assert whole[0].item() == pytest.approx(apart[0].item(), rel=1e-12)
    assert whole[1].as_dict() == pytest.approx(apart[1].as_dict(), rel=1e-5)


def test_chunks_and_micro_batches_only_change_rounding() -> None:
    inputs = cast(linear_inputs(200, 24, 65), torch.float32)
    whole = values_and_grads(linear_policy_loss, inputs, WRT)
    metrics = linear_policy_loss(**inputs)[1].as_dict()
    for rows in (1, 7, 64, 199):
        assert linear_policy_loss(**inputs, chunk_rows=rows)[1].as_dict() == pytest.approx(metrics, rel=1e-5)
        for a, b in zip(
            values_and_grads(linear_policy_loss, inputs, WRT, chunk_rows=rows), whole, strict=True
        ):
            assert relative_error(a, b) < 2e-6
    shared = ("weight", "bias")
    count = inputs["mask"].sum().float()
    parts = [
        values_and_grads(
            linear_policy_loss,
            {k: v if k in shared else v[s] for k, v in inputs.items()},
            WRT,
            normalizer=count,
        )
        for s in (slice(0, 90), slice(90, 200))
    ]
    total = (
        parts[0][0] + parts[1][0],
        torch.cat([p[1] for p in parts]),
        parts[0][2] + parts[1][2],
        parts[0][3] + parts[1][3],
    )
    for a, b in zip(total, whole, strict=True):
        assert relative_error(a, b) < 2e-6


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_rows_are_never_looked_at(poison: float) -> None:
    clean = cast(linear_inputs(64, 12, 29), torch.float32)
    dirty = dict(clean)
    hidden = ~clean["mask"]
    for name in ("hidden", "old_logp", "advantages", "rollout_logp", "ref_logp"):
        where = hidden.unsqueeze(1) if name == "hidden" else hidden
        dirty[name] = torch.where(where, poison, clean[name])
    dirty["targets"] = torch.where(hidden, -100, clean["targets"])
    for a, b in zip(
        *(values_and_grads(linear_policy_loss, x, WRT, beta=0.1) for x in (dirty, clean)), strict=True
    ):
        assert_exactly(a, b)
    (metrics, same) = (linear_policy_loss(**x)[1] for x in (dirty, clean))
    assert_exactly(metrics.sums, same.sums)


def _products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the rows of every chunk that enters the gradient products."""
    from muonrl_kernels import linear_head

    seen: list[tuple[int, ...]] = []
    original = linear_head.Gradients.add

    def add(self: Any, head: Any, dz: Tensor, h: Tensor, rows: Tensor) -> None:
        seen.append(tuple(rows.tolist()))
        original(self, head, dz, h, rows)

    monkeypatch.setattr(linear_head.Gradients, "add", add)
    return seen


def test_only_rows_with_a_gradient_enter_the_gradient_products(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _products(monkeypatch)
    inputs = cast(linear_inputs(20, 6, 9), torch.float32)
    inputs["mask"] = torch.arange(20) % 2 == 0
    inputs["advantages"] = torch.where(torch.arange(20) % 4 == 0, inputs["advantages"], 0.0)
    values_and_grads(linear_policy_loss, inputs, WRT, clip_low=0.99, clip_high=100.0)
    assert seen == [(0, 4, 8, 12, 16)]
    seen.clear()
    values_and_grads(linear_policy_loss, inputs, WRT, clip_low=0.99, clip_high=100.0, entropy_coef=0.1)
    assert seen == [tuple(range(0, 20, 2))]
    seen.clear()
    inputs["advantages"] = torch.zeros(20)
    for g in values_and_grads(linear_policy_loss, inputs, WRT)[1:]:
        assert not g.any()
    assert seen == []


def test_without_gradients_nothing_is_computed_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _products(monkeypatch)
    inputs = cast(linear_inputs(20, 6, 9), torch.float32)
    leaves = {k: v.requires_grad_() if k in WRT else v for k, v in inputs.items()}
    with torch.no_grad():
        loss, _ = linear_policy_loss(**leaves)
    assert seen == [] and not loss.requires_grad
    frozen = {**leaves, "weight": leaves["weight"].detach()}
    loss, _ = linear_policy_loss(**frozen)
    loss.backward()
    assert (
        leaves["hidden"].grad is not None
        and leaves["bias"].grad is not None
        and leaves["weight"].grad is None
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "gspo", "cu_seqlens": torch.tensor([0, 5, 12])},
        {"agg": "sequence_mean", "cu_seqlens": torch.tensor([0, 12])},
    ],
)
def test_nothing_valid(options: dict[str, Any]) -> None:
    inputs = cast(linear_inputs(12, 6, 9), torch.float32)
    inputs["mask"] = torch.zeros(12, dtype=torch.bool)
    loss, *grads = values_and_grads(linear_policy_loss, inputs, WRT, **options)
    assert loss.item() == 0.0 and not any(g.any() for g in grads)
    values = linear_policy_loss(**inputs, **options)[1].as_dict()
    assert values["n"] == 0 and all(math.isfinite(v) for v in values.values())


def test_dropped_rows_are_counted() -> None:
    inputs = cast(linear_inputs(30, 6, 9), torch.float32)
    inputs["mask"] = torch.ones(30, dtype=torch.bool)
    inputs["rollout_logp"][3], inputs["rollout_logp"][7] = math.nan, -math.inf
    loss, *grads = values_and_grads(linear_policy_loss, inputs, WRT, clip_low=0.99, clip_high=100.0)
    assert loss.isfinite() and not grads[0][3].any() and not grads[0][7].any() and grads[0][4].any()
    values = linear_policy_loss(**inputs)[1].as_dict()
    assert (values["n"], values["dropped"]) == (28, 2)


def test_logits_of_minus_200_everywhere() -> None:
    inputs = cast(linear_inputs(10, 4, 7), torch.float32)
    inputs["weight"] = torch.zeros(7, 4)
    inputs["bias"] = torch.full((7,), -200.0)
    inputs["old_logp"] = torch.full((10,), -math.log(7))
    loss, metrics = linear_policy_loss(**inputs)
    values = metrics.as_dict()
    assert loss.isfinite() and values["entropy"] == pytest.approx(math.log(7), rel=1e-4)
    assert values["abs_delta"] < 1e-4


def test_banned_tokens_have_no_share_in_entropy_or_gradient() -> None:
    inputs = linear_inputs(10, 4, 7)
    inputs["targets"] %= 5
    inputs["bias"][5:] = -math.inf
    loss, d_hidden, d_weight, d_bias = values_and_grads(linear_policy_loss, inputs, WRT, entropy_coef=0.1)
    narrow = {**inputs, "weight": inputs["weight"][:5], "bias": inputs["bias"][:5]}
    expected = values_and_grads(linear_policy_loss, narrow, WRT, entropy_coef=0.1)
    for a, b in zip((loss, d_hidden, d_weight[:5], d_bias[:5]), expected, strict=True):
        assert relative_error(a, b) < 1e-12
    assert not d_weight[5:].any() and not d_bias[5:].any()


def test_padding_columns_do_not_exist() -> None:
    inputs = linear_inputs(10, 4, 7)
    inputs["targets"] %= 5
    inputs["weight"][5:] = math.nan
    inputs["bias"][5:] = math.nan
    loss, _, d_weight, d_bias = values_and_grads(linear_policy_loss, inputs, WRT, vocab_size=5, softcap=4.0)
    assert loss.isfinite() and not d_weight[5:].any() and not d_bias[5:].any() and d_weight[:5].any()


def test_temperature_by_row() -> None:
    inputs = linear_inputs(257, 20, 101)
    temperature = torch.rand(257, dtype=torch.float64) + 0.5
    arguments = {"temperature": temperature, "softcap": 5.0, "entropy_coef": 0.1}
    truth = values_and_grads(reference.linear_policy_loss, inputs, WRT, **arguments)
    ours = values_and_grads(linear_policy_loss, inputs, WRT, chunk_rows=40, **arguments)
    for a, b in zip(ours, truth, strict=True):
        assert relative_error(a, b) < 1e-12
    scalar = values_and_grads(linear_policy_loss, inputs, WRT, temperature=torch.tensor(0.7))
    for a, b in zip(scalar, values_and_grads(linear_policy_loss, inputs, WRT, temperature=0.7), strict=True):
        assert relative_error(a, b) < 1e-6


def test_backward_scales_and_may_run_twice() -> None:
    inputs = cast(linear_inputs(40, 8, 11), torch.float32)
    hidden = inputs.pop("hidden").requires_grad_()
    loss, _ = linear_policy_loss(hidden, **inputs)
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * torch.tensor(-2.5), hidden, retain_graph=True)
    (again,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(scaled, -2.5 * once)
    assert_exactly(again, once)


def test_autocast_and_mixed_dtypes_keep_fp32_statistics() -> None:
    inputs = cast(linear_inputs(50, 16, 23), torch.float32)
    plain = values_and_grads(linear_policy_loss, inputs, WRT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in zip(values_and_grads(linear_policy_loss, inputs, WRT), plain, strict=True):
            assert_exactly(a, b)
    mixed = values_and_grads(linear_policy_loss, {**inputs, "hidden": inputs["hidden"].bfloat16()}, WRT)
    assert [x.dtype for x in mixed] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    for a, b in zip(mixed, plain, strict=True):
        assert relative_error(a, b) < 0.05


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": torch.zeros(9, 5)}, "hidden must be"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets must be"),
        ({"targets": torch.full((12,), 9)}, "targets of valid rows"),
        ({"targets": torch.full((12,), -1)}, "targets of valid rows"),
        ({"bias": torch.zeros(4)}, "bias"),
        ({"old_logp": torch.zeros(3)}, "old_logp"),
        ({"vocab_size": 10}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"softcap": 0.0}, "softcap"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], text: str) -> None:
    inputs = cast(linear_inputs(12, 6, 9), torch.float32)
    with pytest.raises(ValueError, match=text):
        linear_policy_loss(**{**inputs, **change})


@pytest.mark.parametrize("options", [*OPTIONS[:3], {"beta": 0.1, "kl_weighted": True}], ids=str)
def test_on_policy_without_old_log_probabilities(options: dict[str, Any]) -> None:
    inputs = linear_inputs(61, 12, 40)
    inputs["mask"][3] = True
    del inputs["rollout_logp"]
    head = {k: inputs[k] for k in ("hidden", "weight", "targets", "bias")}
    arguments = {**options, "cu_seqlens": torch.tensor([0, 20, 61])}
    given = {**inputs, "old_logp": reference.linear_logprob(**head)[0]}
    truth = values_and_grads(reference.linear_policy_loss, given, WRT, **arguments)
    rest = {k: v for k, v in inputs.items() if k != "old_logp"}
    ours = values_and_grads(linear_policy_loss, rest, WRT, old_logp=None, **arguments)
    for name, a, b in zip(("loss", *WRT), ours, truth, strict=True):
        assert relative_error(a, b) < 1e-12, name
    metrics = linear_policy_loss(**rest, old_logp=None, **arguments)[1].as_dict()
    assert metrics["mean_ratio"] == metrics["max_ratio"] == 1.0 and metrics["abs_delta"] == 0.0
    logp, entropy, _ = linear_logprob(**head)
    tokens = {k: v for k, v in rest.items() if k not in head}
    apart, _ = policy_loss(logp, None, entropy=entropy, **tokens, **arguments)
    assert apart.item() == pytest.approx(truth[0].item(), rel=1e-12)
    with pytest.raises(ValueError, match="rollout_logp needs old_logp"):
        linear_policy_loss(**rest, old_logp=None, rollout_logp=given["old_logp"])

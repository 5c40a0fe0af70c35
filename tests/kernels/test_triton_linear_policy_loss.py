"""The loss through the head on Triton: gradients against fp64, compaction without a look at the device, edges, both paths."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import linear_logprob, linear_policy_loss, policy_loss, reference
from tests.kernels.cases import Tensors, cast, linear_inputs, values_and_grads
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

WRT = ("hidden", "weight", "bias")
SIZE = (27, 20, 133)  # the last block of a row has 5 columns
BOUNDS = torch.tensor([0, 10, 11, 11, 20, 27])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "cispo", "entropy_coef": 0.03},
    {"loss_type": "gspo", "agg": "sequence_mean", "entropy_coef": 0.03, "beta": 0.1},
    {"is_mode": "icepop", "is_low": 0.05, "is_high": 20.0, "is_level": "sequence", "dual_clip": 1.5},
    {"beta": 0.1, "kl": "k2", "agg": "constant", "normalizer": 300.0},
    {"beta": 0.1, "kl_weighted": True, "is_mode": "none"},
    {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3, "entropy_coef": 0.1, "agg": "sequence_mean"},
]


@pytest.fixture(params=["cublas", "fused"])
def head_path(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, triton_device: torch.device
) -> str:
    from muonrl_kernels import linear_triton

    path: str = request.param
    monkeypatch.setattr(linear_triton, "run_loss", partial(linear_triton.run_loss, head_path=path))
    return path


def there(inputs: Tensors, device: torch.device) -> Tensors:
    return {k: v.to(device) for k, v in inputs.items()}


def ours(inputs: Tensors, device: torch.device, **options: Any) -> tuple[Tensor, ...]:
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    results = values_and_grads(linear_policy_loss, there(inputs, device), WRT, backend="triton", **options)
    return tuple(r.cpu() for r in results)


def rounded(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    return {
        k: v.to(dtype) if k in WRT else (v.float() if v.is_floating_point() else v) for k, v in inputs.items()
    }


def compare(
    inputs: Tensors, dtype: torch.dtype, device: torch.device, rows: int | None = None, **options: Any
) -> None:
    """Loss and every gradient by the rule, on inputs rounded to `dtype` first; the tokens' losses do not cancel."""
    given = rounded({**inputs, "advantages": inputs["advantages"] + 1.5}, dtype)
    truth = values_and_grads(reference.linear_policy_loss, cast(given, torch.float64), WRT, **options)
    eager = values_and_grads(reference.linear_policy_loss, given, WRT, **options)
    found = ours(given, device, chunk_rows=rows, **options)
    assert found[0].dtype == torch.float32
    for name, a, b, c in zip(("loss", *WRT), found, eager, truth, strict=True):
        assert_as_good_as(a, b, c, what=name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_gradient_by_the_rule(triton_device: torch.device, options: dict[str, Any]) -> None:
    compare(linear_inputs(*SIZE), torch.float32, triton_device, rows=20, cu_seqlens=BOUNDS, **options)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[6]], ids=str)
def test_half_precision_by_the_rule(
    triton_device: torch.device, head_path: str, options: dict[str, Any]
) -> None:
    compare(linear_inputs(*SIZE), torch.float16, triton_device, cu_seqlens=BOUNDS, **options)


@pytest.mark.parametrize("head_path", ["fused"], indirect=True)
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4], {**OPTIONS[6], "temperature": 0.6}], ids=str)
def test_tiles_of_logits_by_the_rule(
    triton_device: torch.device, head_path: str, options: dict[str, Any]
) -> None:
    compare(linear_inputs(*SIZE), torch.float32, triton_device, rows=21, cu_seqlens=BOUNDS, **options)


def test_odd_sizes(triton_device: torch.device) -> None:
    inputs = linear_inputs(257, 252, 1021)
    inputs["mask"] &= torch.arange(257) % 3 == 0
    compare(inputs, torch.float32, triton_device, entropy_coef=0.01)


@pytest.mark.parametrize("sharp", [30.0, 100.0])
def test_rows_that_are_certain_of_their_token(
    triton_device: torch.device, head_path: str, sharp: float
) -> None:
    inputs = linear_inputs(41, 32, 140, sharp=sharp)
    logp = reference.linear_logprob(*(inputs[k] for k in ("hidden", "weight", "targets")))[0]
    assert (logp > -1e-3).any() and (logp < -30).any()
    compare(inputs, torch.float32, triton_device, log_ratio_clamp=80.0, entropy_coef=0.01)


def test_certain_rows_keep_their_gradient(triton_device: torch.device, head_path: str) -> None:
    """1 - p_y = 2e-9 is lost in fp32 if it is computed as a difference."""
    inputs = rounded(linear_inputs(2, 4, 6), torch.float32)
    inputs["hidden"] = torch.eye(2, 4)
    inputs["weight"] = torch.zeros(6, 4)
    inputs["weight"][3, :2] = 21.6
    inputs["bias"], inputs["targets"] = torch.zeros(6), torch.tensor([3, 3])
    inputs["old_logp"], inputs["mask"] = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    truth = values_and_grads(reference.linear_policy_loss, cast(inputs, torch.float64), WRT)
    for a, b in zip(ours(inputs, triton_device)[1:], truth[1:], strict=True):
        assert relative_error(a, b) < 1e-5


def _masked_rows_are_never_looked_at(device: torch.device, poison: float) -> None:
    clean = rounded(linear_inputs(17, 12, 29), torch.float32)
    hidden = ~clean["mask"]
    dirty = dict(clean)
    for name in ("hidden", "old_logp", "advantages", "rollout_logp", "ref_logp"):
        where = hidden.unsqueeze(1) if name == "hidden" else hidden
        dirty[name] = torch.where(where, poison, clean[name])
    dirty["targets"] = torch.where(hidden, -100, clean["targets"])
    temperature = torch.where(hidden, poison, 1.1)
    pairs = ((dirty, temperature), (clean, torch.tensor(1.1).expand(17)))
    a, b = (ours(x, device, beta=0.1, temperature=t, chunk_rows=7) for x, t in pairs)
    for x, y in zip(a, b, strict=True):
        assert_exactly(x, y)
    first, second = (linear_policy_loss(**there(x, device), backend="triton")[1] for x, _ in pairs)
    assert_exactly(first.sums, second.sums)
    assert_exactly(first.extrema, second.extrema)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_rows_are_never_looked_at(triton_device: torch.device, poison: float) -> None:
    _masked_rows_are_never_looked_at(triton_device, poison)


@pytest.mark.parametrize("head_path", ["fused"], indirect=True)
def test_masked_rows_are_never_looked_at_in_tiles(triton_device: torch.device, head_path: str) -> None:
    _masked_rows_are_never_looked_at(triton_device, math.nan)


def test_gspo_does_not_look_at_masked_rows(triton_device: torch.device) -> None:
    clean = rounded(linear_inputs(12, 8, 19), torch.float32)
    dirty = {**clean, "hidden": torch.where(clean["mask"].unsqueeze(1), clean["hidden"], torch.nan)}
    options = {"loss_type": "gspo", "cu_seqlens": torch.tensor([0, 5, 12])}
    for a, b in zip(*(ours(x, triton_device, **options) for x in (dirty, clean)), strict=True):
        assert_exactly(a, b)


def test_chunks_bounds_and_micro_batches_only_change_rounding(
    triton_device: torch.device, head_path: str
) -> None:
    inputs = rounded(linear_inputs(20, 12, 33), torch.float32)
    inputs["advantages"] += 1.5
    whole = ours(inputs, triton_device)
    valid = int(inputs["mask"].sum())
    for rows, bound in ((3, None), (7, valid), (None, valid + 1)):
        found = ours(inputs, triton_device, chunk_rows=rows, valid_rows=bound)
        for a, b in zip(found, whole, strict=True):
            assert relative_error(a, b) < 2e-6
    normalizer = inputs["mask"].sum().float()
    slices = (slice(0, 7), slice(7, 20))
    parts = [
        ours(
            {k: v if k in ("weight", "bias") else v[s] for k, v in inputs.items()},
            triton_device,
            normalizer=normalizer,
        )
        for s in slices
    ]
    total = [parts[0][i] + parts[1][i] for i in (0, 2, 3)]
    for a, b in zip(total, [whole[i] for i in (0, 2, 3)], strict=True):
        assert relative_error(a, b) < 2e-6
    assert relative_error(torch.cat([p[1] for p in parts]), whole[1]) < 2e-6


def test_a_bound_that_is_too_small_is_no_silent_loss_of_tokens(triton_device: torch.device) -> None:
    inputs = rounded(linear_inputs(12, 6, 9), torch.float32)
    few = int(inputs["mask"].sum()) - 1
    loss, _ = linear_policy_loss(**there(inputs, triton_device), backend="triton", valid_rows=few)
    assert loss.isnan()
    with pytest.raises(ValueError, match="valid_rows"):
        linear_policy_loss(**there(inputs, triton_device), backend="triton", valid_rows=-1)


@pytest.mark.parametrize("options", [{}, {"loss_type": "gspo", "cu_seqlens": torch.tensor([0, 5, 12])}])
def test_nothing_valid(triton_device: torch.device, head_path: str, options: dict[str, Any]) -> None:
    inputs = rounded(linear_inputs(12, 6, 9), torch.float32)
    inputs["mask"] = torch.zeros(12, dtype=torch.bool)
    inputs["hidden"] = torch.full((12, 6), math.nan)
    loss, *grads = ours(inputs, triton_device, **options)
    assert loss.item() == 0.0 and not any(g.any() for g in grads)
    bounds = {k: v.to(triton_device) if isinstance(v, Tensor) else v for k, v in options.items()}
    values = linear_policy_loss(**there(inputs, triton_device), backend="triton", **bounds)[1].as_dict()
    assert values["n"] == 0 and all(math.isfinite(v) for v in values.values())


def test_no_rows(triton_device: torch.device) -> None:
    inputs = {k: v[:0] if k not in WRT[1:] else v for k, v in linear_inputs(3, 4, 6).items()}
    loss, *grads = ours(rounded(inputs, torch.float32), triton_device)
    assert loss.item() == 0.0 and not any(g.any() for g in grads)


def test_dropped_rows_are_counted(triton_device: torch.device) -> None:
    inputs = rounded(linear_inputs(20, 6, 9), torch.float32)
    inputs["mask"] = torch.ones(20, dtype=torch.bool)
    inputs["rollout_logp"][3], inputs["rollout_logp"][7] = math.nan, -math.inf
    loss, *grads = ours(inputs, triton_device, clip_low=0.99, clip_high=100.0)
    assert loss.isfinite() and not grads[0][3].any() and not grads[0][7].any() and grads[0][4].any()
    values = linear_policy_loss(**there(inputs, triton_device), backend="triton")[1].as_dict()
    assert (values["n"], values["dropped"]) == (18, 2)


def test_metrics_are_those_of_the_elementwise_loss_in_fp64(
    triton_device: torch.device, head_path: str
) -> None:
    inputs = rounded(linear_inputs(*SIZE), torch.float32)
    options = {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.2, "is_high": 1.1, "beta": 0.1}
    exact = cast(inputs, torch.float64)
    head = {k: exact.pop(k) for k in (*WRT, "targets")}
    logp, entropy, _ = reference.linear_logprob(**head)
    expected = policy_loss(logp, entropy=entropy, **exact, **options)[1].as_dict()
    values = linear_policy_loss(**there(inputs, triton_device), backend="triton", **options)[1].as_dict()
    assert all(expected[k] > 0 for k in ("clip_low", "clip_high", "clip_dual", "w_truncated"))
    assert values == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_logits_of_minus_200_everywhere(triton_device: torch.device, head_path: str) -> None:
    inputs = rounded(linear_inputs(10, 4, 7), torch.float32)
    inputs["weight"], inputs["bias"] = torch.zeros(7, 4), torch.full((7,), -200.0)
    inputs["old_logp"] = torch.full((10,), -math.log(7))
    loss, metrics = linear_policy_loss(**there(inputs, triton_device), backend="triton")
    values = metrics.as_dict()
    assert loss.isfinite() and values["entropy"] == pytest.approx(math.log(7), rel=1e-6)
    assert values["abs_delta"] < 1e-6


def test_padding_and_banned_columns_do_not_exist(triton_device: torch.device, head_path: str) -> None:
    inputs = rounded(linear_inputs(14, 4, 150), torch.float32)
    inputs["targets"] %= 5
    inputs["weight"][140:], inputs["bias"][140:] = math.nan, math.nan
    inputs["bias"][8:136] = -math.inf  # the whole second block of a row among them
    options = {"entropy_coef": 0.1, "logit_scale": 0.9}
    loss, d_hidden, d_weight, d_bias = ours(inputs, triton_device, vocab_size=140, **options)
    kept = torch.tensor([*range(8), *range(136, 140)])
    narrow = {**inputs, "weight": inputs["weight"][kept], "bias": inputs["bias"][kept]}
    truth = values_and_grads(reference.linear_policy_loss, cast(narrow, torch.float64), WRT, **options)
    for a, b in zip((loss, d_hidden, d_weight[kept], d_bias[kept]), truth, strict=True):
        assert relative_error(a, b) < 1e-6
    assert not d_weight[8:136].any() and not d_weight[140:].any() and not d_bias[140:].any()
    capped = ours(inputs | {"bias": torch.zeros(150)}, triton_device, vocab_size=140, softcap=4.0)
    assert all(x.isfinite().all() for x in capped) and not capped[2][140:].any()


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy, where the interpreter asks for a maximum
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_nan_in_a_valid_row_is_not_hidden(triton_device: torch.device, head_path: str, name: str) -> None:
    inputs = rounded(linear_inputs(6, 4, 9), torch.float32)
    inputs["mask"] = torch.ones(6, dtype=torch.bool)
    inputs[name][int(inputs["targets"][2]) if name != "hidden" else 2] = math.nan
    loss, _ = linear_policy_loss(**there(inputs, triton_device), backend="triton")
    assert loss.isnan()


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_targets_outside_of_the_vocabulary_make_the_loss_nan(
    triton_device: torch.device, head_path: str
) -> None:
    inputs = rounded(linear_inputs(6, 4, 9), torch.float32)
    inputs["mask"] = torch.ones(6, dtype=torch.bool)
    inputs["targets"][2] = 9
    loss, _ = linear_policy_loss(**there(inputs, triton_device), backend="triton")
    assert loss.isnan()


def test_temperature_by_row_or_on_the_device(triton_device: torch.device, head_path: str) -> None:
    inputs = rounded(linear_inputs(*SIZE), torch.float32)
    for temperature in (torch.rand(SIZE[0]) + 0.5, torch.tensor(0.7)):
        options = {"temperature": temperature, "softcap": 5.0, "entropy_coef": 0.1}
        truth = values_and_grads(reference.linear_policy_loss, cast(inputs, torch.float64), WRT, **options)
        for a, b in zip(ours(inputs, triton_device, **options), truth, strict=True):
            assert relative_error(a, b) < 2e-6


def test_without_gradients_and_with_a_frozen_head(triton_device: torch.device, head_path: str) -> None:
    inputs = there(rounded(linear_inputs(20, 6, 9), torch.float32), triton_device)
    hidden = inputs.pop("hidden").requires_grad_()
    loss, _ = linear_policy_loss(hidden, **inputs, backend="triton")
    (grad,) = torch.autograd.grad(loss, hidden)
    with torch.no_grad():
        same, _ = linear_policy_loss(hidden, **inputs, backend="triton")
    assert_exactly(same, loss.detach())
    leaves = {k: v.requires_grad_() if k in WRT else v for k, v in inputs.items()}
    (again,) = torch.autograd.grad(linear_policy_loss(hidden, **leaves, backend="triton")[0], hidden)
    assert_exactly(again, grad)


def test_rows_are_ordered_valid_first(triton_device: torch.device) -> None:
    from muonrl_kernels.linear_triton import order_rows

    valid = torch.tensor([False, True, True, False, True, False], device=triton_device)
    order, count = order_rows(valid)
    assert order.tolist() == [1, 2, 4, 0, 3, 5] and count.item() == 3


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (1.0, -0.5, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_logprob(triton_device: torch.device, weights: tuple[float, ...], dtype: torch.dtype) -> None:
    inputs = rounded(linear_inputs(19, 12, 141), dtype)
    inputs["targets"] %= 139
    options = {"softcap": 2.0, "temperature": 0.7, "logit_scale": 1.5, "vocab_size": 139}
    row = torch.linspace(-1, 1, 19)

    def run(function: Any, x: Tensors, device: torch.device, **more: Any) -> list[Tensor]:
        leaves = {k: x[k].to(device).requires_grad_() for k in WRT}
        outputs = function(**leaves, targets=x["targets"].to(device), **options, **more)
        scale = row.to(device=device, dtype=outputs[0].dtype)
        total = sum((w * scale * o).sum() for w, o in zip(weights, outputs, strict=True))
        return [o.detach().cpu() for o in (*outputs, *torch.autograd.grad(total, list(leaves.values())))]

    cpu = torch.device("cpu")
    found = run(linear_logprob, inputs, triton_device, backend="triton", chunk_rows=8)
    eager = run(reference.linear_logprob, inputs, cpu)
    truth = run(
        reference.linear_logprob, {k: inputs[k].double() for k in WRT} | {"targets": inputs["targets"]}, cpu
    )
    for name, a, b, c in zip(("logp", "entropy", "lse", *WRT), found, eager, truth, strict=True):
        assert_as_good_as(a, b, c, what=name)

"""orthogonalize against fp64, over spectra, shapes, layouts and scales."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muonrl_kernels import newton_schulz, orthogonality_residual, orthogonalize, reference
from muonrl_kernels.coefficients import KJ, PRESETS, Schedule, resolve_schedule
from muonrl_kernels.iteration import choose_method, flops, phase_bounds
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

FP32_METHODS = ("auto", "standard", "symmetric", "gram")


def spectrum(kind: str, m: int, n: int) -> Tensor:
    """An m x n fp64 matrix (m <= n) with singular values of the named kind."""
    if kind == "gaussian":
        return torch.randn(m, n, dtype=torch.float64)
    u = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, m, dtype=torch.float64))[0]
    s = {
        "log_spaced": torch.logspace(0, -3, m, dtype=torch.float64),
        "power_law": torch.arange(1, m + 1, dtype=torch.float64) ** -1.0,
        "outlier": torch.cat([torch.full((1,), 100.0), torch.ones(m - 1)]).double(),
        "rank8": torch.cat([torch.ones(8), torch.zeros(m - 8)]).double(),
    }[kind]
    return u @ torch.diag(s) @ v.mT


def on_true_directions(x: Tensor, g: Tensor, rank: int) -> Tensor:
    """x seen in the first singular directions of g: rank-deficient input defines nothing outside of them."""
    u, _, vh = torch.linalg.svd(g.double(), full_matrices=False)
    return u[:, :rank].mT @ x.double() @ vh[:rank].mT


@pytest.mark.parametrize("kind", ["gaussian", "log_spaced", "power_law", "outlier", "rank8"])
@pytest.mark.parametrize("method", FP32_METHODS)
@pytest.mark.parametrize("shape", [(48, 48), (40, 136)])
def test_error_against_fp64_is_below_torchs(kind: str, method: str, shape: tuple[int, int]) -> None:
    g = spectrum(kind, *shape).float()
    rank = 8 if kind == "rank8" else shape[0]
    views = [
        on_true_directions(x, g, rank)
        for x in (
            orthogonalize(g, method=method, compute_dtype=torch.float32),
            reference.newton_schulz(g, KJ.coefficients),
            _zeropower_via_newtonschulz(g, KJ.coefficients[0], 5, 1e-7),
            reference.newton_schulz(g.double(), KJ.coefficients),
        )
    ]
    ours, eager, torch_bf16, truth = views
    assert relative_error(ours, truth) < 0.05 * relative_error(torch_bf16, truth)
    if method == "standard":
        assert_as_good_as(ours.float(), eager.float(), truth)


@pytest.mark.parametrize("kind", ["gaussian", "log_spaced", "power_law", "outlier", "rank8"])
@pytest.mark.parametrize("method", ["standard", "symmetric", "gram"])
@pytest.mark.parametrize("shape", [(96, 96), (96, 288), (288, 96)])
def test_fp16_is_closer_than_torchs_bf16(kind: str, method: str, shape: tuple[int, int]) -> None:
    m, n = sorted(shape)
    g = spectrum(kind, m, n).float()
    g = g if shape[0] <= shape[1] else g.mT
    rank = 8 if kind == "rank8" else m
    ours, theirs, truth = (
        on_true_directions(x, g, rank)
        for x in (
            orthogonalize(g, method=method, compute_dtype=torch.float16),
            _zeropower_via_newtonschulz(g, KJ.coefficients[0], 5, 1e-7),
            reference.newton_schulz(g.double(), KJ.coefficients),
        )
    )
    assert relative_error(ours, truth) < (1.25 if kind == "rank8" else 0.6) * relative_error(theirs, truth)


def test_fp16_survives_one_single_entry() -> None:
    g = torch.zeros(40, 136)
    g[3, 7] = 1e-20
    for method in ("standard", "gram"):
        x = orthogonalize(g, method=method, compute_dtype=torch.float16)
        assert 0.6 < x[3, 7] < 1.3 and (x != 0).sum() == 1


@pytest.mark.parametrize("kind", ["gaussian", "log_spaced", "power_law", "outlier", "rank8"])
def test_bf16_is_as_good_as_torchs_bf16(kind: str) -> None:
    g = spectrum(kind, 40, 72).float()
    rank = 8 if kind == "rank8" else 40
    ours, theirs, truth = (
        on_true_directions(x, g, rank)
        for x in (
            orthogonalize(g, compute_dtype=torch.bfloat16),
            _zeropower_via_newtonschulz(g, KJ.coefficients[0], 5, 1e-7),
            reference.newton_schulz(g.double(), KJ.coefficients),
        )
    )
    assert_as_good_as(ours.float(), theirs.float(), truth, factor=1.3)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("method", FP32_METHODS)
def test_presets_in_every_form(name: str, method: str) -> None:
    for kind in ("gaussian", "log_spaced", "outlier"):
        g = spectrum(kind, 32, 80)
        truth = reference.newton_schulz(g, PRESETS[name].coefficients)
        ours = orthogonalize(g.float(), schedule=name, method=method, compute_dtype=torch.float32)
        assert relative_error(ours, truth) < 2e-3, kind
        assert torch.linalg.matrix_norm(ours.double(), 2) <= (1.35 if name == "you" else 1.2)
        exact = orthogonalize(g, schedule=name, method=method)
        assert exact.dtype == torch.float64 and relative_error(exact, truth) < 1e-9


def five_decades(m: int = 96, n: int = 256) -> Tensor:
    u = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, m, dtype=torch.float64))[0]
    return u @ torch.diag(torch.logspace(0, -5, m, dtype=torch.float64)) @ v.mT


@pytest.mark.parametrize("name", list(PRESETS))
def test_restarts_keep_the_gram_form_accurate_in_fp16(name: str) -> None:
    g = five_decades()
    truth = reference.newton_schulz(g, PRESETS[name].coefficients)

    def error(chosen: Schedule, dtype: torch.dtype, method: str = "gram") -> float:
        x = orthogonalize(g.float(), schedule=chosen, method=method, compute_dtype=dtype)
        return relative_error(x, truth) if x.isfinite().all() else math.inf

    schedule = PRESETS[name]
    mine = error(schedule, torch.float16)
    assert mine < 0.6 * error(schedule, torch.bfloat16, "standard")
    assert error(dataclasses.replace(schedule, restarts=()), torch.float16) > 5 * mine


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_gram_form_in_fp32_restarts_only_where_it_must(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, g = PRESETS[name], five_decades()
    truth = reference.newton_schulz(g, schedule.coefficients)
    bounds = phase_bounds(schedule, "gram", torch.float32)
    assert bounds == ((0, 6) if name == "kj10" else (0,))

    def error() -> float:
        x = orthogonalize(g.float(), schedule=schedule, method="gram", compute_dtype=torch.float32)
        return relative_error(x, truth) if x.isfinite().all() else math.inf

    assert error() < 3e-3
    monkeypatch.setattr("muonrl_kernels.iteration._MAX_GROWTH", math.inf)
    assert name != "kj10" or error() > 1.0


def test_polar_express_stays_below_1_2_in_bf16() -> None:
    for kind in ("gaussian", "log_spaced", "power_law", "outlier", "rank8"):
        x = orthogonalize(
            spectrum(kind, 64, 96).float(), schedule="polar_express", compute_dtype=torch.bfloat16
        )
        assert torch.linalg.matrix_norm(x.double(), 2) <= 1.2, kind


@pytest.mark.parametrize("method", FP32_METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-100, -60, -10, 10, 60, 99])
def test_scale_does_not_matter_at_all(method: str, dtype: torch.dtype, power: int) -> None:
    g = torch.randn(24, 40, dtype=dtype).clamp(-3, 3)
    scaled = g * 2.0**power
    assert scaled.isfinite().all()
    a, b = (orthogonalize(x, method=method, compute_dtype=dtype) for x in (g, scaled))
    assert_exactly(a, b)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scales_from_1e_30_to_1e30(scale: float) -> None:
    g = torch.randn(16, 24)
    a, b = (orthogonalize(x, compute_dtype=torch.float32) for x in (g, g * scale))
    assert relative_error(b, a) < 1e-5


def test_zero_and_non_finite_matrices() -> None:
    stack = torch.randn(4, 8, 12)
    stack[1] = 0.0
    stack[2, 3, 4] = math.inf
    stack[3, 0, 0] = math.nan
    for method in FP32_METHODS:
        for normalize in ("frobenius", "schatten4"):
            out = orthogonalize(stack, method=method, normalize=normalize, compute_dtype=torch.float32)
            assert out[0].isfinite().all() and torch.equal(out[1], torch.zeros(8, 12))
            assert out[2].isnan().any() and out[3].isnan().any()


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 17), (17, 1), (4, 33), (7, 13), (31, 29), (13, 101), (64, 64), (65, 33)]
)
@pytest.mark.parametrize("method", FP32_METHODS)
def test_awkward_shapes(shape: tuple[int, int], method: str) -> None:
    g = torch.randn(shape)
    truth = reference.newton_schulz(g.double(), KJ.coefficients)
    assert relative_error(orthogonalize(g, method=method, compute_dtype=torch.float32), truth) < 1e-4


def test_tall_is_the_transpose_of_wide() -> None:
    g = torch.randn(20, 52)
    assert_exactly(orthogonalize(g.mT.contiguous()), orthogonalize(g).mT)


def test_layouts_give_the_same_bits_and_input_is_untouched() -> None:
    g = torch.randn(12, 20)
    wanted = orthogonalize(g)
    strided = torch.randn(24, 60)
    strided[::2, ::3] = g
    images = g.reshape(1, 12, 4, 5).to(memory_format=torch.channels_last)
    for other in (
        g.mT.contiguous().mT,
        strided[::2, ::3],
        images.reshape(12, 20),
        g.clone().requires_grad_(),
    ):
        before = other.detach().clone()
        assert_exactly(orthogonalize(other), wanted)
        assert torch.equal(other.detach(), before)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    method=st.sampled_from(["auto", "standard", "symmetric"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_batching_changes_no_bit(sizes: list[tuple[int, int]], method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    matrices = [torch.randn(s) for s in sizes for _ in range(2)]
    together = orthogonalize(matrices, method=method, compute_dtype=dtype)
    for alone, joint in zip(matrices, together, strict=True):
        assert_exactly(joint, orthogonalize(alone, method=method, compute_dtype=dtype))
        assert joint.shape == alone.shape


def test_workspace_bound_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.randn(9, 16, 24)
    wanted = orthogonalize(g)
    monkeypatch.setitem(newton_schulz._STACK_BYTES, "cpu", 4 * 16 * 24 * 4)
    assert_exactly(orthogonalize(g), wanted)


def test_stacks_lists_dtypes_and_out() -> None:
    g = torch.randn(2, 3, 8, 12)
    whole = orthogonalize(g)
    assert_exactly(whole[1, 2], orthogonalize(g[1, 2]))
    out = torch.empty(2, 3, 12, 8).mT
    assert orthogonalize(g, out=out) is out
    assert torch.equal(out, whole)
    half = orthogonalize(g[0, 0].to(torch.float16), compute_dtype=torch.float32)
    assert half.dtype == torch.float16 and half.isfinite().all()
    targets = [torch.empty(8, 12), torch.empty(5, 4)]
    returned = orthogonalize([g[0, 0], torch.randn(5, 4)], out=targets)
    assert returned[0] is targets[0] and targets[1].isfinite().all()
    assert orthogonalize([]) == []


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4), (2, 0, 4)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert orthogonalize(torch.zeros(shape)).shape == shape


def test_schatten4_starts_closer_to_one() -> None:
    for method in FP32_METHODS:
        g = spectrum("power_law", 40, 60)
        truth_input = g / torch.linalg.matrix_norm(g @ g.mT).sqrt()
        truth = truth_input
        for a, b, c in KJ.coefficients:
            gram = truth @ truth.mT
            truth = a * truth + (b * gram + c * gram @ gram) @ truth
        ours = orthogonalize(g.float(), normalize="schatten4", method=method, compute_dtype=torch.float32)
        assert relative_error(ours, truth) < 1e-4
        assert orthogonality_residual(ours) < 0.5


def test_residual() -> None:
    q = torch.linalg.qr(torch.randn(9, 5))[0]
    assert orthogonality_residual(q) < 1e-6
    assert orthogonality_residual(2 * q).item() == pytest.approx(3.0, rel=1e-5)
    assert orthogonality_residual(torch.zeros(3, 4)).item() == pytest.approx(1.0)


def test_auto_takes_the_cheapest_stable_form() -> None:
    assert choose_method(128, 512, KJ, torch.float32) == "gram"
    assert choose_method(128, 128, KJ, torch.float32) == "standard"
    assert choose_method(256, 256, KJ, torch.float32) == "symmetric"
    assert choose_method(1024, 1024, KJ, torch.bfloat16) == "symmetric"
    assert choose_method(512, 1024, KJ, torch.bfloat16) == "standard"
    assert choose_method(128, 512, KJ, torch.bfloat16) == "standard"
    # 15 products of a square matrix, two operations a multiply-add.
    assert flops(64, 64, KJ, "standard") == 30 * 64**3
    # Without savings from symmetry: six small products fewer than twice five, two long products instead of ten.
    assert flops(64, 192, KJ, "gram") < 0.8 * flops(64, 192, KJ, "standard")


def test_blocked_products_are_exact() -> None:
    g = spectrum("gaussian", 100, 130)
    plain, blocked = (orthogonalize(g, method=m) for m in ("standard", "symmetric"))
    assert relative_error(blocked, plain) < 1e-12


def test_custom_schedules() -> None:
    g = torch.randn(10, 14, dtype=torch.float64)
    steps = [(2.0, -1.5, 0.5)] * 12
    assert relative_error(orthogonalize(g, schedule=steps), reference.orthogonal_factor(g)) < 1e-3
    same = orthogonalize(g, schedule=(2.0, -1.5, 0.5), steps=12)
    assert_exactly(same, orthogonalize(g, schedule=resolve_schedule(steps)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"method": "fast"}, "method"),
        ({"normalize": "spectral"}, "normalize"),
        ({"compute_dtype": torch.float8_e4m3fn}, "compute_dtype"),
        ({"method": "gram", "compute_dtype": torch.bfloat16}, "not stable"),
        ({"steps": 0}, "steps"),
        ({"out": torch.zeros(3, 3)}, "out"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        orthogonalize(torch.eye(4), **arguments)  # type: ignore[call-overload]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="two dimensions"):
        orthogonalize(torch.zeros(4))
    with pytest.raises(ValueError, match="floating-point"):
        orthogonalize(torch.zeros(4, 4, dtype=torch.int64))

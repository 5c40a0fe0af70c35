"""orthogonalize(backend="triton"): the contract of the function, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muonrl_kernels import orthogonalize, reference
from muonrl_kernels.coefficients import KJ, PRESETS
from tests.kernels.test_newton_schulz import on_true_directions, spectrum
from tests.numerics import assert_exactly, relative_error

# x - x of an infinity is how the kernels find one.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
SPECTRA = ("gaussian", "log_spaced", "power_law", "outlier", "rank8")


def run(g: Tensor, **options: object) -> Tensor:
    return orthogonalize(g, backend="triton", **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(("shape", "method"), [((48, 48), "auto"), ((40, 136), "auto"), ((136, 40), "gram")])
def test_error_against_fp64_is_below_torchs(
    triton_device: torch.device, kind: str, shape: tuple[int, int], method: str
) -> None:
    m, n = sorted(shape)
    g = spectrum(kind, m, n).float().to(triton_device)
    g = g if shape[0] <= shape[1] else g.mT.contiguous()
    rank = 8 if kind == "rank8" else m
    ours, theirs, truth = (
        on_true_directions(x, g, rank)
        for x in (
            run(g, method=method),
            _zeropower_via_newtonschulz(g, KJ.coefficients[0], 5, 1e-7),
            reference.newton_schulz(g.double(), KJ.coefficients),
        )
    )
    # At this small size the few singular values of a power law leave bf16's errors little room to add up.
    factor = 1.25 if kind in ("power_law", "rank8") else 0.6
    assert relative_error(ours, truth) < factor * relative_error(theirs, truth)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("method", ["gram", "symmetric"])
def test_presets(triton_device: torch.device, name: str, method: str) -> None:
    g = spectrum("log_spaced", 40, 70).to(triton_device)
    truth = reference.newton_schulz(g, PRESETS[name].coefficients)
    x = run(g.float(), schedule=name, method=method)
    assert relative_error(x, truth) < 0.04
    if name == "polar_express":
        assert torch.linalg.matrix_norm(x.double(), 2) <= 1.2


@pytest.mark.parametrize("kind", SPECTRA)
def test_small_matrices_in_one_program(triton_device: torch.device, kind: str) -> None:
    g = spectrum(kind, 24, 100).float().to(triton_device)
    rank = 8 if kind == "rank8" else 24
    for schedule in ("kj", "polar_express"):
        coefficients = PRESETS[schedule].coefficients
        ours, truth = (
            on_true_directions(x, g, rank)
            for x in (run(g, schedule=schedule), reference.newton_schulz(g.double(), coefficients))
        )
        assert relative_error(ours, truth) < 0.04
        assert schedule == "kj" or torch.linalg.matrix_norm(run(g, schedule=schedule).double(), 2) <= 1.2


@pytest.mark.parametrize("shape", [(24, 40), (40, 70)])
def test_schatten4(triton_device: torch.device, shape: tuple[int, int]) -> None:
    g = spectrum("power_law", *shape)
    truth = g / torch.linalg.matrix_norm(g @ g.mT).sqrt()
    for a, b, c in KJ.coefficients:
        gram = truth @ truth.mT
        truth = a * truth + (b * gram + c * gram @ gram) @ truth
    x = run(g.float().to(triton_device), normalize="schatten4")
    assert relative_error(x.cpu(), truth) < 0.02
    assert not run(torch.zeros(shape, device=triton_device), normalize="schatten4").any()


@pytest.mark.parametrize("power", [-100, -20, 20, 99])
@pytest.mark.parametrize("shape", [(20, 30), (36, 40)])
def test_scale_does_not_matter_at_all(
    triton_device: torch.device, power: int, shape: tuple[int, int]
) -> None:
    g = torch.randn(shape, device=triton_device).clamp(-3, 3)
    assert_exactly(run(g * 2.0**power), run(g))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_from_1e_30_to_1e30(triton_device: torch.device, scale: float) -> None:
    g = torch.randn(16, 24, device=triton_device)
    assert relative_error(run(g * scale), run(g)) < 0.01


def test_zero_and_non_finite_matrices(triton_device: torch.device) -> None:
    for shape in ((20, 30), (36, 40)):
        stack = torch.randn(4, *shape, device=triton_device)
        stack[1] = 0.0
        stack[2, 3, 4] = math.inf
        stack[3, 0, 0] = math.nan
        out = run(stack)
        assert out[0].isfinite().all() and not out[1].any()
        assert out[2].isnan().all() and out[3].isnan().all()
        assert_exactly(out[0], run(stack[0]))


def test_one_single_entry(triton_device: torch.device) -> None:
    for shape in ((20, 30), (36, 40)):
        g = torch.zeros(shape, device=triton_device)
        g[3, 7] = 1e-20
        x = run(g)
        assert 0.6 < x[3, 7] < 1.3 and (x != 0).sum() == 1


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 17), (17, 1), (4, 33), (7, 13), (31, 29), (13, 101), (37, 41), (65, 33)]
)
def test_awkward_shapes(triton_device: torch.device, shape: tuple[int, int]) -> None:
    g = torch.randn(shape, device=triton_device)
    truth = reference.newton_schulz(g.double(), KJ.coefficients)
    theirs = _zeropower_via_newtonschulz(g, KJ.coefficients[0], 5, 1e-7)
    assert relative_error(run(g), truth) < max(0.02, relative_error(theirs, truth))


def test_layouts_give_the_same_bits_and_input_is_untouched(triton_device: torch.device) -> None:
    for shape in ((12, 20), (36, 40), (40, 36)):
        g = torch.randn(shape, device=triton_device)
        wanted = run(g)
        strided = torch.randn(2 * shape[0], 3 * shape[1], device=triton_device)
        strided[::2, ::3] = g
        padded = torch.randn(shape[0], shape[1] + 3, device=triton_device)
        padded[:, :-3] = g
        row = torch.randn(1, shape[1], device=triton_device)
        for other in (g.mT.contiguous().mT, strided[::2, ::3], padded[:, :-3], g.clone().requires_grad_()):
            before = other.detach().clone()
            assert_exactly(run(other), wanted)
            assert torch.equal(other.detach(), before)
        assert_exactly(run(row.expand(shape)), run(row.expand(shape).contiguous()))
        out = torch.empty(shape[1], shape[0], device=triton_device).mT
        assert run(g, out=out) is out and torch.equal(out, wanted)
        holes = torch.zeros(shape[0], 2 * shape[1], device=triton_device)
        run(g, out=holes[:, ::2])
        assert torch.equal(holes[:, ::2], wanted) and not holes[:, 1::2].any()


def test_batching_and_workspace_change_no_bit(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muonrl_kernels import muon_triton

    sizes = [(20, 30), (36, 40), (40, 36), (36, 90), (20, 20), (90, 36)]
    matrices = [torch.randn(s, device=triton_device) for s in sizes for _ in range(2)]
    together = orthogonalize(matrices, backend="triton")
    for g, joint in zip(matrices, together, strict=True):
        assert_exactly(joint, run(g))
    monkeypatch.setattr(muon_triton, "_workspace_bytes", lambda device: 1)
    for g, alone in zip(together, orthogonalize(matrices, backend="triton"), strict=True):
        assert_exactly(alone, g)


def test_dtypes(triton_device: torch.device) -> None:
    g = torch.randn(36, 40, device=triton_device)
    half = run(g.half())
    assert half.dtype == torch.float16 and relative_error(half.float(), run(g)) < 0.01
    with pytest.raises(RuntimeError, match="float64"):
        run(g.double())
    with pytest.raises(RuntimeError, match="float32"):
        run(g, compute_dtype=torch.float32)
    assert run(torch.zeros(0, 4, device=triton_device)).shape == (0, 4)

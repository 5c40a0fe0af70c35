"""The update rule of Muon against torch.optim.Muon and against fp64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonrl_kernels import Muon, reference
from muonrl_kernels.coefficients import KJ, POLAR_EXPRESS
from muonrl_kernels.muon_options import lr_ratio
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

SHAPES = [(24, 24), (24, 24), (16, 40), (40, 16), (1, 9), (9, 1), (4, 50), (7, 13)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def run(
    make: Callable[[list[nn.Parameter]], Any], steps: int = 4, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Parameters after some steps of an optimizer, gradients given."""
    params = parameters(dtype)
    optimizer = make(params)
    for step in range(steps):
        for p, g in zip(params, gradients(step, dtype), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


def truth(steps: int, *, lr: float, wd: float, mu: float, nesterov: bool, adjust: str | None) -> list[Tensor]:
    """The published update, written out in fp64."""
    params = [p.detach().double() for p in parameters()]
    buffers = [torch.zeros_like(p) for p in params]
    for step in range(steps):
        for p, m, g in zip(params, buffers, gradients(step, torch.float64), strict=True):
            m.mul_(mu).add_(g, alpha=1 - mu)
            u = (1 - mu) * g + mu * m if nesterov else m.clone()
            rows, columns = p.shape
            ratio = (
                0.2 * math.sqrt(max(rows, columns))
                if adjust == "match_rms_adamw"
                else math.sqrt(max(1, rows / columns))
            )
            p.mul_(1 - lr * wd).sub_(lr * ratio * reference.newton_schulz(u, KJ.coefficients))
    return params


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_same_update_as_torch(nesterov: bool, adjust: str | None) -> None:
    options = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    exact = truth(4, lr=0.05, wd=0.3, mu=0.9, nesterov=nesterov, adjust=adjust)
    start = [p.detach().double() for p in parameters()]
    theirs = run(lambda ps: torch.optim.Muon(ps, **options))
    for dtype, factor in ((torch.float32, 0.02), (torch.bfloat16, 2.0)):
        ours = run(lambda ps, dtype=dtype: Muon(ps, **options, compute_dtype=dtype))
        for a, b, c, s in zip(ours, theirs, exact, start, strict=True):
            moved = [x.double() - s for x in (a, b, c)]
            assert_as_good_as(moved[0].float(), moved[1].float(), moved[2], factor=factor)


def test_signature_starts_with_torchs() -> None:
    ours = list(inspect.signature(Muon.__init__).parameters.values())
    theirs = list(inspect.signature(torch.optim.Muon.__init__).parameters.values())
    for a, b in zip(ours, theirs, strict=False):
        assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind)
    assert all(a.kind is inspect.Parameter.KEYWORD_ONLY for a in ours[len(theirs) :])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("style", ["ema", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_never_touched_and_momentum_only_by_its_rule(
    nesterov: bool, style: str, dtype: torch.dtype
) -> None:
    params = parameters(dtype)
    optimizer = Muon(params, nesterov=nesterov, momentum_style=style)
    expected = [torch.zeros_like(p) for p in params]
    for step in range(3):
        grads = gradients(step, dtype)
        for p, g, m in zip(params, grads, expected, strict=True):
            p.grad = g.clone()
            m.lerp_(g, 1 - 0.95) if style == "ema" else m.mul_(0.95).add_(g)
        optimizer.step()
        for p, g, m in zip(params, grads, expected, strict=True):
            assert_exactly(p.grad, g)
            assert relative_error(optimizer.state[p]["momentum_buffer"], m) <= torch.finfo(dtype).eps


def test_momentum_styles_give_the_same_path() -> None:
    ema, total = (
        run(lambda ps, s=s: Muon(ps, lr=0.1, momentum_style=s, compute_dtype=torch.float32))
        for s in ("ema", "sum")
    )
    for a, b in zip(total, ema, strict=True):
        assert relative_error(a, b) < 1e-5


def test_the_scale_of_the_gradient_does_not_matter() -> None:
    def scaled(factor: float) -> list[Tensor]:
        params = parameters()
        for p, g in zip(params, gradients(0), strict=True):
            p.grad = g * factor
        Muon(params, lr=0.1, compute_dtype=torch.float32).step()
        return [p.detach() for p in params]

    for factor in (1e-30, 1e-12, 1e30):
        for a, b in zip(scaled(factor), scaled(1.0), strict=True):
            assert relative_error(a, b) < 1e-5


def test_zero_gradient_only_decays() -> None:
    p = nn.Parameter(torch.randn(5, 6))
    before = p.detach().clone()
    p.grad = torch.zeros(5, 6)
    Muon([p], lr=0.1, weight_decay=0.5).step()
    assert_exactly(p.detach(), before * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_skips_that_matrix_and_is_counted(bad: float) -> None:
    good, hurt, vector = (nn.Parameter(torch.randn(s)) for s in ((4, 6), (4, 6), (6,)))
    optimizer = Muon([{"params": [good, hurt]}, {"params": [vector], "algorithm": "adamw"}], lr=0.1)
    for p in (good, hurt, vector):
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = [hurt.detach().clone(), vector.detach().clone(), optimizer.state[hurt]["momentum_buffer"].clone()]
    before = good.detach().clone()
    hurt.grad[1, 2] = bad
    vector.grad[0] = bad
    optimizer.step()
    assert optimizer.skipped == 2
    assert not torch.equal(good, before)
    for now, then in zip(
        (hurt.detach(), vector.detach(), optimizer.state[hurt]["momentum_buffer"]), saved, strict=True
    ):
        assert_exactly(now, then)
    hurt.grad = torch.randn(4, 6)
    optimizer.step()
    assert optimizer.skipped == 3 and hurt.isfinite().all() and not torch.equal(hurt.detach(), saved[0])


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", [{"split": 2}, {"batched_matrices": True}, {"flatten": True}])
def test_one_bad_entry_holds_the_whole_parameter_back(options: dict[str, Any], capturable: bool) -> None:
    shape = (4, 6) if "split" in options else (3, 4, 6)
    p = nn.Parameter(torch.randn(shape))
    optimizer = Muon([p], variant="normuon", capturable=capturable, **options)
    p.grad = torch.randn(shape)
    optimizer.step()
    saved = [p.detach().clone(), *(value.clone() for value in optimizer.state[p].values())]
    p.grad = torch.randn(shape)
    p.grad.view(-1)[0] = math.nan
    optimizer.step()
    for now, then in zip((p.detach(), *optimizer.state[p].values()), saved, strict=True):
        assert torch.equal(now, then)
    assert optimizer.skipped == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.randn(4, 6).to(dtype))
    p.grad = torch.full((4, 6), torch.finfo(dtype).max, dtype=dtype)
    optimizer = Muon([p], momentum_dtype=torch.float64)
    optimizer.step()
    assert optimizer.skipped == 0 and p.isfinite().all()


def test_huge_but_finite_gradients_are_not_skipped() -> None:
    p = nn.Parameter(torch.randn(4, 6))
    p.grad = torch.full((4, 6), 3e38)
    optimizer = Muon([p], momentum=0.0)
    optimizer.step()
    assert optimizer.skipped == 0 and p.isfinite().all()


def test_gradient_missing_on_some_steps() -> None:
    params = parameters()
    optimizer = Muon(params, lr=0.1)
    optimizer.step()
    assert not optimizer.state
    params[0].grad = gradients(0)[0]
    optimizer.step()
    assert list(optimizer.state) == [params[0]]
    alone = nn.Parameter(parameters()[0].detach().clone())
    alone.grad = gradients(0)[0]
    Muon([alone], lr=0.1).step()
    assert_exactly(params[0].detach(), alone.detach())


def test_batching_of_parameters_changes_no_bit() -> None:
    together = run(lambda ps: Muon(ps, lr=0.1))
    one_by_one = run(lambda ps: Muon([{"params": [p]} for p in ps], lr=0.1))
    for a, b in zip(together, one_by_one, strict=True):
        assert_exactly(a, b)


def test_layouts_change_no_bit() -> None:
    plain, strided = nn.Parameter(torch.randn(6, 10)), nn.Parameter(torch.empty(10, 6).mT)
    with torch.no_grad():
        strided.copy_(plain)
    optimizers = [Muon([p], lr=0.1) for p in (plain, strided)]
    for step in range(3):
        g = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        plain.grad, strided.grad = g, g.mT.contiguous().mT
        for optimizer in optimizers:
            optimizer.step()
    assert_exactly(plain.detach(), strided.detach().contiguous())


def test_empty_parameters() -> None:
    shapes = [(0, 5), (5, 0), (0, 4, 4), (2, 0, 3)]
    for options in ({}, {"split": 2}, {"stochastic_rounding": True}):
        params = [nn.Parameter(torch.zeros(s, dtype=torch.bfloat16)) for s in shapes]
        groups = [{"params": params[:2]}, {"params": params[2:], "batched_matrices": True}]
        optimizer = Muon(groups, **options)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert [p.shape for p in params] == [torch.Size(s) for s in shapes]
        optimizer.load_state_dict(optimizer.state_dict())


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = Muon([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first is not None and first.requires_grad
    assert optimizer.step(closure) < first
    assert optimizer.step() is None


def test_schedulers_and_tensor_lr_are_seen() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    start = p.detach().clone()
    optimizer = Muon([p], lr=torch.tensor(0.1), weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    p.grad = torch.randn(4, 4)
    optimizer.step()
    assert_exactly(p.detach(), start)
    scheduled = Muon([p], lr=0.4, weight_decay=0.0, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.5**step)
    lengths = []
    for _ in range(3):
        before = p.detach().clone()
        scheduled.step()
        scheduler.step()
        lengths.append((p.detach() - before).norm().item())
    assert lengths[0] / lengths[1] == pytest.approx(2, rel=1e-4) and lengths[1] / lengths[2] == pytest.approx(
        2, rel=1e-4
    )


def test_lr_ratio() -> None:
    tall, wide = torch.Size((8, 2)), torch.Size((2, 8))
    assert (lr_ratio(None, tall), lr_ratio("original", wide)) == (2.0, 1.0)
    assert lr_ratio("match_rms_adamw", wide) == pytest.approx(0.2 * math.sqrt(8))
    assert (lr_ratio("spectral_unclamped", tall), lr_ratio("spectral_unclamped", wide)) == (2.0, 0.5)
    assert lr_ratio(lambda shape: 3 * shape[0], tall) == 24


def test_match_rms_gives_adamw_sized_updates() -> None:
    p = nn.Parameter(torch.zeros(64, 160))
    p.grad = torch.randn(64, 160)
    Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_schedule="polar_express").step()
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.05)


def test_ns_schedule_takes_the_place_of_the_coefficients() -> None:
    options = {"lr": 0.1, "compute_dtype": torch.float32}
    by_name = run(lambda ps: Muon(ps, **options, ns_schedule="polar_express"))
    by_object = run(lambda ps: Muon(ps, **options, ns_schedule=POLAR_EXPRESS))
    default = run(lambda ps: Muon(ps, **options))
    six_steps = run(lambda ps: Muon(ps, **options, ns_steps=6))
    for a, b, c, d in zip(by_name, by_object, default, six_steps, strict=True):
        assert_exactly(a, b)
        assert not torch.equal(a, c) and not torch.equal(c, d)


def test_flatten_updates_convolutions_as_matrices() -> None:
    kernel = nn.Parameter(torch.randn(6, 2, 3, 3))
    matrix = nn.Parameter(kernel.detach().reshape(6, 18).clone())
    kernel.grad = torch.randn(6, 2, 3, 3)
    matrix.grad = kernel.grad.reshape(6, 18)
    with pytest.raises(ValueError, match="2D"):
        Muon([kernel])
    Muon([kernel], lr=0.1, flatten=True).step()
    Muon([matrix], lr=0.1).step()
    assert_exactly(kernel.detach().reshape(6, 18), matrix.detach())


def test_adamw_groups_are_torchs_adamw() -> None:
    ours, theirs = ([nn.Parameter(torch.arange(n, dtype=torch.float32)) for n in (3, 5)] for _ in range(2))
    group = {"params": ours, "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.2, "betas": (0.8, 0.9)}
    a, b = Muon([group]), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))
    for step in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.sin(p.detach() + step)
            q.grad = torch.sin(q.detach() + step)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
    assert a.param_groups[0]["eps"] == 1e-8

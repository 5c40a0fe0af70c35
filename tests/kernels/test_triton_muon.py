"""Muon(backend="triton") against the torch path in fp64, option by option, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonrl_kernels import Muon, triton_layout
from tests.numerics import assert_exactly, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
SHAPES = ((20, 30), (30, 20), (36, 40), (36, 36), (70, 33))


def twins(device: torch.device, shapes: Any = SHAPES, **options: Any) -> tuple[Muon, Muon]:
    """Two optimizers over equal parameters: Triton, and PyTorch in fp64."""
    weights = [torch.randn(shape) / 4 for shape in shapes]
    ours = Muon([nn.Parameter(w.to(device)) for w in weights], backend="triton", **options)
    theirs = Muon([nn.Parameter(w.double()) for w in weights], backend="torch", **options)
    return ours, theirs


def parameters(optimizer: Muon) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def copy_weights(source: Muon, target: Muon) -> None:
    with torch.no_grad():
        for p, q in zip(parameters(source), parameters(target), strict=True):
            q.copy_(p)


def set_gradients(*optimizers: Muon) -> None:
    for ps in zip(*(parameters(o) for o in optimizers), strict=True):
        g = torch.randn(ps[0].shape)
        for p in ps:
            p.grad = g.to(p)


def assert_close(ours: Muon, theirs: Muon, before: list[Tensor], tolerance: float = 0.03) -> None:
    """Compare the movement of each parameter, and the momenta."""
    for p, q, start in zip(parameters(ours), parameters(theirs), before, strict=True):
        moved = (q.detach() - start.double()).cpu()
        assert relative_error((p.detach().cpu().double() - start.double()), moved) < tolerance
        mine, other = (o.state[x]["momentum_buffer"].cpu() for o, x in ((ours, p), (theirs, q)))
        assert relative_error(mine, other.double()) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"momentum_style": "sum"},
        {"momentum_style": "sum", "nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_schedule": "polar_express"},
        {"normalize": "schatten4"},
        {"method": "symmetric"},
        {"variant": "normuon"},
        {"capturable": True},
        {"max_workspace_bytes": 1},
    ],
    ids=str,
)
def test_two_steps_as_in_fp64(triton_device: torch.device, options: dict[str, Any]) -> None:
    ours, theirs = twins(triton_device, lr=0.1, **options)
    before = [p.detach().cpu().clone() for p in parameters(ours)]
    for _ in range(2):
        set_gradients(ours, theirs)
        kept = [p.grad.clone() for p in parameters(ours) if p.grad is not None]
        ours.step()
        theirs.step()
        for p, g in zip(parameters(ours), kept, strict=True):
            assert p.grad is not None and torch.equal(p.grad, g)
    assert_close(ours, theirs, before)


def test_cautious_decay(triton_device: torch.device) -> None:
    ours, theirs = twins(triton_device, ((36, 40),), lr=0.1, weight_decay=0.5, cautious_wd=True)
    plain, _ = twins(triton_device, ((36, 40),), lr=0.1, weight_decay=0.5)
    (p,), (q,), (r,) = (parameters(o) for o in (ours, theirs, plain))
    copy_weights(ours, plain)
    start = p.detach().cpu().double()
    set_gradients(ours, theirs, plain)
    for optimizer in (ours, theirs, plain):
        optimizer.step()
    # The mask is a matter of sign, so where the update is all but zero the two may differ.
    o = (start - q.detach().cpu()).abs()
    same = o > 0.02 * o.max()
    moved = (q.detach().cpu() - start)[same]
    assert relative_error((p.detach().cpu().double() - start)[same], moved) < 0.05
    assert relative_error((r.detach().cpu().double() - start)[same], moved) > 0.05


def test_weights_decay_where_the_update_is_zero(triton_device: torch.device) -> None:
    optimizer, _ = twins(triton_device, ((20, 30), (36, 40)), lr=0.1, weight_decay=0.5, cautious_wd=True)
    before = [p.detach().clone() for p in parameters(optimizer)]
    for p in parameters(optimizer):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, w in zip(parameters(optimizer), before, strict=True):
        assert torch.allclose(p.detach(), 0.95 * w, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(
    triton_device: torch.device, variant: str
) -> None:
    ours, _ = twins(triton_device, lr=0.1, weight_decay=0.1, variant=variant)
    set_gradients(ours)
    ours.step()
    for index, bad in ((0, math.inf), (2, math.nan), (4, -math.inf)):
        set_gradients(ours)
        p = parameters(ours)[index]
        assert p.grad is not None
        p.grad[1, 2] = bad
        kept = p.detach().clone(), ours.state[p]["momentum_buffer"].clone()
        other = parameters(ours)[1].detach().clone()
        ours.step()
        assert_exactly(p.detach(), kept[0])
        assert_exactly(ours.state[p]["momentum_buffer"], kept[1])
        assert all(t.isfinite().all() for t in ours.state[p].values())
        assert not torch.equal(parameters(ours)[1].detach(), other)
    assert ours.skipped == 3
    set_gradients(ours)
    ours.step()
    assert all(p.isfinite().all() for p in parameters(ours)) and ours.skipped == 3


def test_flags_belong_to_their_dtype(triton_device: torch.device) -> None:
    ps = [nn.Parameter(torch.randn(20, 30, device=triton_device).to(t)) for t in (torch.float32, torch.half)]
    optimizer = Muon(ps, lr=0.1, backend="triton", momentum_dtype=torch.float32)
    for bad in (0, 1):
        before = [p.detach().clone() for p in ps]
        for p in ps:
            p.grad = torch.randn(20, 30).to(p)
        ps[bad].grad[3, 4] = math.nan  # type: ignore[index]
        optimizer.step()
        moved = [not torch.equal(p.detach(), w) for p, w in zip(ps, before, strict=True)]
        assert moved == [bad == 1, bad == 0] and ps[1 - bad].isfinite().all()


def test_a_split_parameter_is_left_out_as_a_whole(triton_device: torch.device) -> None:
    ours, _ = twins(triton_device, ((60, 40),), lr=0.1, split=(20, 40))
    set_gradients(ours)
    ours.step()
    (p,) = parameters(ours)
    set_gradients(ours)
    assert p.grad is not None
    p.grad[50, 3] = math.nan
    kept = p.detach().clone(), ours.state[p]["momentum_buffer"].clone()
    ours.step()
    assert_exactly(p.detach(), kept[0])
    assert_exactly(ours.state[p]["momentum_buffer"], kept[1])
    assert ours.skipped == 1


@pytest.mark.parametrize("options", [{"split": (20, 40)}, {"split": 2, "split_dim": 1}])
def test_blocks_of_a_parameter(triton_device: torch.device, options: dict[str, Any]) -> None:
    ours, theirs = twins(triton_device, ((60, 40),), lr=0.1, **options)
    before = [p.detach().cpu().clone() for p in parameters(ours)]
    set_gradients(ours, theirs)
    ours.step()
    theirs.step()
    assert_close(ours, theirs, before)


def test_experts_and_convolutions(triton_device: torch.device) -> None:
    for shape, option in (((3, 20, 30), "batched_matrices"), ((20, 3, 4, 2), "flatten")):
        ours, theirs = twins(triton_device, (shape,), lr=0.1, **{option: True})
        if option == "flatten":
            (p,) = parameters(ours)
            p.data = p.data.to(memory_format=torch.channels_last)
        before = [p.detach().cpu().clone() for p in parameters(ours)]
        set_gradients(ours, theirs)
        ours.step()
        theirs.step()
        assert_close(ours, theirs, before)


def test_parameters_that_are_not_contiguous(triton_device: torch.device) -> None:
    ours, theirs = twins(triton_device, ((36, 40), (20, 30), (33, 50)), lr=0.1)
    for p, make in zip(
        parameters(ours),
        (
            lambda w: w.mT.contiguous().mT,
            lambda w: torch.zeros(40, 60, device=w.device)[::2, ::2].copy_(w),
            lambda w: torch.zeros(33, 57, device=w.device)[:, 3:53].copy_(w),
        ),
        strict=True,
    ):
        p.data = make(p.data)
    before = [p.detach().cpu().clone() for p in parameters(ours)]
    for _ in range(2):
        set_gradients(ours, theirs)
        ours.step()
        theirs.step()
    assert_close(ours, theirs, before)


def test_momenta_that_no_address_and_stride_describe(triton_device: torch.device) -> None:
    ours, theirs = twins(triton_device, ((36, 40), (20, 30)), lr=0.1)
    before = [p.detach().cpu().clone() for p in parameters(ours)]
    for _ in range(2):
        set_gradients(ours, theirs)
        ours.step()
        theirs.step()
        for p in parameters(ours):
            m = ours.state[p]["momentum_buffer"]
            holes = torch.zeros(2 * m.shape[0], 2 * m.shape[1], device=m.device)[::2, ::2]
            ours.state[p]["momentum_buffer"] = holes.copy_(m)
    assert_close(ours, theirs, before)


def test_a_learning_rate_on_the_device(triton_device: torch.device) -> None:
    rate = torch.tensor(0.1, device=triton_device)
    there, here = (twins(triton_device, lr=lr, weight_decay=0.5, capturable=True)[0] for lr in (rate, 0.1))
    copy_weights(there, here)
    set_gradients(there, here)
    there.step()
    here.step()
    for p, q in zip(parameters(there), parameters(here), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-7)


def test_gradients_missing_on_some_steps_and_changing_rates(triton_device: torch.device) -> None:
    ours, theirs = twins(triton_device, ((36, 40), (20, 30)), lr=torch.tensor(0.1))
    before = [p.detach().cpu().clone() for p in parameters(ours)]
    for step in range(3):
        set_gradients(ours, theirs)
        for optimizer in (ours, theirs):
            if step == 1:
                parameters(optimizer)[0].grad = None
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    assert_close(ours, theirs, before)


def test_batching_changes_no_bit(triton_device: torch.device) -> None:
    together, _ = twins(triton_device, lr=0.1)
    alone = [Muon([nn.Parameter(p.detach().clone())], lr=0.1, backend="triton") for p in parameters(together)]
    set_gradients(together)
    for optimizer, p in zip(alone, parameters(together), strict=True):
        assert p.grad is not None
        parameters(optimizer)[0].grad = p.grad.clone()
        optimizer.step()
    together.step()
    for optimizer, p in zip(alone, parameters(together), strict=True):
        assert_exactly(parameters(optimizer)[0].detach(), p.detach())


def test_state_goes_to_torch_and_back(triton_device: torch.device) -> None:
    ours, _ = twins(triton_device, lr=0.1)
    set_gradients(ours)
    ours.step()
    saved = copy.deepcopy(ours.state_dict())
    fresh = Muon([nn.Parameter(p.detach().clone()) for p in parameters(ours)], lr=0.1, backend="triton")
    fresh.load_state_dict(saved)
    set_gradients(ours, fresh)
    ours.step()
    fresh.step()
    for p, q in zip(parameters(ours), parameters(fresh), strict=True):
        assert_exactly(p.detach(), q.detach())
    torch.optim.Muon(parameters(ours), lr=0.1).load_state_dict(
        torch.optim.Muon(parameters(ours), lr=0.1).state_dict() | {"state": saved["state"]}
    )


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float16, 0), (torch.float16, -20), (torch.bfloat16, 0)]
)
def test_stochastic_rounding_uses_the_noise_of_the_torch_path(
    triton_device: torch.device, dtype: torch.dtype, exponent: int
) -> None:
    """An update of a third of a unit in the last place: nearly every element rounds as in the other path."""
    shapes = ((36, 40), (40, 36), (36, 70), (20, 30), (30, 20))
    # fp16's subnormal numbers have the unit 2^-24.
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0 ** max(exponent - 10, -24)
    options: dict[str, Any] = {
        "lr": 1.0,
        "weight_decay": 0.0,
        "stochastic_rounding": True,
        "rounding_seed": 3,
        "momentum_dtype": torch.float32,  # the interpreter rounds a bf16 buffer wrongly
        "adjust_lr_fn": lambda _: 2.0 * unit,  # entries of O are near 1/6
    }
    bases = [((1.0 + torch.rand(shape) / 2) * 2.0**exponent).to(dtype) for shape in shapes]
    results = []
    for backend, device in (("triton", triton_device), ("torch", torch.device("cpu"))):
        ps = [nn.Parameter(base.clone().to(device)) for base in bases]
        optimizer = Muon(ps, backend=backend, **options)
        torch.manual_seed(7)
        for _ in range(2):
            for p in ps:
                p.grad = torch.randn(p.shape).to(device, dtype)
            optimizer.step()
        results.append([p.detach().cpu() for p in ps])
    for base, ours, theirs in zip(bases, *results, strict=True):
        assert ((theirs != base).float().mean() - 0.35).abs() < 0.3
        assert (ours == theirs).float().mean() > 0.97


def test_a_step_for_a_graph_has_the_same_bits(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under capture tables are written by kernels instead of copied, and nothing new is cached."""
    plain, _ = twins(triton_device, lr=0.1, capturable=True)
    recorded = Muon([nn.Parameter(p.detach().clone()) for p in parameters(plain)], lr=0.1, capturable=True)
    recorded.param_groups[0]["backend"] = "triton"
    for step in range(2):
        set_gradients(plain, recorded)
        plain.step()
        with monkeypatch.context() as patch:
            patch.setattr(triton_layout, "_capturing", lambda device, now=step: now == 1)
            patch.setattr(triton_layout, "_captured", [])
            before = triton_layout._uploaded.cache_info()
            recorded.step()
            assert step == 0 or triton_layout._uploaded.cache_info() == before
    for p, q in zip(parameters(plain), parameters(recorded), strict=True):
        assert_exactly(q.detach(), p.detach())


@pytest.mark.parametrize("options", [{}, {"variant": "normuon"}])
def test_the_defaults_of_torch_change_no_bit(triton_device: torch.device, options: dict[str, Any]) -> None:
    plain, _ = twins(triton_device, lr=0.1, **options)
    under, _ = twins(triton_device, lr=0.1, **options)
    copy_weights(plain, under)
    set_gradients(plain, under)
    plain.step()
    triton_layout._new_layout.cache_clear()
    triton_layout._uploaded.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            under.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for p, q in zip(parameters(plain), parameters(under), strict=True):
        assert_exactly(q.detach(), p.detach())


@pytest.mark.parametrize("options", [{}, {"variant": "normuon"}, {"normalize": "schatten4"}])
def test_memory_that_nobody_wrote_is_not_read(triton_device: torch.device, options: dict[str, Any]) -> None:
    """torch's deterministic mode fills new memory with NaN."""
    plain, _ = twins(triton_device, lr=0.1, **options)
    filled, _ = twins(triton_device, lr=0.1, **options)
    copy_weights(plain, filled)
    set_gradients(plain, filled)
    plain.step()
    try:
        torch.use_deterministic_algorithms(True)
        filled.step()
    finally:
        torch.use_deterministic_algorithms(False)
    for p, q in zip(parameters(plain), parameters(filled), strict=True):
        assert_exactly(q.detach(), p.detach())


def test_autograd_notices_a_step_between_forward_and_backward(triton_device: torch.device) -> None:
    optimizer, _ = twins(triton_device, ((20, 30), (36, 40)), lr=0.1)
    losses = [(p * p).sum() for p in parameters(optimizer)]
    set_gradients(optimizer)
    optimizer.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_with_gradients_of_its_own() -> None:
    """Gradients made during capture lie where none lay before, so their addresses must get into the graph."""
    weight, x = torch.randn(72, 88, device="cuda"), torch.randn(88, 16, device="cuda")
    captured, eager = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    optimizers = [Muon([p], lr=0.1, backend="triton", capturable=True) for p in (captured, eager)]

    def step(p: nn.Parameter, optimizer: Muon) -> None:
        optimizer.zero_grad(set_to_none=True)
        (p @ x).square().sum().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(captured, optimizers[0])
    torch.cuda.current_stream().wait_stream(stream)
    optimizers[0].zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, optimizers[0])
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        step(eager, optimizers[1])
    assert_exactly(captured.detach(), eager.detach())

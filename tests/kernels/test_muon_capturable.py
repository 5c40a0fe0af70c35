"""Steps that read nothing back from the device, and everything that reaches the optimizer while it runs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from muonrl_kernels import Muon
from tests.kernels.plain_muon import SIZES, matrix, pairs
from tests.numerics import assert_exactly, relative_error

VARIANTS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum_style": "sum"},
    {"cautious_wd": True, "variant": "normuon"},
    {"momentum_dtype": torch.bfloat16},
]


class NoReadback(TorchDispatchMode):
    """Fails on every operation that waits for the device to hand a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ), f"{func} reads from the device"
        return func(*args, **(kwargs or {}))


def build(dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(matrix(s, i, dtype)) for i, s in enumerate(SIZES)]
    vector = nn.Parameter(matrix((5,), 50, dtype))
    groups = [{"params": params}, {"params": [vector], "algorithm": "adamw"}]
    return [*params, vector], Muon(groups, lr=torch.tensor(0.1), capturable=True, **options)


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = matrix(p.shape, 100 * step + i, p.dtype)


def test_the_guard_sees_a_readback() -> None:
    with pytest.raises(AssertionError, match="reads"), NoReadback():
        torch.ones(1).item()


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_reads_nothing_back(options: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        options = {**options, "stochastic_rounding": True}
    params, optimizer = build(dtype, compute_dtype=None, **options)
    for step in range(3):
        set_gradients(params, step)
        if step == 1:
            params[0].grad[0, 0] = math.nan
        with NoReadback():
            optimizer.step()
    assert optimizer.skipped == 1


@pytest.mark.parametrize("options", VARIANTS[:3])
def test_same_numbers_as_without(options: dict[str, Any]) -> None:
    shared = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9, **options}
    plain = pairs(lambda ps: Muon(ps, **shared))
    captured = pairs(
        lambda ps: Muon(ps, **{**shared, "lr": torch.tensor(0.1, dtype=torch.float64)}, capturable=True)
    )
    for (p, _), (q, _) in zip(plain, captured, strict=True):
        assert relative_error(q, p) < 1e-13


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing(
    options: dict[str, Any], dtype: torch.dtype, bad: float
) -> None:
    if dtype == torch.bfloat16:
        options = {**options, "stochastic_rounding": True}
    params, optimizer = build(dtype, **options)
    set_gradients(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
    set_gradients(params, 1)
    for p in params:
        p.grad.view(-1)[-1] = bad
    params[1].grad = matrix(params[1].shape, 7, dtype)
    optimizer.step()
    for i, (p, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(p.detach(), old) == (i != 1)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, states[i][key]) == (i != 1), key
    assert optimizer.skipped == len(params) - 1


def test_a_device_learning_rate_is_read_at_each_step() -> None:
    params, optimizer = build(torch.float64, weight_decay=0.0, momentum=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    lengths = []
    for _ in range(3):
        before = params[0].detach().clone()
        set_gradients(params, 0)
        optimizer.step()
        scheduler.step()
        lengths.append((params[0].detach() - before).norm().item())
    assert [a / b for a, b in zip(lengths, lengths[1:], strict=False)] == pytest.approx([2, 2], rel=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


def test_adamw_groups_are_torchs() -> None:
    p, q = (nn.Parameter(matrix((4, 3), 0)) for _ in range(2))
    ours = Muon(
        [{"params": [p], "algorithm": "adamw", "weight_decay": 0.2}], lr=torch.tensor(0.01), capturable=True
    )
    theirs = torch.optim.AdamW([q], lr=0.01, weight_decay=0.2)
    for step in range(4):
        p.grad = matrix((3, 4), step).mT
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert relative_error(p.detach(), q.detach()) < 1e-6


def test_resuming_continues_with_the_same_noise() -> None:
    params, optimizer = build(torch.bfloat16, stochastic_rounding=True)
    set_gradients(params, 0)
    optimizer.step()
    others, resumed = build(torch.bfloat16, stochastic_rounding=True)
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group, other in ((params, optimizer), (others, resumed)):
        set_gradients(group, 1)
        other.step()
    for p, q in zip(params, others, strict=True):
        assert_exactly(q.detach(), p.detach())


@pytest.mark.parametrize("kind", ["float", "tensor", "double tensor"])
def test_every_kind_of_learning_rate(kind: str) -> None:
    lr = {"float": 0.25, "tensor": torch.tensor(0.25), "double tensor": torch.tensor([0.25]).double()}[kind]
    truth = None
    for capturable in (False, True):
        p = nn.Parameter(matrix((6, 9), 0))
        q = nn.Parameter(matrix((6,), 1))
        p.grad, q.grad = matrix((6, 9), 2), matrix((6,), 3)
        Muon([{"params": [p]}, {"params": [q], "algorithm": "adamw"}], lr=lr, capturable=capturable).step()
        truth = p.detach() if truth is None else truth
        assert relative_error(p.detach(), truth) < 1e-12

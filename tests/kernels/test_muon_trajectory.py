"""Whole runs: the path of torch.optim.Muon, changing optimizers in the middle, and the memory of a step."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from muonrl_kernels import Muon
from tests.kernels.plain_muon import PlainMuon, matrix
from tests.numerics import assert_as_good_as, relative_error

STEPS = 200
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.05, "momentum": 0.95}
WIDTHS = (12, 24, 20, 8)


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    pairs = list(zip(WIDTHS[1:], WIDTHS, strict=False))
    return [nn.Parameter((matrix(s, i) / s[1] ** 0.5).to(dtype)) for i, s in enumerate(pairs)]


def loss_of(params: list[Any], step: int) -> Tensor:
    """Regression of a teacher network's outputs on a batch that depends on the step alone."""
    x = y = matrix((64, WIDTHS[0]), 1000 + step, params[0].dtype)
    for i, p in enumerate(params):
        y = y @ matrix(p.shape, 50 + i, p.dtype).T / p.shape[1] ** 0.5
        x = x @ p.T
        if i + 1 < len(params):
            x, y = F.gelu(x), F.gelu(y)
    return ((x - y) ** 2).mean()


def descend(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS
) -> Tensor:
    """The loss at each step."""
    curve = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = loss_of(params, step)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


def exact_descent() -> Tensor:
    plain = [PlainMuon(p.detach().double(), **OPTIONS) for p in weights()]
    curve = []
    for step in range(STEPS):
        leaves = [m.weight.clone().requires_grad_() for m in plain]
        loss = loss_of(leaves, step)
        for m, g in zip(plain, torch.autograd.grad(loss, leaves), strict=True):
            m.step(g)
        curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


@pytest.fixture(scope="module")
def curves() -> dict[str, Tensor]:
    """Losses of 200 steps: in fp64, by torch.optim.Muon (whose iteration is in bf16), by ours in fp32 and bf16."""
    found = {"exact": exact_descent()}
    for name, make in {
        "torch": lambda ps: torch.optim.Muon(ps, **OPTIONS),
        "float32": lambda ps: Muon(ps, **OPTIONS, compute_dtype=torch.float32),
        "bfloat16": lambda ps: Muon(ps, **OPTIONS, compute_dtype=torch.bfloat16),
    }.items():
        params = weights()
        found[name] = descend(params, make(params))
    return found


def test_the_run_means_something(curves: dict[str, Tensor]) -> None:
    exact = curves["exact"]
    assert exact[-20:].mean() < 0.2 * exact[:5].mean()
    assert relative_error(curves["torch"], exact) > 1e-4


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_same_trajectory_as_torch(curves: dict[str, Tensor], name: str) -> None:
    assert_as_good_as(curves[name], curves["torch"], curves["exact"])


def test_fp32_follows_fp64_far_closer_than_torch_does(curves: dict[str, Tensor]) -> None:
    error = relative_error(curves["float32"], curves["exact"])
    assert error < 0.05 * relative_error(curves["torch"], curves["exact"])


def stored(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_torch_to_ours_to_torch(curves: dict[str, Tensor]) -> None:
    params = weights()
    makers: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.Muon, Muon, torch.optim.Muon]
    state: dict[str, Any] | None = None
    curve = []
    for part, make in enumerate(makers):
        optimizer = make(params, **OPTIONS)
        if state is not None:
            optimizer.load_state_dict(state)
        curve.append(descend(params, optimizer, part * 60, (part + 1) * 60))
        state = stored(optimizer.state_dict())
    assert_as_good_as(torch.cat(curve), curves["torch"][:180], curves["exact"][:180])


def peak_bytes(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shapes: list[tuple[int, int]]
) -> int:
    """Most memory that a step holds beyond what there was before it, by the allocator's own record."""
    params = [nn.Parameter(torch.zeros(s)) for s in shapes]
    for i, p in enumerate(params):
        p.grad = matrix(p.shape, i, torch.float32)
    optimizer = make(params)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        optimizer.step()
    held = peak = 0
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_record_of_memory_sees_a_temporary() -> None:
    class Wasteful(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            copies = [p.detach() + 1 for p in self.param_groups[0]["params"]]
            assert len(copies) == 3

    found = peak_bytes(lambda ps: Wasteful(ps, lr=0.1), [(64, 64)] * 3)
    assert found == pytest.approx(3 * 64 * 64 * 4, rel=0.02)


@pytest.mark.parametrize(
    "shapes",
    [
        [(256, 1024)] * 6,
        [(1024, 256)] * 6,
        [(512, 512)] * 6,
        [(512, 384), (384, 512), (320, 640), (640, 320)],
    ],
    ids=["wide", "tall", "square", "mixed"],
)
def test_a_step_needs_no_more_memory_than_torchs(shapes: list[tuple[int, int]]) -> None:
    theirs = peak_bytes(lambda ps: torch.optim.Muon(ps, ns_steps=2), shapes)
    ours = peak_bytes(Muon, shapes)
    assert ours <= theirs, f"{ours / 2**20:.2f} MiB against {theirs / 2**20:.2f} MiB"


@pytest.mark.parametrize("count", [4, 40])
def test_memory_does_not_grow_with_the_model(count: int) -> None:
    assert peak_bytes(Muon, [(256, 512)] * count) <= peak_bytes(Muon, [(256, 512)]) + 100_000


def test_max_workspace_bytes_bounds_a_stack() -> None:
    shapes = [(64, 64)] * 64
    bounded = peak_bytes(lambda ps: Muon(ps, max_workspace_bytes=4 * 64 * 64 * 4), shapes)
    assert bounded < 0.2 * peak_bytes(Muon, shapes)

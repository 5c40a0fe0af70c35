"""Saving, loading and converting the state of Muon, also to and from torch.optim.Muon."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonrl_kernels import Muon, convert_momentum
from muonrl_kernels.coefficients import POLAR_EXPRESS
from tests.numerics import assert_exactly, relative_error


def make(
    optimizer: type[torch.optim.Optimizer], **options: Any
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.linspace(-1, 1, 24).reshape(4, 6))
    return p, optimizer([p], lr=0.1, **options)


def advance(p: nn.Parameter, optimizer: torch.optim.Optimizer, first: int, last: int) -> Tensor:
    for step in range(first, last):
        p.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return p.detach().clone()


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict after a trip through a file, read in the safe mode."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("schedule", [None, "polar_express", POLAR_EXPRESS, [(2.0, -1.5, 0.5)] * 6])
def test_resuming_from_a_file_is_bitwise_the_same(schedule: Any) -> None:
    p, optimizer = make(Muon, ns_schedule=schedule, compute_dtype=torch.float32)
    advance(p, optimizer, 0, 3)
    state, weights = stored(optimizer.state_dict()), p.detach().clone()
    uninterrupted = advance(p, optimizer, 3, 6)
    q, fresh = make(Muon)
    with torch.no_grad():
        q.copy_(weights)
    fresh.load_state_dict(state)
    assert_exactly(advance(q, fresh, 3, 6), uninterrupted)


@pytest.mark.parametrize(
    "options",
    [
        {"split": (3, 1), "variant": "normuon", "cautious_wd": True},
        {"split": 2, "split_dim": 1, "variant": "normuon", "momentum_style": "sum", "beta2": 0.5},
        {"momentum_dtype": torch.float64, "capturable": True, "max_workspace_bytes": 1 << 20},
    ],
)
def test_every_option_is_saved(options: dict[str, Any]) -> None:
    p, optimizer = make(Muon, **options)
    advance(p, optimizer, 0, 3)
    state, weights = stored(optimizer.state_dict()), p.detach().clone()
    uninterrupted = advance(p, optimizer, 3, 6)
    q, fresh = make(Muon)
    with torch.no_grad():
        q.copy_(weights)
    fresh.load_state_dict(state)
    assert {k: fresh.param_groups[0][k] for k in options} == options
    assert_exactly(advance(q, fresh, 3, 6), uninterrupted)


def test_checkpoints_of_the_first_version_load() -> None:
    """They lack the options that came later; the optimizer's own fill in."""
    p, optimizer = make(Muon, compute_dtype=torch.float32)
    advance(p, optimizer, 0, 3)
    state = stored(optimizer.state_dict())
    later = {"batched_matrices", "split", "split_dim", "cautious_wd", "variant", "beta2", "momentum_dtype"}
    later |= {"stochastic_rounding", "rounding_seed", "capturable", "max_workspace_bytes"}
    for group in state["param_groups"]:
        for key in later & set(group):
            del group[key]
    q, fresh = make(Muon, cautious_wd=True)
    with torch.no_grad():
        q.copy_(p)
    fresh.load_state_dict(state)
    group = fresh.param_groups[0]
    assert group["cautious_wd"] and group["compute_dtype"] == torch.float32 and group["split"] is None
    fresh.param_groups[0]["cautious_wd"] = False
    assert_exactly(advance(q, fresh, 3, 5), advance(p, optimizer, 3, 5))


def test_torchs_buffer_is_an_average_whatever_the_constructor_says() -> None:
    q, theirs = make(torch.optim.Muon)
    advance(q, theirs, 0, 2)
    _, ours = make(Muon, momentum_style="sum")
    ours.load_state_dict(stored(theirs.state_dict()))
    assert ours.param_groups[0]["momentum_style"] == "ema"


def test_hooks_on_loading_are_seen() -> None:
    p, optimizer = make(Muon, momentum_dtype=torch.float64)
    advance(p, optimizer, 0, 2)
    _, fresh = make(Muon, momentum_dtype=torch.float64)
    q = fresh.param_groups[0]["params"][0]

    def double(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        buffer = given["state"][0]["momentum_buffer"]
        return {**given, "state": {0: {"momentum_buffer": buffer * 2}}}

    fresh.register_load_state_dict_pre_hook(double)
    fresh.load_state_dict(optimizer.state_dict())
    assert_exactly(fresh.state[q]["momentum_buffer"], optimizer.state[p]["momentum_buffer"] * 2)


def test_adamw_groups_resume_too() -> None:
    def build() -> tuple[nn.Parameter, Muon]:
        p = nn.Parameter(torch.linspace(-1, 1, 24).reshape(4, 6))
        return p, Muon([{"params": [p], "algorithm": "adamw", "lr": 0.1}])

    p, optimizer = build()
    advance(p, optimizer, 0, 3)
    state, weights = stored(optimizer.state_dict()), p.detach().clone()
    uninterrupted = advance(p, optimizer, 3, 6)
    q, fresh = build()
    with torch.no_grad():
        q.copy_(weights)
    fresh.load_state_dict(state)
    assert_exactly(advance(q, fresh, 3, 6), uninterrupted)


def test_torch_reads_our_state_and_we_read_torchs() -> None:
    p, ours = make(Muon)
    q, theirs = make(torch.optim.Muon)
    advance(p, ours, 0, 3)
    advance(q, theirs, 0, 3)
    assert_exactly(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
    assert set(ours.state[p]) == set(theirs.state[q]) == {"momentum_buffer"}
    assert set(theirs.param_groups[0]) <= set(ours.param_groups[0])
    r, into_torch = make(torch.optim.Muon)
    into_torch.load_state_dict(stored(ours.state_dict()))
    s, into_ours = make(Muon, momentum_style="ema", compute_dtype=torch.float32, ns_schedule="you")
    into_ours.load_state_dict(stored(theirs.state_dict()))
    group = into_ours.param_groups[0]
    assert (group["algorithm"], group["compute_dtype"], group["ns_schedule"]) == (
        "muon",
        torch.float32,
        "you",
    )
    with torch.no_grad():
        r.copy_(p)
        s.copy_(q)
    end = advance(q, theirs, 3, 5)
    assert_exactly(advance(r, into_torch, 3, 5).isfinite().all(), torch.tensor(True))
    assert relative_error(advance(s, into_ours, 3, 5), end) < 0.1


def test_copies_and_pickles_continue() -> None:
    p, optimizer = make(Muon)
    advance(p, optimizer, 0, 2)
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        q = clone.param_groups[0]["params"][0]
        assert_exactly(advance(q, clone, 2, 4), advance(*copy.deepcopy((p, optimizer)), 2, 4))


def test_converting_the_momentum_keeps_the_path() -> None:
    p, total = make(Muon, momentum_style="sum", compute_dtype=torch.float32)
    advance(p, total, 0, 3)
    converted = convert_momentum(total.state_dict(), "ema")
    assert converted["param_groups"][0]["momentum_style"] == "ema"
    q, ema = make(Muon, compute_dtype=torch.float32)
    with torch.no_grad():
        q.copy_(p)
    ema.load_state_dict(converted)
    there_and_back = convert_momentum(converted, "sum")["state"][0]["momentum_buffer"]
    assert relative_error(there_and_back, total.state[p]["momentum_buffer"]) < 1e-6
    assert relative_error(advance(q, ema, 3, 6), advance(p, total, 3, 6)) < 1e-5
    same = convert_momentum(converted, "ema")["state"][0]["momentum_buffer"]
    assert_exactly(same, converted["state"][0]["momentum_buffer"])
    with pytest.raises(ValueError, match="to must be one of ema, sum"):
        convert_momentum(converted, "mean")

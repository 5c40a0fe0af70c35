"""Cautious weight decay, NorMuon, buffer dtypes and stochastic rounding against fp64 written out plainly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonrl_kernels import Muon
from muonrl_kernels.rounding import noise_keys, rounding_noise, store_rounded
from tests.kernels.plain_muon import PlainMuon, matrix, pairs
from tests.numerics import assert_exactly, relative_error

OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_every_variant_is_its_formula(nesterov: bool, cautious: bool, variant: str) -> None:
    beta2 = 0.8 if variant == "normuon" else None
    options = {**OPTIONS, "nesterov": nesterov, "cautious_wd": cautious, "variant": variant}
    results = pairs(
        lambda ps: Muon(ps, **options, **({"beta2": beta2} if beta2 else {})),
        nesterov=nesterov,
        cautious=cautious,
        beta2=beta2,
    )
    for p, truth in results:
        assert relative_error(p, truth) < 1e-12


def test_normuon_keeps_the_norm_and_evens_out_the_rows() -> None:
    def moved(variant: str) -> Tensor:
        p = nn.Parameter(torch.zeros(6, 30, dtype=torch.float64))
        optimizer = Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, variant=variant, ns_steps=3)
        for seed in range(4):
            before = p.detach().clone()
            p.grad = matrix((6, 30), seed)
            p.grad[0] *= 1e-3  # a row that so few steps of orthogonalization leave small
            optimizer.step()
        assert variant == "muon" or optimizer.state[p]["second_momentum_buffer"].shape == (6, 1)
        return (p.detach() - before).norm(dim=1)

    plain, evened = moved("muon"), moved("normuon")
    assert evened.norm().item() == pytest.approx(plain.norm().item(), rel=1e-9)
    assert plain.max() / plain.min() > 10 and evened.max() / evened.min() < 1.5


def test_normuon_survives_a_zero_gradient() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    p.grad = torch.zeros(3, 4)
    Muon([p], lr=0.1, weight_decay=0.5, variant="normuon").step()
    assert_exactly(p.detach(), torch.ones(3, 4) * (1 - 0.1 * 0.5))


def test_cautious_decay_leaves_entries_that_the_update_pushes_outwards() -> None:
    p = nn.Parameter(torch.tensor([[2.0, 2.0], [-2.0, -2.0]]))
    p.grad = torch.tensor([[1.0, -1.0], [1.0, 1.0]])  # orthogonal already: O has its signs
    still = nn.Parameter(p.detach().clone())
    still.grad = p.grad.clone()
    Muon([p], lr=0.1, weight_decay=1.0, cautious_wd=True).step()
    Muon([still], lr=0.1, weight_decay=0.0).step()
    decayed = (p.detach() - still.detach()) / still.detach().sign()
    torch.testing.assert_close(decayed, torch.tensor([[-0.2, 0.0], [0.0, 0.0]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("style", ["ema", "sum"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("param", "buffer"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_momentum_dtype(style: str, nesterov: bool, param: torch.dtype, buffer: torch.dtype) -> None:
    p = nn.Parameter(matrix((8, 12), 0, param))
    optimizer = Muon([p], momentum_dtype=buffer, momentum_style=style, nesterov=nesterov, **OPTIONS)
    exact = torch.zeros(8, 12, dtype=torch.float64)
    plain = PlainMuon(p.detach().double(), **OPTIONS, nesterov=nesterov)
    for step in range(5):
        g = matrix((8, 12), 10 + step, param)
        p.grad = g.clone()
        optimizer.step()
        assert_exactly(p.grad, g)
        plain.step(g)
        exact = 0.9 * exact + (0.1 if style == "ema" else 1.0) * g.double()
    found = optimizer.state[p]["momentum_buffer"]
    assert found.dtype == buffer
    assert relative_error(found, exact) < 4 * max(torch.finfo(buffer).eps, torch.finfo(torch.float32).eps)
    assert relative_error(p.detach(), plain.weight) < max(
        2 * torch.finfo(param).eps, 0.2 * torch.finfo(buffer).eps, 1e-6
    )


def test_loading_does_not_cut_a_wide_buffer_down() -> None:
    p = nn.Parameter(matrix((8, 12), 0, torch.bfloat16))
    optimizer = Muon([p], momentum_dtype=torch.float32, variant="normuon")
    p.grad = matrix((8, 12), 1, torch.bfloat16) / 3
    optimizer.step()
    q = nn.Parameter(p.detach().clone())
    fresh = Muon([q], momentum_dtype=torch.float32, variant="normuon")
    fresh.load_state_dict(optimizer.state_dict())
    for key in ("momentum_buffer", "second_momentum_buffer"):
        assert fresh.state[q][key].dtype == torch.float32
        assert_exactly(fresh.state[q][key], optimizer.state[p][key])
    unset = Muon([nn.Parameter(p.detach().clone())])
    plain = Muon([nn.Parameter(p.detach().clone())])
    plain.param_groups[0]["params"][0].grad = p.grad
    plain.step()
    unset.load_state_dict(plain.state_dict())
    assert unset.state[unset.param_groups[0]["params"][0]]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_unbiased_and_goes_to_a_neighbour(dtype: torch.dtype) -> None:
    """Means over 4096 draws lie within five standard errors; plain rounding is off by up to half a unit."""
    eps = torch.finfo(dtype).eps
    values = torch.tensor(
        [1 + eps / 3, -1 - eps / 5, 1.5, 0.75 - eps / 7, 3e-7, -1e-7, 6.1e-5 * (1 + eps / 3), 0.0]
    )
    draws = 4096
    target = torch.empty(draws, len(values), dtype=dtype)
    store_rounded(target, values.repeat(draws, 1), noise_keys(0, 1, torch.tensor(3.0)))
    mean = target.double().mean(0)
    low, high = target.double().amin(0), target.double().amax(0)
    spread = (high - low).clamp(min=1e-30)
    assert ((mean - values.double()).abs() <= 5 * spread / 2 / draws**0.5 + 1e-12 * values.abs()).all()
    for value, lo, hi in zip(values.double().tolist(), low.tolist(), high.tolist(), strict=True):
        assert lo <= value <= hi
        neighbours = target.double()[:, values.double().tolist().index(value)].unique()
        assert len(neighbours) <= 2
    assert low[2] == high[2] == 1.5 and low[-1] == high[-1] == 0.0
    assert (low[0], high[0]) == (1.0, 1.0 + eps)


def test_noise_is_uniform_and_differs_by_step_stream_and_seed() -> None:
    step = torch.tensor(1.0)
    keys = [noise_keys(*k) for k in ((0, 0, step), (0, 0, step + 1), (0, 1, step), (1, 0, step))]
    noise = [rounding_noise(k, 0, 1 << 16, torch.device("cpu")) for k in keys]
    for i, x in enumerate(noise):
        for bit in range(32):
            assert abs(((x >> bit) & 1).double().mean().item() - 0.5) < 0.01
        for y in noise[:i]:
            agree = (((x ^ y) & 0xFFFF) < 0x8000).double().mean().item()
            assert abs(agree - 0.5) < 0.01
    tail = rounding_noise(keys[0], 1000, 1 << 16, torch.device("cpu"))
    assert_exactly(tail, noise[0][1000:])


def test_rounding_in_blocks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values, keys = matrix((37, 10), 0, torch.float32), noise_keys(0, 1, torch.tensor(3.0))
    whole, parts = (torch.empty(37, 10, dtype=torch.bfloat16) for _ in range(2))
    store_rounded(whole, values.clone(), keys)
    monkeypatch.setattr("muonrl_kernels.rounding._BLOCK", 95)
    store_rounded(parts, values.clone(), keys)
    assert_exactly(parts, whole)


def rounded(steps: int, *, stochastic: bool, seed: int = 0, others: int = 0) -> Tensor:
    """A bf16 matrix of ones after tiny updates, among `others` more parameters that come after it."""
    params = [nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16)) for _ in range(1 + others)]
    optimizer = Muon(
        params, lr=2e-3, weight_decay=0.0, momentum=0.0, stochastic_rounding=stochastic, rounding_seed=seed
    )
    for _ in range(steps):
        for p in params:
            p.grad = torch.eye(16, dtype=torch.bfloat16)
        optimizer.step()
    return params[0].detach()


def test_updates_below_the_last_place_survive_on_average() -> None:
    steps = 60
    exact = nn.Parameter(torch.ones(16, 16))
    optimizer = Muon([exact], lr=2e-3, weight_decay=0.0, momentum=0.0)
    for _ in range(steps):
        exact.grad = torch.eye(16)
        optimizer.step()
    diagonal = exact.detach().diagonal()
    assert 0.85 < diagonal.mean() < 0.95
    assert_exactly(rounded(steps, stochastic=False), torch.ones(16, 16, dtype=torch.bfloat16))
    moved = torch.stack([rounded(steps, stochastic=True, seed=s).diagonal().float() for s in range(8)])
    assert moved.mean().item() == pytest.approx(diagonal.mean().item(), abs=0.003)


def test_rounding_repeats_by_seed_and_ignores_other_parameters() -> None:
    assert_exactly(rounded(5, stochastic=True), rounded(5, stochastic=True))
    assert_exactly(rounded(5, stochastic=True), rounded(5, stochastic=True, others=3))
    assert not torch.equal(rounded(5, stochastic=True), rounded(5, stochastic=True, seed=1))


@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_a_resumed_run_rounds_the_same(variant: str) -> None:
    def build(weight: Tensor) -> tuple[nn.Parameter, Muon]:
        p = nn.Parameter(weight.clone())
        return p, Muon([p], lr=0.01, stochastic_rounding=True, variant=variant, momentum_dtype=torch.float32)

    def advance(p: nn.Parameter, optimizer: Muon, first: int, last: int) -> None:
        for step in range(first, last):
            p.grad = matrix((8, 12), step, torch.bfloat16)
            optimizer.step()

    p, optimizer = build(matrix((8, 12), 99, torch.bfloat16))
    advance(p, optimizer, 0, 3)
    q, resumed = build(p.detach())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    advance(p, optimizer, 3, 6)
    advance(q, resumed, 3, 6)
    assert_exactly(q.detach(), p.detach())
    assert optimizer.state[p]["step"] == 6

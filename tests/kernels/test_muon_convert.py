"""Converted momentum continues another Muon's path: each of them is written out here as its source has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonrl_kernels import Muon, convert_lr, convert_momentum
from muonrl_kernels.coefficients import KJ
from muonrl_kernels.newton_schulz import orthogonalize
from tests.kernels.plain_muon import matrix
from tests.numerics import assert_exactly, relative_error

SHAPES = [(8, 12), (12, 8), (6,)]
MATRICES = 2


def ratio_of(name: str | None, shape: torch.Size) -> float:
    a, b = shape
    return {
        "original": max(1, a / b) ** 0.5,
        "rms_norm": 0.2 * max(a, b) ** 0.5,
        "spectral_norm": (a / b) ** 0.5,
        None: 1.0,
    }[name]


class Other(torch.optim.Optimizer):
    """A peer: its group options and state keys as its own code has them, on matrices and (where it can) vectors."""

    key = "momentum_buffer"
    first, second = "exp_avg", "exp_avg_sq"

    def momentum(self, m: Tensor, g: Tensor, mu: float, nesterov: bool) -> Tensor:
        m.mul_(mu).add_(g)
        return g + mu * m if nesterov else m.clone()

    def muon(self, p: Tensor, mu: float, lr: float, wd: float, nesterov: bool, adjust: str | None) -> None:
        state = self.state[p]
        if self.key not in state:
            state[self.key] = torch.zeros_like(p)
        u = self.momentum(state[self.key], p.grad, mu, nesterov)
        p.mul_(1 - lr * wd)
        p.sub_(lr * ratio_of(adjust, p.shape) * orthogonalize(u, schedule=KJ))

    def adam(self, p: Tensor, t: int, lr: float, wd: float, betas: tuple[float, float], eps: float) -> None:
        state = self.state[p]
        if self.first not in state:
            state[self.first], state[self.second] = torch.zeros_like(p), torch.zeros_like(p)
        state[self.first].lerp_(p.grad, 1 - betas[0])
        state[self.second].lerp_(p.grad.square(), 1 - betas[1])
        first = state[self.first] / (1 - betas[0] ** t)
        p.mul_(1 - lr * wd)
        p.sub_(lr * first / ((state[self.second] / (1 - betas[1] ** t)).sqrt() + eps))


class KellerJordan(Other):
    """SingleDeviceMuonWithAuxAdam."""

    def __init__(self, ps: list[nn.Parameter]) -> None:
        muon = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
        adam = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1, "use_muon": False}
        super().__init__([{"params": ps[:MATRICES], **muon}, {"params": ps[MATRICES:], **adam}], {})

    def momentum(self, m: Tensor, g: Tensor, mu: float, nesterov: bool) -> Tensor:
        m.lerp_(g, 1 - mu)
        return g.lerp(m, mu)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                if g["use_muon"]:
                    self.muon(p, g["momentum"], g["lr"], g["weight_decay"], True, "original")
                else:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    self.adam(p, self.state[p]["step"], g["lr"], g["weight_decay"], g["betas"], g["eps"])


class KellerJordan2024(Other):
    """The class of November 2024: a sum, one kind of parameter."""

    def __init__(self, ps: list[nn.Parameter]) -> None:
        super().__init__(ps[:MATRICES], {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 5})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                self.muon(p, g["momentum"], g["lr"], 0.0, g["nesterov"], "original")


class Moonlight(Other):
    """One group; each parameter's state says whether it is Muon's."""

    first, second = "moment1", "moment2"

    def __init__(self, ps: list[nn.Parameter]) -> None:
        options = {"lr": 1e-2, "wd": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5}
        super().__init__(ps, {**options, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8})
        for i, p in enumerate(ps):
            self.state[p]["use_muon"] = i < MATRICES

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                if self.state[p]["use_muon"]:
                    self.muon(p, g["momentum"], g["lr"], g["wd"], g["nesterov"], "rms_norm")
                else:
                    self.state[p]["step"] = t = self.state[p].get("step", 0) + 1
                    self.adam(p, t, g["lr"], g["wd"], g["adamw_betas"], g["adamw_eps"])


class Dion(Other):
    """dion.Muon: nesterov off, spectral norm, AdamW's step counted by group."""

    key, first, second = "momentum", "momentum", "variance"

    def __init__(self, ps: list[nn.Parameter]) -> None:
        shared = {"lr": 0.01, "mu": 0.9, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "step": 0}
        shared |= {"epsilon": 1e-8, "nesterov": False, "flatten": False, "adjust_lr": "spectral_norm"}
        groups = [{"params": ps[:MATRICES]}, {"params": ps[MATRICES:], "algorithm": "adamw"}]
        super().__init__(groups, {**shared, "algorithm": "muon"})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            g["step"] += 1
            for p in g["params"]:
                if g["algorithm"] == "muon":
                    self.muon(p, g["mu"], g["lr"], g["weight_decay"], g["nesterov"], g["adjust_lr"])
                else:
                    betas = (g["beta1"], g["beta2"])
                    self.adam(p, g["step"], g["lr"], g["weight_decay"], betas, g["epsilon"])


class GramNewtonSchulz(Other):
    """gram_newton_schulz.Muon without its optional second optimizer."""

    key = "momentum"

    def __init__(self, ps: list[nn.Parameter]) -> None:
        options = {
            "lr": 1e-2,
            "momentum": 0.9,
            "weight_decay": 0.1,
            "nesterov": True,
            "adjust_lr": "rms_norm",
        }
        super().__init__(ps[:MATRICES], options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                self.muon(p, g["momentum"], g["lr"], g["weight_decay"], g["nesterov"], g["adjust_lr"])


class Torch(Other):
    """torch.optim.Muon's options and buffers; its own bf16 iteration would hide small mistakes."""

    def __init__(self, ps: list[nn.Parameter]) -> None:
        super().__init__(ps[:MATRICES], torch.optim.Muon([torch.zeros(1, 1)], momentum=0.9).defaults)

    def momentum(self, m: Tensor, g: Tensor, mu: float, nesterov: bool) -> Tensor:
        m.lerp_(g, 1 - mu)
        return g.lerp(m, mu) if nesterov else m.clone()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                self.muon(p, g["momentum"], g["lr"], g["weight_decay"], g["nesterov"], "original")


PEERS: dict[str, Callable[[list[nn.Parameter]], Other]] = {
    "torch": Torch,
    "keller_jordan": KellerJordan,
    "keller_jordan_2024": KellerJordan2024,
    "moonlight": Moonlight,
    "dion": Dion,
    "gram_newton_schulz": GramNewtonSchulz,
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(matrix(s, i)) for i, s in enumerate(SHAPES)]


def advance(params: list[nn.Parameter], optimizer: Any, first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        for i, p in enumerate(params):
            p.grad = matrix(p.shape, 100 + 10 * step + i)
        optimizer.step()
    return [p.detach().clone() for p in params]


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def ours(peer: Any, params: list[nn.Parameter], **options: Any) -> Muon:
    groups: list[dict[str, Any]] = [{"params": params[:MATRICES]}]
    if peer in (KellerJordan, Moonlight, Dion):
        groups.append({"params": params[MATRICES:], "algorithm": "adamw"})
    return Muon(groups, **options)


@pytest.mark.parametrize("style", ["ema", "sum"])
@pytest.mark.parametrize("name", PEERS)
def test_ours_continues_where_theirs_stopped(name: str, style: str) -> None:
    params = parameters()
    theirs = PEERS[name](params)
    advance(params, theirs, 0, 3)
    before = copy.deepcopy(theirs.state_dict())
    mine = copies(params)
    optimizer = ours(PEERS[name], mine)
    optimizer.load_state_dict(convert_momentum(theirs.state_dict(), style, source=name))
    assert optimizer.param_groups[0]["momentum_style"] == style
    for key, value in theirs.state_dict()["state"].items():
        for entry, old in value.items():
            assert not isinstance(old, Tensor) or torch.equal(old, before["state"][key][entry])
    truth = advance(params, theirs, 3, 6)
    for p, t in zip(advance(mine, optimizer, 3, 6), truth, strict=True):
        assert relative_error(p, t) < 1e-7


@pytest.mark.parametrize("style", ["ema", "sum"])
@pytest.mark.parametrize("name", PEERS)
def test_theirs_continues_where_ours_stopped(name: str, style: str) -> None:
    first = parameters()
    seed = PEERS[name](first)
    advance(first, seed, 0, 2)
    mine = copies(first)
    optimizer = ours(PEERS[name], mine)
    optimizer.load_state_dict(convert_momentum(seed.state_dict(), style, source=name))
    advance(mine, optimizer, 2, 4)
    params = copies(mine)
    theirs = PEERS[name](params)
    theirs.load_state_dict(convert_momentum(optimizer.state_dict(), name))
    truth = advance(params, theirs, 4, 7)
    for p, t in zip(advance(mine, optimizer, 4, 7), truth, strict=True):
        assert relative_error(p, t) < 1e-7


def test_from_one_peer_to_another() -> None:
    params = parameters()
    moonlight = Moonlight(params)
    advance(params, moonlight, 0, 3)
    others = copies(params)
    dion = Dion(others)
    dion.load_state_dict(convert_momentum(moonlight.state_dict(), "dion", source="moonlight"))
    truth = advance(params, moonlight, 3, 5)
    for p, t in zip(advance(others, dion, 3, 5), truth, strict=True):
        assert relative_error(p, t) < 1e-7


def state_of(algorithm: str = "muon", **options: Any) -> dict[str, Any]:
    p = nn.Parameter(torch.eye(3))
    optimizer = Muon([{"params": [p], "algorithm": algorithm}], **options)
    p.grad = torch.eye(3)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("state", "to", "text"),
    [
        (state_of("adamw"), "torch", "has no AdamW groups"),
        (state_of("adamw"), "gram_newton_schulz", "has no AdamW groups"),
        (state_of(adjust_lr_fn="match_rms_adamw"), "keller_jordan", "always has adjust_lr_fn='original'"),
        (state_of(), "moonlight", "always has adjust_lr_fn='match_rms_adamw', this group has 'original'"),
        (state_of(nesterov=False), "keller_jordan", "always has nesterov=True"),
        (state_of(), "dion", "dion has no adjust_lr for adjust_lr_fn=None"),
        (state_of(momentum=1.0), "sum", "1 - momentum > 0"),
        (state_of(), "dian", "to must be one of ema, sum, torch"),
    ],
)
def test_what_cannot_be_expressed(state: dict[str, Any], to: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        convert_momentum(state, to)


def test_unknown_sources() -> None:
    with pytest.raises(ValueError, match="source must be one of muonrl, torch"):
        convert_momentum(state_of(), "ema", source="adam")
    dion = {"state": {}, "param_groups": [{"params": [0], "algorithm": "lion"}]}
    with pytest.raises(ValueError, match="'lion' have no counterpart"):
        convert_momentum(dion, source="dion")


def test_buffers_of_flattened_convolutions_take_the_parameters_shape() -> None:
    kernel = nn.Parameter(matrix((4, 2, 3), 0))
    optimizer = Muon([kernel], flatten=True)
    state = {"state": {0: {"momentum_buffer": matrix((4, 6), 1)}}, "param_groups": [{"params": [0]}]}
    optimizer.load_state_dict(state)
    assert_exactly(optimizer.state[kernel]["momentum_buffer"], matrix((4, 6), 1).reshape(4, 2, 3))


@pytest.mark.parametrize("shape", [(8, 2), (2, 8), (5, 5)])
@pytest.mark.parametrize("to", ["original", "match_rms_adamw", "spectral_unclamped", "unscaled", None])
@pytest.mark.parametrize("source", ["adamw", "dion", "moonlight", "keller_jordan"])
def test_a_converted_rate_makes_the_same_update(shape: tuple[int, int], source: str, to: Any) -> None:
    convention = {"adamw": "rms_norm", "moonlight": "rms_norm", "dion": "spectral_norm"}.get(
        source, "original"
    )
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    p.grad = matrix(shape, 3)
    lr = convert_lr(0.3, source=source, to=to, shape=shape)
    Muon([p], lr=lr, adjust_lr_fn=to, momentum=0.0).step()
    truth = -0.3 * ratio_of(convention, p.shape) * orthogonalize(p.grad)
    assert relative_error(p.detach(), truth) < 1e-12


def test_rates_between_functions_and_bad_arguments() -> None:
    assert convert_lr(1.0, source=lambda shape: shape[0], to="unscaled", shape=(7, 3)) == 7.0
    with pytest.raises(ValueError, match="conventions are original"):
        convert_lr(1.0, source="sgd", to=None, shape=(7, 3))
    with pytest.raises(ValueError, match="shape must be"):
        convert_lr(1.0, source="adamw", to=None, shape=(7, 3, 3))

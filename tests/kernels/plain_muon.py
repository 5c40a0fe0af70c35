"""Muon and its variants written out in fp64, one matrix at a time: the truth that the optimizer's tests compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muonrl_kernels import reference
from muonrl_kernels.coefficients import KJ

SIZES = [(24, 24), (16, 40), (40, 16), (1, 9), (9, 1), (7, 13)]


@dataclass
class PlainMuon:
    """One fp64 matrix [A, B] under Muon; `weight` and the buffers are its state."""

    weight: Tensor
    lr: float = 0.1
    weight_decay: float = 0.3
    momentum: float = 0.9
    nesterov: bool = True
    cautious: bool = False
    beta2: float | None = None
    ratio: float | None = None
    buffer: Tensor | None = None
    second: list[float] = field(default_factory=list)

    def step(self, grad: Tensor) -> Tensor:
        """One update with that gradient; returns O (after NorMuon's normalization where beta2 is given)."""
        rows, columns = self.weight.shape
        grad, mu = grad.double(), self.momentum
        self.buffer = mu * (0.0 if self.buffer is None else self.buffer) + (1 - mu) * grad
        u = (1 - mu) * grad + mu * self.buffer if self.nesterov else self.buffer
        o = reference.newton_schulz(u, KJ.coefficients)
        if self.beta2 is not None:
            o = self._normalized(o, self.beta2)
        scale = self.lr * (math.sqrt(max(1, rows / columns)) if self.ratio is None else self.ratio)
        decayed = self.lr * self.weight_decay * self.weight
        if self.cautious:
            decayed = torch.where(o * self.weight >= 0, decayed, torch.zeros_like(decayed))
        self.weight = self.weight - decayed - scale * o
        return o

    def _normalized(self, o: Tensor, beta2: float) -> Tensor:
        rows, columns = o.shape
        if not self.second:
            self.second = [0.0] * rows
        out = torch.zeros_like(o)
        for i in range(rows):
            mean = sum(x * x for x in o[i].tolist()) / columns
            self.second[i] = beta2 * self.second[i] + (1 - beta2) * mean
            out[i] = o[i] / (math.sqrt(self.second[i]) + 1e-10)
        return out * (o.norm() / (out.norm() + 1e-10))


def matrix(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal entries, the same for every dtype up to rounding."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def pairs(
    make: Any, steps: int = 4, dtype: torch.dtype = torch.float64, **plain: Any
) -> list[tuple[Tensor, Tensor]]:
    """(parameter, truth) of every size after some steps; `make(parameters)` builds the optimizer."""
    params = [torch.nn.Parameter(matrix(s, i, dtype)) for i, s in enumerate(SIZES)]
    truths = [PlainMuon(p.detach().double(), **plain) for p in params]
    optimizer = make(params)
    for step in range(steps):
        for i, (p, t) in enumerate(zip(params, truths, strict=True)):
            g = matrix(p.shape, 100 * step + 10 + i, dtype)
            p.grad = g.clone()
            t.step(g)
        optimizer.step()
    return [(p.detach(), t.weight) for p, t in zip(params, truths, strict=True)]

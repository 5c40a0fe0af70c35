"""The correctness gate of the loss: no speed is printed for an implementation whose loss or gradients are wrong.

Loss, d hidden and d weight (d logp for the elementwise loss) are compared with the reference in float64 on small problems
with odd sizes, masked rows and log-ratios that are clipped often. The bound is a multiple of the error that plain PyTorch
makes in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import torch
from torch import Tensor

from benchmarks.entrant import Verdict, one_line
from benchmarks.loss_implementations import LossImplementation, plain_logp, token_mean
from benchmarks.loss_workload import CLIP_HIGH, CLIP_LOW, IS_HIGH, Batch, draw, draw_logp
from muonrl_kernels import reference

__all__ = ["LOSS_FACTOR", "LOSS_FLOOR", "check_loss"]

LOSS_FACTOR: Final = 3.0
"""Allowed error in units of plain PyTorch's, plus four units in the last place."""
LOSS_FLOOR: Final = 1e-5
"""No implementation is refused for an error below this: sums of a thousand fp32 terms in another order differ by that."""
_SHAPES: Final = ((1023, 60, 1021), (264, 96, 4999))
"""(rows, hidden, vocabulary)."""
_SEQUENCE: Final = 33
_WEIGHT_STD: Final = 0.2
"""Logits that differ by several units."""
_SHARES: Final = (1.0, 0.3)
_SPREAD: Final = 0.4
"""Log-ratios this wide: about every other token is clipped on the side that its advantage asks for."""


@cache
def _problems(kind: str, device: str, dtype: torch.dtype) -> tuple[Batch, ...]:
    where = torch.device(device)
    if kind == "elementwise":
        return tuple(
            draw_logp(5016, round(5016 * s), where, seed=7, spread=_SPREAD, sequence=_SEQUENCE)
            for s in _SHARES
        )
    return tuple(
        draw(
            n,
            h,
            v,
            round(n * s),
            where,
            dtype,
            seed=7,
            spread=_SPREAD,
            weight_std=_WEIGHT_STD,
            sequence=_SEQUENCE,
        )
        for n, h, v in _SHAPES
        for s in _SHARES
    )


def _reference(b: Batch) -> Tensor:
    given = (b.old_logp, b.advantages, b.mask)
    if b.weight.numel() == 0:
        return reference.policy_loss(
            b.logp,
            *given,
            rollout_logp=b.rollout_logp,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            is_high=IS_HIGH,
        )
    return reference.linear_policy_loss(
        b.hidden,
        b.weight,
        b.targets,
        *given,
        rollout_logp=b.rollout_logp,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        is_high=IS_HIGH,
    )


def _plain(b: Batch) -> Tensor:
    if b.weight.numel() == 0:
        return token_mean(b.logp, b)
    return token_mean(plain_logp(b.hidden, b.weight, b.targets), b)


def _results(call: Callable[[Batch], Tensor], b: Batch) -> list[tuple[str, Tensor]]:
    """The loss and every gradient, as float64."""
    loss = call(b)
    grads = torch.autograd.grad(loss, b.leaves)
    names = ("d logp",) if len(grads) == 1 else ("d hidden", "d weight")
    named = [("loss", loss.detach()), *zip(names, grads, strict=True)]
    return [(name, x.double()) for name, x in named]


@cache
def _truth(kind: str, device: str, dtype: torch.dtype) -> tuple[list[tuple[str, Tensor, float]], ...]:
    """Name, true value and bound of every result of each problem."""
    found = []
    for b in _problems(kind, device, dtype):
        true, plain = _results(_reference, b.double()), _results(_plain, b)
        slack = 4.0 * torch.finfo(dtype).eps
        found.append(
            [
                (name, t, max(LOSS_FLOOR, LOSS_FACTOR * _relative(p, t) + slack))
                for (name, t), (_, p) in zip(true, plain, strict=True)
            ]
        )
    return tuple(found)


def _relative(x: Tensor, truth: Tensor) -> float:
    error = float((x - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def check_loss(implementation: LossImplementation, device: torch.device) -> Verdict:
    """Loss and gradients of `implementation` on every gate problem against float64."""
    key = (implementation.kind, str(device), implementation.compute)
    worst, complaint = (0.0, 1.0), ""
    try:
        for b, truth in zip(_problems(*key), _truth(*key), strict=True):
            with implementation.active():
                results = _results(implementation.call, b)
            for (name, x), (_, true, bound) in zip(results, truth, strict=True):
                error = _relative(x, true)
                if error / bound > worst[0] / worst[1]:
                    worst = (error, bound)
                if error > bound and not complaint:
                    valid = f"{b.valid} of {b.mask.numel()} tokens valid"
                    complaint = f"error {error:.2e} of {name} with {valid}, bound {bound:.2e}"
    except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its verdict
        return Verdict(False, float("nan"), float("nan"), one_line(error))
    return Verdict(not complaint, *worst, complaint)

"""The correctness gate: no speed is printed for an implementation whose update is wrong.

Each optimizer makes one real step from weights of zero, without weight decay, on matrices with known gradients. What it
did is compared with the polynomial that it says it computes, in float64. The bound is a multiple of the error that the
plain iteration makes in the dtype that the implementation iterates in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.entrant import Verdict, one_line
from benchmarks.implementations import LEARNING_RATE, Implementation
from muonrl_kernels import reference
from muonrl_kernels.coefficients import Triple

__all__ = ["FACTOR", "FLOOR", "LARGE", "SCALE_TOLERANCE", "SHAPES", "check", "gradients"]

SHAPES: Final = ((96, 96), (48, 160), (160, 48), (264, 392), (57, 131))
LARGE: Final = ((1152, 1152), (1024, 2560), (3072, 768))
"""On a GPU as well: there other kernels run for large matrices. Without one, half precision would take minutes."""
FACTOR: Final = 3.0
"""Allowed error in units of the plain iteration's, plus four units in the last place."""
FLOOR: Final = 1e-4
"""No implementation is refused for an error below this: the Gram form in fp32 loses a few more bits than the plain one."""
SCALE_TOLERANCE: Final = 0.02
"""How far the size of the update may be from learning rate times the declared factor."""


@cache
def gradients(device: str) -> tuple[Tensor, ...]:
    """Gaussian gradients; that of the last of SHAPES has singular values that fall like a power law."""
    generator = torch.Generator().manual_seed(20)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    u, s, vh = torch.linalg.svd(drawn[-1].double(), full_matrices=False)
    decay = torch.arange(1, len(s) + 1, dtype=torch.float64).pow(-0.5)
    drawn[-1] = ((u * decay) @ vh).float()
    if torch.device(device).type == "cuda":
        drawn += [torch.randn(shape, generator=generator) for shape in LARGE]
    return tuple(g.to(device) for g in drawn)


@cache
def _truth(
    index: int, device: str, dtype: torch.dtype, coefficients: tuple[Triple, ...], norm_factor: float
) -> Tensor:
    """The iteration on one gradient in `dtype`, as float64; the norm is multiplied by `norm_factor` first."""
    g = gradients(device)[index].double()
    unit = (g / (g.norm() * norm_factor)).to(dtype)
    wide = unit if g.shape[0] <= g.shape[1] else unit.mT
    x = wide
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    solved = x if g.shape[0] <= g.shape[1] else x.mT
    if norm_factor == 1.0 and dtype == torch.float64:
        return reference.newton_schulz(g, coefficients)
    return solved.double()


def _relative(x: Tensor, truth: Tensor) -> float:
    error = float((x - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def _updates(implementation: Implementation, device: str) -> list[Tensor]:
    params = []
    for g in gradients(device):
        p = Parameter(torch.zeros_like(g))
        p.grad = g.clone()
        params.append(p)
    with implementation.active():
        implementation.make(params, LEARNING_RATE, 0.0).step()
    return [-p.detach().double() / LEARNING_RATE for p in params]


def _judge(
    update: Tensor, index: int, implementation: Implementation, device: str
) -> tuple[float, float, str]:
    """(error, bound, complaint) of one matrix; the direction is compared after the best fit of a common factor."""
    shape = tuple(update.shape)
    coefficients: Sequence[Triple] = implementation.coefficients
    key = (tuple(coefficients), implementation.norm_factor)
    truth = _truth(index, device, torch.float64, *key)
    plain = _truth(index, device, implementation.compute, *key)
    own = FACTOR * _relative(plain, truth) + 4.0 * torch.finfo(implementation.compute).eps
    bound = max(FLOOR, own)
    size = float((update * truth).sum() / truth.square().sum())
    if not size > 0.0:
        return (
            float("inf"),
            bound,
            f"the update of {shape} does not point along its orthogonal factor",
        )
    error = _relative(update / size, truth)
    expected = implementation.scale(*update.shape) if implementation.scale is not None else size
    if abs(size / expected - 1.0) > SCALE_TOLERANCE:
        return (
            error,
            bound,
            f"the update of {shape} is {size / expected:.3g} times as large as it should be",
        )
    return error, bound, "" if error <= bound else f"error {error:.2e} at {shape}, bound {bound:.2e}"


def check(implementation: Implementation, device: torch.device) -> Verdict:
    """One step of `implementation` on every gate matrix against float64."""
    try:
        updates = _updates(implementation, str(device))
    except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its verdict
        return Verdict(False, float("nan"), float("nan"), one_line(error))
    judged = [_judge(u, i, implementation, str(device)) for i, u in enumerate(updates)]
    complaints = [reason for *_, reason in judged if reason]
    worst, bound, _ = max(judged, key=lambda j: j[0] / j[1])
    return Verdict(not complaints, worst, bound, complaints[0] if complaints else "")

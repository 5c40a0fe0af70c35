"""The Newton-Schulz iteration in three algebraically equal forms, over a handful of matrix operations.

Shapes: X is [m, n] with m <= n (tall matrices are worked on transposed), R = X X^T is [m, m], alpha = n / m.
Each step is the odd quintic X <- a X + b (X X^T) X + c (X X^T)^2 X.

- standard: Z = a I + b R + c R^2 with R = X X^T; X <- Z X.
- symmetric: the same, but R and R^2 are computed on one triangle and mirrored.
- gram: R = X X^T once, then only m x m products: the polynomial P is accumulated and applied to X at a restart and at
  the end. Restarts recompute R from the current X, so that rounding errors of small eigenvalues do not grow.

The algorithm is written over five operations (:class:`MatrixOps`); PyTorch's are in `torch_ops`, Triton's in `triton_ops`.
The last product is left to the caller, who can fuse it with what the result is for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

import torch

from muonrl_kernels.backend import fast_compute_dtype
from muonrl_kernels.coefficients import Schedule, Triple

__all__ = [
    "HALF",
    "METHODS",
    "NORMALIZATIONS",
    "MatrixOps",
    "Method",
    "Normalization",
    "ScheduleLike",
    "check_options",
    "choose_method",
    "compute_dtype_for",
    "flops",
    "iterate_schedule",
    "phase_bounds",
    "uses_triangle",
]

Method = Literal["auto", "standard", "symmetric", "gram"]
Normalization = Literal["frobenius", "schatten4"]
ScheduleLike: TypeAlias = str | Schedule | Sequence[float] | Sequence[Triple]

METHODS: Final[tuple[str, ...]] = ("auto", "standard", "symmetric", "gram")
NORMALIZATIONS: Final[tuple[str, ...]] = ("frobenius", "schatten4")
HALF: Final = (torch.float16, torch.bfloat16)
_COMPUTE_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_TRIANGLE_MIN_ROWS: Final = 256
_TRIANGLE_MIN_ROWS_BF16: Final = 1024
"""Below this a triangle costs more in copies than it saves in products (measured on two cores)."""
_MAX_GROWTH: Final = 2.5e5
"""Bound on the growth of R's small eigenvalues, the product of a^2, within a phase of the Gram form in fp32. Its rounding
errors of about 1e-7 then stay below 3 % of the largest eigenvalue; the result's error was at most 2e-3 on every spectrum tried,
over five decades, where bf16 without the Gram form has 0.06 to 0.7."""

X = TypeVar("X")
S = TypeVar("S")


class MatrixOps(Protocol[X, S]):
    """What the iteration needs of a kind of iterate X and of symmetric m x m matrices S."""

    def gram(self, it: X, /) -> S:
        """X X^T."""
        ...

    def polynomial(self, r: S, step: Triple, /) -> S:
        """a I + b R + c R^2."""
        ...

    def times(self, p: S, z: S, /) -> S:
        """P Z for commuting P and Z."""
        ...

    def apply(self, p: S, it: X, /) -> X:
        """P X."""
        ...

    def schatten4(self, it: X, r: S, /) -> tuple[X, S]:
        """X and R rescaled so that ||R||_F = 1."""
        ...


def iterate_schedule(
    ops: MatrixOps[X, S], first: list[X], steps: Sequence[Triple], bounds: Sequence[int], normalize: str
) -> tuple[S, X]:
    """Run a schedule on an iterate of unit Frobenius norm; the result is the product P X of what is returned.

    `first` holds the iterate and is emptied, so that nothing keeps it alive once it is replaced. `bounds` are the steps
    before which R = X X^T is computed: all of them in the standard form, 0 and the restarts in the Gram form. Within a phase
    R <- R Z^2 after each step but the last.
    """
    it = first.pop()
    p: S | None = None
    for lo, hi in itertools.pairwise([*bounds, len(steps)]):
        if p is not None:
            it = ops.apply(p, it)
            p = None
        r = ops.gram(it)
        if lo == 0 and normalize == "schatten4":
            it, r = ops.schatten4(it, r)
        for index in range(lo, hi):
            z = ops.polynomial(r, steps[index])
            if index + 1 < hi:
                r = ops.times(r, z)
                r = ops.times(r, z)
            p = z if p is None else ops.times(p, z)
            del z
        del r
    assert p is not None
    return p, it


def phase_bounds(schedule: Schedule, method: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Where R is recomputed. The Gram form restarts in fp32 only when rounding errors would grow too far."""
    if method != "gram":
        return tuple(range(len(schedule)))
    if dtype != torch.float32:
        return (0, *schedule.restarts)
    bounds, growth = [0], 1.0
    for index, (a, _, _) in enumerate(schedule.coefficients[:-1]):
        growth *= a * a
        if growth > _MAX_GROWTH:
            bounds.append(index + 1)
            growth = 1.0
    return tuple(bounds)


def uses_triangle(method: str, m: int, dtype: torch.dtype) -> bool:
    """Whether the torch path computes symmetric m x m results on one triangle."""
    smallest = _TRIANGLE_MIN_ROWS_BF16 if dtype in HALF else _TRIANGLE_MIN_ROWS
    return method == "symmetric" or (method == "gram" and m >= smallest)


def flops(m: int, n: int, schedule: Schedule, method: str, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations of one m x n matrix (m <= n), as executed by the torch path: multiply and add count 2."""
    ratio, steps = n / m, len(schedule)
    triangle = _triangle_share(m) if uses_triangle(method, m, dtype) else 1.0
    phases = len(phase_bounds(schedule, method, dtype))
    # A phase of k steps does k squares, k - 1 products into P and 2 (k - 1) products into R.
    small = 2.0 * steps + 6.0 * (steps - phases)
    return (triangle * small + phases * 2.0 * ratio * (1 + triangle)) * float(m) ** 3


def _triangle_share(m: int) -> float:
    """Share of an m x m product that is computed when blocks are halved down to 128 rows."""
    depth = max(0, int(math.log2(max(1, m / 128))))
    return 0.5 + 0.5 ** (depth + 1)


def choose_method(m: int, n: int, schedule: Schedule, dtype: torch.dtype) -> str:
    """The form with the fewest operations among those that are stable in `dtype`, for short side m and long side n.

    The Gram form is left out in bf16: the spectrum of R needs more than eight bits.
    """
    candidates = ["standard"]
    if uses_triangle("gram", m, dtype):
        candidates.append("symmetric")
    if dtype != torch.bfloat16:
        candidates.append("gram")
    return min(candidates, key=lambda name: flops(m, n, schedule, name, dtype))


def check_options(method: str, normalize: str, compute: torch.dtype | None) -> None:
    """Raise ValueError for an unknown name or dtype, and for the one combination that is not stable."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    if compute is not None and compute not in _COMPUTE_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in _COMPUTE_DTYPES)
        raise ValueError(f"compute_dtype must be None, {names}; got {compute}")
    if method == "gram" and compute == torch.bfloat16:
        raise ValueError(
            "the Gram form is not stable in bfloat16; use compute_dtype=torch.float16, torch.float32 or another method"
        )


def compute_dtype_for(
    dtype: torch.dtype, device: torch.device, requested: torch.dtype | None, method: str
) -> torch.dtype:
    """None means fp64 for fp64 input, else what the machine multiplies fast; never bf16 for the Gram form."""
    if requested is not None:
        return requested
    if dtype == torch.float64:
        return torch.float64
    fast = fast_compute_dtype(device)
    return torch.float32 if method == "gram" and fast == torch.bfloat16 else fast

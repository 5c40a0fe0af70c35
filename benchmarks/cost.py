"""Cost model of one optimizer step: floating-point operations, bytes and kernel launches, by implementation and shape.

A matrix has the short side m and the long side n; T is the number of Newton-Schulz steps and r that of Gram restarts.
Multiply and add count 2; a product that computes one triangle of a symmetric result counts half. Bytes are what a kernel
must move at least: each operand read once, each result written once, of weights, gradients and momentum in fp32.

The sums that come out are those of the formulas in benchmarks.flops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import torch

from benchmarks.flops import RESTARTS, STEPS
from muonrl_kernels import iteration
from muonrl_kernels.coefficients import KJ

__all__ = [
    "ALGORITHMS",
    "SMALL_SIDE",
    "WORKSPACE_BYTES",
    "Op",
    "Total",
    "executed_flops",
    "step_ops",
    "total",
]

Kind = Literal["product", "triangle", "elementwise"]
FP32: Final = 4
WORKSPACE_BYTES: Final = 2 << 30
SMALL_SIDE: Final = 128
"""Up to this short side the whole iteration of a matrix runs in one launch on a GPU."""


@dataclass(frozen=True)
class Op:
    """One kind of kernel in a step: its work summed over the matrices, and how many launches that takes."""

    name: str
    kind: Kind
    flops: float
    nbytes: float
    launches: float


@dataclass(frozen=True)
class Total:
    """A step's work; `elementwise` are the bytes outside matrix products."""

    flops: float
    nbytes: float
    elementwise: float
    launches: float


def executed_flops(shapes: Iterable[tuple[int, int, int]], dtype: torch.dtype, method: str = "auto") -> float:
    """Operations that muonrl_kernels executes on a CPU for (rows, columns, count), as its own choice of form counts."""
    result = 0.0
    for rows, columns, count in shapes:
        m, n = sorted((rows, columns))
        form = iteration.choose_method(m, n, KJ, dtype) if method == "auto" else method
        result += iteration.flops(m, n, KJ, form, dtype) * count
    return result


def _product(name: str, shape: tuple[int, int, int], size: int, reads: float, triangle: bool = False) -> Op:
    """One product [rows, inner] x [inner, columns]; `reads` counts elements of operands and of the addend."""
    rows, columns, inner = shape
    flops = 2.0 * rows * columns * inner * (0.5 if triangle else 1.0)
    kind: Kind = "triangle" if triangle else "product"
    return Op(name, kind, flops, size * (reads + rows * columns), 1)


def _elementwise(name: str, nbytes: float, launches: float = 1) -> Op:
    return Op(name, "elementwise", 0.0, nbytes, launches)


def _iteration(m: int, n: int, size: int, triangle: bool) -> list[Op]:
    """The products of the standard form, X X^T, b A + c A^2 and a X + B X in each step."""
    outer = _product("X X^T", (m, m, n), size, m * n, triangle)
    square = _product("b A + c A^2", (m, m, m), size, m * m, triangle)
    apply = _product("a X + B X", (m, n, m), size, m * m + m * n)
    return [outer, square, apply] * STEPS


def _gram_iteration(m: int, n: int, size: int, restarts: int = RESTARTS) -> list[Op]:
    """The products of the Gram form; the last one is left to the caller, who may fuse the update into it."""
    outer = _product("X X^T", (m, m, n), size, m * n, True)
    square = _product("b R + c R^2", (m, m, m), size, m * m, True)
    small = _product("commuting product", (m, m, m), size, 3 * m * m, True)
    restart = _product("Q X", (m, n, m), size, m * m + m * n)
    commuting = 3 * (STEPS - 1 - restarts)
    return [outer] * (1 + restarts) + [square] * STEPS + [small] * commuting + [restart] * restarts


def _momentum(x: int, size: int) -> list[Op]:
    """What torch.optim.Muon does one kernel at a time before the iteration, for x elements."""
    return [
        _elementwise("momentum", 3 * FP32 * x),
        _elementwise("nesterov", 3 * FP32 * x),
        _elementwise("cast", (FP32 + size) * x),
        _elementwise("norm", size * x, 3),  # two stages of the reduction and the clamp
        _elementwise("scale", 2 * size * x),
    ]


def _update(x: int, size: int) -> list[Op]:
    return [_elementwise("decay", 2 * FP32 * x), _elementwise("add", (2 * FP32 + size) * x)]


def _torch(m: int, n: int, size: int) -> list[Op]:
    """torch.optim.Muon: addmm out of place first copies its addend into the result."""
    copies = [
        _elementwise("copy of the addend", 2 * size * m * n),
        _elementwise("copy of the Gram matrix", 2 * size * m * m),
    ] * STEPS
    return [*_momentum(m * n, size), *_iteration(m, n, size, False), *copies, *_update(m * n, size)]


def _eager(m: int, n: int, size: int) -> list[Op]:
    """An iteration written as b * A + c * A @ A and a * X + B @ X, one kernel for each operation."""
    passes = [
        _elementwise("polynomial", 7 * size * m * m, 3),
        _elementwise("a X + ...", 5 * size * m * n, 2),
    ] * STEPS
    iteration = _iteration(m, n, size, False)
    return [*_momentum(m * n, size), *iteration, *passes, *_update(m * n, size)]


def _symmetric(m: int, n: int, size: int) -> list[Op]:
    """Symmetric kernels with fused polynomials, elementwise work as in torch."""
    return [*_momentum(m * n, size), *_iteration(m, n, size, True), *_update(m * n, size)]


def _gram(m: int, n: int, size: int) -> list[Op]:
    """gram-newton-schulz: the Gram form on rectangular matrices, symmetric kernels on square ones."""
    if m == n:
        return _symmetric(m, n, size)
    last = _product("Q X", (m, n, m), size, m * m + m * n)
    return [*_momentum(m * n, size), *_gram_iteration(m, n, size), last, *_update(m * n, size)]


def _plain_gram(m: int, n: int, size: int) -> list[Op]:
    """The Gram form of plain matrix products; the polynomials are fused into them."""
    last = _product("Q X", (m, n, m), size, m * m + m * n)
    products = [
        Op(o.name, "product", 2.0 * o.flops if o.kind == "triangle" else o.flops, o.nbytes, o.launches)
        for o in [*_gram_iteration(m, n, size), last]
    ]
    return [*_momentum(m * n, size), *products, *_update(m * n, size)]


def _eager_gram(m: int, n: int, size: int) -> list[Op]:
    """The Gram form on rectangular matrices, the eager standard form on square ones."""
    return _eager(m, n, size) if m == n else _plain_gram(m, n, size)


def _fused(m: int, n: int, size: int) -> list[Op]:
    """muonrl_kernels on a GPU: two passes before the iteration, the weight update inside the last product.

    30 bytes a parameter: norm and finiteness (gradient and momentum read), preparation (both read, momentum and the
    half-precision iterate written), and the fp32 weight read and written by the last product.
    """
    x = m * n
    passes = [
        _elementwise("norm and finiteness", 2 * FP32 * x),
        _elementwise("scales", 0.0),
        _elementwise("momentum and iterate", (3 * FP32 + size) * x),
        _elementwise("weight in the last product", 2 * FP32 * x, 0),
    ]
    if m <= SMALL_SIDE:
        # The Gram form of plain products: X X^T and Q X twice, 14 products of m x m.
        flops = 8.0 * m * m * n + 28.0 * float(m) ** 3
        return [*passes, Op("whole iteration", "product", flops, size * x, 1)]
    if m == n:
        return [*passes, *_iteration(m, n, size, True)]
    last = _product("W X, weight update", (m, n, m), size, m * m + m * n)
    # Nothing but the weight is written by the last product.
    last = Op(last.name, last.kind, last.flops, last.nbytes - size * x, 1)
    return [*passes, *_gram_iteration(m, n, size), last]


def _own(m: int, n: int, size: int) -> list[Op]:
    """muonrl_kernels on a CPU: the form that it chooses, on slots of a workspace that the look-ahead is written into."""
    x = m * n
    dtype = torch.bfloat16 if size < FP32 else torch.float32
    form = iteration.choose_method(m, n, KJ, dtype)
    products = _iteration(m, n, size, False)
    if form == "gram":
        restarts = len(iteration.phase_bounds(KJ, form, dtype)) - 1
        last = _product("W X", (m, n, m), size, m * m + m * n)
        products = [*_gram_iteration(m, n, size, restarts), last]
    return [
        _elementwise("finiteness", FP32 * x),
        _elementwise("momentum", 3 * FP32 * x),
        _elementwise("nesterov", 3 * FP32 * x),
        _elementwise("scale", (2 * FP32 + size) * x, 2),
        Op("iteration", "product", executed_flops([(m, n, 1)], dtype), total(products).nbytes, len(products)),
        *_update(x, size),
    ]


def _together(m: int, n: int, count: int, size: int) -> int:
    """Launches that muonrl_kernels needs for one kernel over `count` equal matrices: its workspace has a bound."""
    each = size * m * (2 * n + 4 * m)
    return -(-count // max(1, WORKSPACE_BYTES // each))


ALGORITHMS: Final[dict[str, tuple[Callable[[int, int, int], list[Op]], bool]]] = {
    "fused": (_fused, True),
    "own": (_own, True),
    "torch": (_torch, False),
    "torch batched": (_torch, True),
    "eager": (_eager, False),
    "eager batched": (_eager, True),
    "symmetric batched": (_symmetric, True),
    "gram batched": (_gram, True),
    "plain gram batched": (_plain_gram, True),
    "eager gram batched": (_eager_gram, True),
}
"""Operations of one matrix, and whether matrices of one shape (up to transposition) share their launches."""


def step_ops(algorithm: str, shapes: Iterable[tuple[int, int, int]], size: int = 2) -> list[Op]:
    """Every operation of one step over (rows, columns, count); `size` is the bytes of an element in the iteration.

    Raises:
        ValueError: an unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    ops_of, batched = ALGORITHMS[algorithm]
    counts: dict[tuple[int, int], int] = {}
    for rows, columns, count in shapes:
        m, n = sorted((rows, columns))
        counts[m, n] = counts.get((m, n), 0) + count
    found = []
    for (m, n), count in counts.items():
        launches = _together(m, n, count, size) if algorithm == "fused" else 1 if batched else count
        found += [
            Op(o.name, o.kind, o.flops * count, o.nbytes * count, o.launches * launches)
            for o in ops_of(m, n, size)
        ]
    return found


def total(ops: Iterable[Op]) -> Total:
    """Sums over operations."""
    listed = list(ops)
    return Total(
        sum(o.flops for o in listed),
        sum(o.nbytes for o in listed),
        sum(o.nbytes for o in listed if o.kind == "elementwise"),
        sum(o.launches for o in listed),
    )

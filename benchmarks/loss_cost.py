"""What a forward and backward pass of the linear loss costs: every product and every pass over the logits.

n rows of hidden [n, H] enter the products (m of them valid), the head is [V, H], s are the bytes of an input element. A
product of the three, each way, is 2 n H V operations:

    floor         6 m H V     logits, d hidden and d weight once, valid rows only
    naive         6 n H V     the same over all rows; the logits [n, V] exist whole, several times
    recompute     8 n H V     the logits are computed a second time in the backward pass

Bytes are what kernels must move at least, as in :mod:`benchmarks.cost`: an operand that does not fit a cache is read once by
every kernel that needs it. Logits and their gradients are chunks of `chunk` rows, so the weight is read again for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.cost import FP32, Op

__all__ = [
    "ALGORITHMS",
    "ELEMENTWISE_BYTES",
    "Problem",
    "elementwise_bytes",
    "floor_flops",
    "loss_ops",
    "recompute_flops",
]

ELEMENTWISE_BYTES: Final = 21
"""A token of the fused elementwise loss: log-probabilities of three policies and the advantage read (16), the mask (1), the
gradient written (4)."""


def floor_flops(valid: int, hidden: int, vocabulary: int) -> float:
    """Three products over the valid rows: what nobody can do without."""
    return 6.0 * valid * hidden * vocabulary


def recompute_flops(rows: int, hidden: int, vocabulary: int) -> float:
    """Four products: the logits are computed again in the backward pass."""
    return 8.0 * rows * hidden * vocabulary


@dataclass(frozen=True)
class Problem:
    """Sizes of one call: `rows` N, of which `valid` count; `size` is the bytes of an input element."""

    rows: int
    valid: int
    hidden: int
    vocabulary: int
    size: int = 2
    chunk: int = 2048


def _chunks(rows: int, chunk: int) -> int:
    return -(-rows // chunk)


def _product(name: str, shape: tuple[int, int, int], reads: float, writes: float, launches: int = 1) -> Op:
    """Product of the sizes `shape`; `reads` and `writes` are bytes."""
    a, b, c = shape
    return Op(name, "product", 2.0 * a * b * c, reads + writes, launches)


def _pass(name: str, nbytes: float, launches: int = 1) -> Op:
    return Op(name, "elementwise", 0.0, nbytes, launches)


def _products(n: int, p: Problem, chunks: int, logits: int, weight_grad: float) -> list[Op]:
    """Logits (written in `logits` bytes an element), d hidden and d weight of n rows in so many chunks.

    `weight_grad` are the bytes that each chunk moves for an element of the weight's gradient.
    """
    h, v, s = p.hidden, p.vocabulary, p.size
    rows, weight, whole = s * n * h, chunks * s * v * h, (n, h, v)
    return [
        _product("logits", whole, rows + weight, logits * n * v, chunks),
        _product("d hidden", whole, s * n * v + weight, rows, chunks),
        _product("d weight", whole, s * n * v + rows, chunks * weight_grad * v * h, chunks),
    ]


def _scaled(p: Problem) -> Op:
    """The gradients that were kept in the forward pass get the factor of the backward pass."""
    nbytes = (FP32 + p.size) * p.vocabulary * p.hidden + 2 * p.size * p.rows * p.hidden
    return _pass("scaled gradients", nbytes, 2)


def _single_pass(p: Problem, n: int) -> list[Op]:
    """Ours: fp32 logits of a chunk are read for their statistics and once more for the gradient, written in place."""
    k = _chunks(n, p.chunk)
    nv = n * p.vocabulary
    return [
        *_products(n, p, k, FP32, 2 * FP32),
        _pass("statistics", FP32 * nv, k),
        _pass("gradient of the logits", (FP32 + p.size) * nv, k),
        _scaled(p),
    ]


def _fused(p: Problem) -> list[Op]:
    """Ours with products of its own: logits are reduced in registers, and computed again where their gradient is written."""
    n, k = p.valid, _chunks(p.valid, p.chunk)
    statistics, *gradients = _products(n, p, k, 0, 2 * FP32)
    logits_again = _products(n, p, k, p.size, 0)[0]
    return [statistics, logits_again, *gradients, _scaled(p)]


def _softmax_passes(n: int, p: Problem, chunks: int) -> list[Op]:
    """Autograd's log_softmax and gather: fp32 copy of half-precision logits, both passes, and the way back."""
    nv, cast = n * p.vocabulary, (FP32 + p.size) if p.size < FP32 else 0
    return [
        _pass("fp32 logits", cast * nv, chunks),
        _pass("log_softmax", 2 * FP32 * nv, chunks),
        _pass("backward of gather", FP32 * nv, chunks),
        _pass("backward of log_softmax", 3 * FP32 * nv, chunks),
        _pass("half-precision gradient", cast * nv, chunks),
    ]


def _naive(p: Problem) -> list[Op]:
    """All rows, whole logits."""
    return [*_products(p.rows, p, 1, p.size, p.size), *_softmax_passes(p.rows, p, 1)]


def _again(p: Problem, n: int, chunks: int) -> list[Op]:
    """The logits of the forward pass, which the backward pass computes anew."""
    return [_products(n, p, chunks, p.size, 0)[0]]


def _checkpoint(p: Problem) -> list[Op]:
    """Chunks of valid rows under torch.utils.checkpoint; each chunk's d weight is added to the sum of the others."""
    n, k = p.valid, _chunks(p.valid, p.chunk)
    cast = (FP32 + p.size) if p.size < FP32 else 0
    return [
        *_again(p, n, k),
        _pass("first softmax", (cast + 2 * FP32) * n * p.vocabulary, 2 * k),
        *_products(n, p, k, p.size, 4 * p.size),
        *_softmax_passes(n, p, k),
    ]


def _recompute(p: Problem, n: int) -> list[Op]:
    """Tiles of logits, folded into running statistics and computed again in the backward pass, fp32 accumulators."""
    k = _chunks(n, p.chunk)
    nv = n * p.vocabulary
    return [
        *_again(p, n, k),
        _pass("fold", p.size * nv, k),
        *_products(n, p, k, p.size, 2 * FP32),
        _pass("gradient of the logits", 2 * p.size * nv, k),
    ]


ALGORITHMS: Final[dict[str, Callable[[Problem], list[Op]]]] = {
    "single pass": lambda p: _single_pass(p, p.valid),
    "single pass all rows": lambda p: _single_pass(p, p.rows),
    "fused": _fused,
    "naive": _naive,
    "checkpoint": _checkpoint,
    "recompute": lambda p: _recompute(p, p.valid),
    "recompute all rows": lambda p: _recompute(p, p.rows),
}


def loss_ops(algorithm: str, problem: Problem) -> list[Op]:
    """Every kernel of a forward and backward pass.

    Raises:
        ValueError: an unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    return ALGORITHMS[algorithm](problem)


def elementwise_bytes(tokens: int) -> float:
    """Bytes that the elementwise loss of so many tokens must move, whoever computes it."""
    return float(ELEMENTWISE_BYTES * tokens)

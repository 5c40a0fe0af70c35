"""The Newton-Schulz iteration's matrix operations as PyTorch calls, for the CPU and for GPUs without Triton.

Shapes: an iterate X is [B, m, n] with m <= n (a view of its transpose for tall matrices), symmetric matrices are
[B, m, m]. In fp32 and fp64 the multiple of the identity in a polynomial is added to the diagonal, so every operation is
one call of BLAS; in half precision it stays a scalar beside the matrix, because 8 or 11 bits would lose what cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from muonrl_kernels.coefficients import Triple
from muonrl_kernels.iteration import HALF

__all__ = ["Iterate", "LastProduct", "Symmetric", "TorchOps", "iterate_gain", "unit_iterate"]

_LEAF_ROWS: Final = 128
"""Diagonal blocks of a triangle are not divided below this; measured on AVX2 and AVX-512 at m = 512 to 2560."""
_SAFE_NORM: Final = (1e-15, 1e15)
"""Frobenius norms whose squares, and those of single entries, keep their precision in fp32."""
_LARGEST_HALF: Final = 2.0**15


@dataclass(frozen=True)
class Iterate:
    """A stack of iterates: the matrices are ``x / gain``."""

    x: Tensor
    gain: float
    tall: bool
    """Whether x is a transposed view, so that products are laid out like it."""


@dataclass(frozen=True)
class Symmetric:
    """``shift I + w`` for symmetric w [B, m, m]."""

    w: Tensor
    shift: float


def iterate_gain(dtype: torch.dtype, m: int, n: int, *, first: bool = False) -> float:
    """What iterates of that dtype are multiplied by: in fp16, entries get a root mean square near 1; elsewhere 1.

    The first iterate has unit Frobenius norm, later ones singular values near 1. In fp16, small entries would otherwise
    sink below the normal numbers; the bound keeps a matrix of one single entry representable.
    """
    if dtype != torch.float16:
        return 1.0
    return min(math.sqrt(m * n if first else n), _LARGEST_HALF)


class TorchOps:
    """Products of one bucket of equally shaped matrices.

    Args:
        triangle: compute symmetric results on one triangle and mirror them (saves up to 7/16 of the operations).
    """

    def __init__(self, *, triangle: bool) -> None:
        self._triangle = triangle

    def gram(self, it: Iterate) -> Symmetric:
        """X X^T."""
        return Symmetric(self._product(it.x, it.x.mT, alpha=it.gain**-2), 0.0)

    def polynomial(self, r: Symmetric, step: Triple) -> Symmetric:
        """a I + b R + c R^2."""
        a, b, c = step
        return _fold(Symmetric(self._product(r.w, r.w, alpha=c, beta=b), a))

    def times(self, p: Symmetric, z: Symmetric) -> Symmetric:
        """P Z for commuting P and Z."""
        return Symmetric(self._product(p.w, z.w, beta=z.shift, gamma=p.shift), p.shift * z.shift)

    def apply(self, p: Symmetric, it: Iterate) -> Iterate:
        """P X."""
        gain = iterate_gain(it.x.dtype, *it.x.shape[1:])
        return Iterate(_multiply(p, it.x, gain / it.gain, it.tall), gain, it.tall)

    def schatten4(self, it: Iterate, r: Symmetric) -> tuple[Iterate, Symmetric]:
        """X and R = X X^T rescaled so that ||X||_4 = ||R||_F^(1/2) = 1; zero stays zero."""
        norm = torch.linalg.vector_norm(r.w.float() if r.w.dtype in HALF else r.w, dim=(1, 2), keepdim=True)
        inverse = torch.where(norm > 0, norm.reciprocal(), 0.0)
        x = (it.x * inverse.sqrt()).to(it.x.dtype)
        return Iterate(x, it.gain, it.tall), Symmetric((r.w * inverse).to(r.w.dtype), r.shift)

    def _product(
        self, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0
    ) -> Tensor:
        """alpha A B + beta A + gamma B, known to be symmetric."""
        if not self._triangle:
            return _dense(a, b, alpha, beta, gamma)
        m = a.shape[1]
        out = a.new_empty(a.shape[0], m, m)
        added = _sum(a, b, beta, gamma) if gamma else None
        for i in range(a.shape[0]):
            plus = (added if added is not None else a)[i] if (beta or gamma) else None
            _triangle(out[i], a[i], b[i], alpha, 1.0 if gamma else beta, plus, 0, m)
        return out


def _dense(a: Tensor, b: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    if beta == 0.0 and gamma == 0.0:
        if alpha == 1.0:
            return torch.bmm(a, b)
        # baddbmm's own epilogue scales before it rounds; beta = 0 ignores what is added.
        return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0.0, alpha=alpha)
    if gamma == 0.0:
        return torch.baddbmm(a, a, b, beta=beta, alpha=alpha)
    return torch.baddbmm(_sum(a, b, beta, gamma), a, b, alpha=alpha)


def _sum(a: Tensor, b: Tensor, beta: float, gamma: float) -> Tensor:
    """beta A + gamma B, rounded once."""
    return torch.add(a.float() * beta, b, alpha=gamma).to(a.dtype)


def _triangle(
    out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float, plus: Tensor | None, lo: int, hi: int
) -> None:
    """out[lo:hi, lo:hi] = alpha A B + beta plus: the block below the diagonal once, mirrored, then both on it."""
    middle = lo + -(-((hi - lo) // 2) // 8) * 8
    if hi - lo < 2 * _LEAF_ROWS:
        _block(out, a, b, alpha, beta, plus, slice(lo, hi), slice(lo, hi))
        return
    lower, left = slice(middle, hi), slice(lo, middle)
    _block(out, a, b, alpha, beta, plus, lower, left)
    out[left, lower] = out[lower, left].T
    _triangle(out, a, b, alpha, beta, plus, lo, middle)
    _triangle(out, a, b, alpha, beta, plus, middle, hi)


def _block(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: float,
    beta: float,
    plus: Tensor | None,
    rows: slice,
    columns: slice,
) -> None:
    place = out[rows, columns]
    if plus is None and alpha == 1.0:
        torch.mm(a[rows], b[:, columns], out=place)
    else:
        added = place if plus is None else plus[rows, columns]
        torch.addmm(
            added, a[rows], b[:, columns], beta=beta if plus is not None else 0.0, alpha=alpha, out=place
        )


def _fold(p: Symmetric) -> Symmetric:
    """Add the shift to the diagonal, in place, where the dtype affords it."""
    if p.w.dtype in HALF:
        return p
    p.w.diagonal(dim1=1, dim2=2).add_(p.shift)
    return Symmetric(p.w, 0.0)


def _multiply(p: Symmetric, x: Tensor, factor: float, tall: bool) -> Tensor:
    """factor (shift I + w) X, laid out like X."""
    left, right = (x.mT, p.w) if tall else (p.w, x)
    if p.shift == 0.0 and factor == 1.0:
        out = torch.bmm(left, right)
    else:
        base = left if tall else right
        out = torch.baddbmm(base, left, right, beta=p.shift * factor, alpha=factor)
    return out.mT if tall else out


def unit_iterate(
    work: Tensor, dtype: torch.dtype, size: tuple[int, int], eps: float, *, tall: bool, single: bool
) -> Iterate:
    """The first iterate of matrices written to `work` [B, m, n] (fp32 or fp64; overwritten): unit Frobenius norm.

    `size` is (m, n) without padding. Matrices that are always worked on alone (`single`) are read once less, and in
    full precision not even scaled: the norm becomes the gain.
    """
    gain = iterate_gain(dtype, *size, first=True)
    if single:
        norm = float(torch.linalg.vector_norm(work))
        if _SAFE_NORM[0] < norm < _SAFE_NORM[1]:
            if dtype == work.dtype:
                return Iterate(work, norm, tall)
            return Iterate(work.mul_(gain / norm).to(dtype), gain, tall)
    return Iterate(_scale(work, gain, eps).to(dtype), gain, tall)


def _scale(x: Tensor, gain: float, eps: float) -> Tensor:
    """Give each matrix of [B, m, n] the Frobenius norm `gain`, in place, whatever its magnitude; zero stays zero.

    A power of two first brings the largest entry into [0.5, 1), so squares neither overflow nor vanish and the result
    does not depend on the scale of the input.
    """
    peak = torch.maximum(x.amax((1, 2), keepdim=True), x.amin((1, 2), keepdim=True).neg())
    exponent = torch.frexp(peak).exponent
    half = exponent // 2  # two exact factors: one alone can leave the exponent range of the dtype
    one = x.new_ones(exponent.shape)
    x.mul_(torch.ldexp(one, -half)).mul_(torch.ldexp(one, half - exponent))
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return x.mul_(gain / norm.clamp(min=eps))


class LastProduct:
    """One matrix's result O = (shift I + W) X, not multiplied out until it is asked for."""

    def __init__(self, value: Callable[[], Tensor], p: Symmetric | None, it: Iterate | None) -> None:
        """`value` gives O in the matrix's own shape; `p` and `it` (of one matrix) allow the product to be fused."""
        self._value = value
        self._p = p
        self._it = it

    @classmethod
    def of(cls, o: Tensor) -> LastProduct:
        """A product that has been multiplied out already."""
        return cls(lambda: o, None, None)

    def value(self) -> Tensor:
        """O [rows, columns] in the dtype of the computation."""
        return self._value()

    def add_to_(self, weight: Tensor, alpha: float) -> None:
        """weight += alpha O, in place; in fp32 and fp64 without a temporary for O."""
        p, it = self._p, self._it
        if p is None or it is None or weight.dtype != it.x.dtype or p.shift != 0.0:
            weight.add_(self.value(), alpha=alpha)
            return
        left, right = (it.x[0].mT, p.w[0]) if it.tall else (p.w[0], it.x[0])
        weight.addmm_(left, right, alpha=alpha / it.gain)

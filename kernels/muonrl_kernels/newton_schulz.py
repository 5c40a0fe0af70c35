"""Newton-Schulz orthogonalization of matrices, in three algebraically equal forms.

Shapes: X is [B, m, n] with m <= n (tall matrices are worked on transposed), R = X X^T is [B, m, m], alpha = n / m.
Each step is the odd quintic X <- a X + b (X X^T) X + c (X X^T)^2 X.

- standard: A = X X^T; Z = b A + c A^2; X <- a X + Z X.
- symmetric: the same, but A and A^2 are computed on block rows of one triangle and mirrored.
- gram: R = X X^T once, then only m x m products: the polynomial Q is accumulated and applied to X at a restart and at
  the end. Restarts recompute R from the current X, so that rounding errors of small eigenvalues do not grow.

The multiple of the identity in a I + Z is never added to a matrix: it stays a scalar beside Z.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, overload

import torch
from torch import Tensor

from muonrl_kernels.backend import fast_compute_dtype, resolve
from muonrl_kernels.coefficients import Schedule, Triple, resolve_schedule

__all__ = [
    "METHODS",
    "NORMALIZATIONS",
    "Method",
    "Normalization",
    "choose_method",
    "flops",
    "orthogonality_residual",
    "orthogonalize",
    "orthogonalize_list",
]

Method = Literal["auto", "standard", "symmetric", "gram"]
Normalization = Literal["frobenius", "schatten4"]
ScheduleLike: TypeAlias = str | Schedule | Sequence[float] | Sequence[Triple]

METHODS: Final[tuple[str, ...]] = ("auto", "standard", "symmetric", "gram")
NORMALIZATIONS: Final[tuple[str, ...]] = ("frobenius", "schatten4")

_TRIANGLE_MIN_ROWS: Final = 256
_TRIANGLE_MIN_ROWS_BF16: Final = 1024
"""Below this a triangle costs more in copies than it saves in products (measured on one core)."""
_STACK_BYTES: Final = 32 << 20
"""Bound on one stacked workspace; stacking only pays for small matrices, large ones go one by one."""


@dataclass(frozen=True)
class _Ops:
    """The two matrix products whose results are symmetric; everything else is baddbmm."""

    outer: Callable[[Tensor], Tensor]
    """[B, m, n] -> X X^T."""
    combine: Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
    """(C, A, B, beta, alpha) -> beta C + alpha A B, for commuting symmetric A and B."""


def _outer(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT)


def _combine(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def _block_rows(m: int) -> list[tuple[int, int]]:
    """Four block rows whose bounds are multiples of 8."""
    step = -(-m // 32) * 8
    return [(lo, min(lo + step, m)) for lo in range(0, m, step)]


def _mirror(out: Tensor, blocks: list[tuple[int, int]]) -> Tensor:
    """Copy the blocks below the diagonal to above it."""
    for lo, hi in blocks[1:]:
        out[:, :lo, lo:hi] = out[:, lo:hi, :lo].mT
    return out


def _outer_triangle(x: Tensor) -> Tensor:
    blocks = _block_rows(x.shape[1])
    out = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    for lo, hi in blocks:
        out[:, lo:hi, :hi] = torch.bmm(x[:, lo:hi], x[:, :hi].mT)
    return _mirror(out, blocks)


def _combine_triangle(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    blocks = _block_rows(c.shape[1])
    out = torch.empty_like(c)
    for lo, hi in blocks:
        out[:, lo:hi, :hi] = torch.baddbmm(
            c[:, lo:hi, :hi], a[:, lo:hi], b[:, :, :hi], beta=beta, alpha=alpha
        )
    return _mirror(out, blocks)


_PLAIN: Final = _Ops(_outer, _combine)
_TRIANGLE: Final = _Ops(_outer_triangle, _combine_triangle)


def _triangle_pays(m: int, dtype: torch.dtype) -> bool:
    return m >= (_TRIANGLE_MIN_ROWS_BF16 if dtype == torch.bfloat16 else _TRIANGLE_MIN_ROWS)


def _ops_for(method: str, m: int, dtype: torch.dtype) -> _Ops:
    return _TRIANGLE if method == "symmetric" or (method == "gram" and _triangle_pays(m, dtype)) else _PLAIN


def flops(m: int, n: int, schedule: Schedule, method: str, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations of one m x n matrix (m <= n), as executed here: multiply and add count 2."""
    ratio, steps, restarts = n / m, len(schedule), len(schedule.restarts)
    triangle = 0.625 if _ops_for(method, m, dtype) is _TRIANGLE else 1.0
    if method == "gram":
        # A phase of k steps does k squares, k - 1 products into Q and 2 (k - 1) products into R.
        small = 2.0 * steps + 6.0 * (steps - 1 - restarts)
        units = triangle * small + (1 + restarts) * 2.0 * ratio * (1 + triangle)
    else:
        units = steps * (2.0 * ratio * (1 + triangle) + 2.0 * triangle)
    return units * float(m) ** 3


def choose_method(m: int, n: int, schedule: Schedule, dtype: torch.dtype) -> str:
    """The form with the fewest operations among those that are stable in `dtype`, for short side m and long side n.

    The Gram form is left out in bf16: the spectrum of R needs more than eight bits.
    """
    candidates = ["standard"]
    if _triangle_pays(m, dtype):
        candidates.append("symmetric")
    if dtype != torch.bfloat16:
        candidates.append("gram")
    return min(candidates, key=lambda name: flops(m, n, schedule, name, dtype))


def _run_standard(x: Tensor, r: Tensor | None, schedule: Schedule, ops: _Ops) -> Tensor:
    for a, b, c in schedule.coefficients:
        gram = ops.outer(x) if r is None else r
        r = None
        x = torch.baddbmm(x, ops.combine(gram, gram, gram, b, c), x, beta=a)
    return x


def _run_gram(x: Tensor, r: Tensor | None, schedule: Schedule, ops: _Ops) -> Tensor:
    bounds = [0, *schedule.restarts, len(schedule)]
    for lo, hi in itertools.pairwise(bounds):
        x = _gram_phase(x, ops.outer(x) if r is None else r, schedule.coefficients[lo:hi], ops)
        r = None
    return x


def _gram_phase(x: Tensor, r: Tensor, steps: Sequence[Triple], ops: _Ops) -> Tensor:
    """Apply consecutive steps to X by way of R = X X^T; the accumulated polynomial is shift * I + w."""
    shift, w = 1.0, None
    for index, (a, b, c) in enumerate(steps):
        z = ops.combine(r, r, r, b, c)
        # (a I + Z)(shift I + W) = a shift I + (a W + shift Z + Z W)
        w = z if w is None else ops.combine(torch.add(z * shift, w, alpha=a), z, w, 1.0, 1.0)
        shift *= a
        if index + 1 < len(steps):
            half = ops.combine(r, z, r, a, 1.0)
            r = ops.combine(half, z, half, a, 1.0)
    assert w is not None
    return torch.baddbmm(x, w, x, beta=shift)


def _scale_to_unit(x: Tensor, eps: float) -> Tensor:
    """Divide each matrix of [B, m, n] by its Frobenius norm, in place, whatever its magnitude; zero stays zero.

    A power of two first brings the largest entry into [0.5, 1), so squares neither overflow nor vanish and the result
    does not depend on the scale of the input.
    """
    flat = x.flatten(1)
    peak = torch.maximum(flat.amax(1), flat.amin(1).neg()).reshape(-1, 1, 1)
    exponent = torch.frexp(peak).exponent
    half = exponent // 2  # two exact factors: one alone can leave the exponent range of the dtype
    one = x.new_ones(exponent.shape)
    x.mul_(torch.ldexp(one, -half)).mul_(torch.ldexp(one, half - exponent))
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return x.div_(norm.clamp(min=eps))


def _schatten4(x: Tensor, ops: _Ops) -> tuple[Tensor, Tensor]:
    """Rescale unit-Frobenius X by its Schatten-4 norm ||X X^T||_F^(1/2); returns X and its Gram matrix."""
    gram = ops.outer(x)
    square = torch.linalg.vector_norm(gram.float(), dim=(1, 2), keepdim=True)
    inverse = torch.where(square > 0, square.reciprocal(), 0.0)
    return (x * inverse.sqrt()).to(x.dtype), (gram * inverse).to(x.dtype)


def _run(
    x: Tensor, schedule: Schedule, method: str, normalize: str, compute: torch.dtype, eps: float
) -> Tensor:
    """Orthogonalize a workspace [B, m, n] (m <= n, fp32 or fp64, overwritten); the result has dtype `compute`."""
    m, n = x.shape[1:]
    chosen = choose_method(m, n, schedule, compute) if method == "auto" else method
    ops = _ops_for(chosen, m, compute)
    y = _scale_to_unit(x, eps).to(compute)
    r = None
    if normalize == "schatten4":
        y, r = _schatten4(y, ops)
    return (_run_gram if chosen == "gram" else _run_standard)(y, r, schedule, ops)


def _padded(m: int, n: int) -> tuple[int, int]:
    """Sides rounded up so that each matrix of a stack starts on a 64-byte boundary.

    Zero rows and columns stay zero through the iteration. BLAS may round differently by alignment, so without them the
    result for a matrix of odd size could depend on its place in the stack.
    """
    return -(-m // 8) * 8, -(-n // 16) * 16


def _stack(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy matrices of one shape (up to transposition) into a zero-padded [B, m_pad, n_pad], short side first."""
    m, n = sorted(matrices[0].shape)
    rows, columns = _padded(m, n)
    stacked = torch.zeros(len(matrices), rows, columns, dtype=dtype, device=matrices[0].device)
    for slot, matrix in zip(stacked, matrices, strict=True):
        slot[:m, :n].copy_(matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT)
    return stacked


def _check(matrices: Sequence[Tensor], method: str, normalize: str, compute: torch.dtype | None) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    if compute not in (None, torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(f"compute_dtype must be None, float32, float64 or bfloat16, got {compute}")
    if method == "gram" and compute == torch.bfloat16:
        raise ValueError(
            "the Gram form is not stable in bfloat16; use compute_dtype=torch.float32 or another method"
        )
    for matrix in matrices:
        if not matrix.is_floating_point():
            raise ValueError(f"expected real floating-point matrices, got {matrix.dtype}")


def _compute_dtype(matrix: Tensor, requested: torch.dtype | None, method: str) -> torch.dtype:
    """None means fp64 for fp64 input, else what the machine multiplies fast (fp32 for the Gram form)."""
    if requested is not None:
        return requested
    if matrix.dtype == torch.float64:
        return torch.float64
    return torch.float32 if method == "gram" else fast_compute_dtype(matrix.device)


def _buckets(matrices: Sequence[Tensor]) -> Iterable[list[int]]:
    """Indices of matrices that share a workspace: same sides up to transposition, dtype and device; bounded in size."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        m, n = sorted(matrix.shape)
        groups.setdefault((m, n, matrix.dtype, matrix.device), []).append(index)
    for indices in groups.values():
        first = matrices[indices[0]]
        limit = max(1, _STACK_BYTES // max(1, first.numel() * 4))
        yield from (indices[lo : lo + limit] for lo in range(0, len(indices), limit))


def orthogonalize_list(
    matrices: Sequence[Tensor],
    schedule: Schedule,
    *,
    normalize: str = "frobenius",
    method: str = "auto",
    compute_dtype: torch.dtype | None = None,
    eps: float = 1e-7,
) -> list[Tensor]:
    """Orthogonalize non-empty 2-D tensors; results are views of shared workspaces in the dtype of the computation."""
    _check(matrices, method, normalize, compute_dtype)
    results: list[Tensor] = list(matrices)
    for indices in _buckets(matrices):
        bucket = [matrices[i] for i in indices]
        first = bucket[0]
        compute = _compute_dtype(first, compute_dtype, method)
        work = torch.float64 if torch.float64 in (first.dtype, compute) else torch.float32
        solved = _run(_stack(bucket, work), schedule, method, normalize, compute, eps)
        for slot, i in zip(solved, indices, strict=True):
            rows, columns = matrices[i].shape
            results[i] = slot[:rows, :columns] if rows <= columns else slot[:columns, :rows].mT
    return results


@overload
def orthogonalize(
    G: Tensor,
    *,
    schedule: ScheduleLike = "kj",
    steps: int | None = None,
    normalize: Normalization = "frobenius",
    method: Method = "auto",
    compute_dtype: torch.dtype | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def orthogonalize(
    G: Sequence[Tensor],
    *,
    schedule: ScheduleLike = "kj",
    steps: int | None = None,
    normalize: Normalization = "frobenius",
    method: Method = "auto",
    compute_dtype: torch.dtype | None = None,
    backend: str = "auto",
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]: ...


@torch.no_grad()
def orthogonalize(
    G: Tensor | Sequence[Tensor],
    *,
    schedule: ScheduleLike = "kj",
    steps: int | None = None,
    normalize: Normalization = "frobenius",
    method: Method = "auto",
    compute_dtype: torch.dtype | None = None,
    backend: str = "auto",
    out: Tensor | Sequence[Tensor] | None = None,
) -> Tensor | list[Tensor]:
    """Replace the singular values of each matrix by values near 1 with a Newton-Schulz iteration.

    Args:
        G: [m, n] or [..., m, n], any strides, or a sequence of matrices of different shapes. Never modified. A matrix of
            zeros gives zeros, a matrix with a non-finite entry gives NaN for itself only.
        schedule: preset name, Schedule, one (a, b, c) to repeat, or a sequence of (a, b, c).
        steps: number of steps, None for the schedule's own.
        normalize: "frobenius" divides by ||G||_F first; "schatten4" by ||G G^T||_F^(1/2), which starts closer to 1.
        method: "auto" takes the stable form with the fewest operations; see the module's text for the forms.
        compute_dtype: float32, float64 or bfloat16; None asks the machine (float64 stays float64).
        backend: "auto", "triton" or "torch".
        out: where to write: a tensor like G, or a sequence of tensors.

    Returns:
        The result in G's shape(s) and dtype(s); a list if G is a sequence.

    Raises:
        ValueError: malformed input, unknown names, or a combination that is not stable.
        RuntimeError: backend="triton" where no kernel is available.
    """
    resolved = resolve_schedule(schedule, steps)
    single = isinstance(G, Tensor)
    given = [G] if isinstance(G, Tensor) else list(G)
    if any(g.ndim < 2 for g in given):
        raise ValueError("orthogonalize needs tensors of at least two dimensions")
    matrices = [m for g in given for m in (g.reshape(-1, *g.shape[-2:]) if g.numel() else ())]
    if given:
        resolve(backend, "orthogonalize", given[0].device)
    solved = iter(
        orthogonalize_list(
            matrices, resolved, normalize=normalize, method=method, compute_dtype=compute_dtype
        )
    )
    targets = (
        [torch.empty_like(g) for g in given]
        if out is None
        else [out]
        if isinstance(out, Tensor)
        else list(out)
    )
    if len(targets) != len(given) or any(t.shape != g.shape for t, g in zip(targets, given, strict=False)):
        raise ValueError("out must match G in number and shape")
    for target in targets:
        for place in itertools.product(*map(range, target.shape[:-2])) if target.numel() else ():
            target[place].copy_(next(solved))
    return targets[0] if single else targets


def orthogonality_residual(x: Tensor) -> Tensor:
    """How far [m, n] is from a semi-orthogonal matrix: root mean square of s^2 - 1 over its min(m, n) singular values.

    Computed in fp32 as ||X X^T - I||_F / sqrt(min(m, n)) on the short side; a 0-d tensor on x's device.
    """
    wide = x.float() if x.shape[0] <= x.shape[1] else x.float().mT
    gram = wide @ wide.mT
    gram.diagonal().sub_(1.0)
    deviation: Tensor = torch.linalg.vector_norm(gram)
    return deviation / math.sqrt(max(1, gram.shape[0]))

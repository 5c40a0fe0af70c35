"""Newton-Schulz orthogonalization of tensors: bucket by bucket, on the operations of the backend in force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, overload

import torch
from torch import Tensor

from muonrl_kernels.backend import takes_triton
from muonrl_kernels.coefficients import Schedule, resolve_schedule
from muonrl_kernels.iteration import (
    METHODS,
    NORMALIZATIONS,
    Method,
    Normalization,
    ScheduleLike,
    check_options,
    choose_method,
    compute_dtype_for,
    iterate_schedule,
    phase_bounds,
    uses_triangle,
)
from muonrl_kernels.torch_ops import Iterate, LastProduct, Symmetric, TorchOps, unit_iterate

__all__ = [
    "METHODS",
    "NORMALIZATIONS",
    "LastProduct",
    "ScheduleLike",
    "orthogonality_residual",
    "orthogonalize",
    "orthogonalize_stream",
]

_SINGLE_MIN_ROWS: Final = 256
"""On the CPU, matrices with a short side of at least this are worked on one by one: stacking gains nothing (measured)."""
_STACK_BYTES: Final = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bound on one stacked workspace unless the caller gives another; a single matrix may exceed it."""


def _padded(size: tuple[int, int], stacked: bool) -> tuple[int, int]:
    """Sides rounded up so that each matrix of a stack starts on a 64-byte boundary.

    Zero rows and columns stay zero through the iteration. BLAS may round differently by alignment, so without them the
    result for a matrix of odd size could depend on its place in the stack.
    """
    return (-(-size[0] // 16) * 16, -(-size[1] // 16) * 16) if stacked else size


def _is_single(shape: torch.Size, device: torch.device) -> bool:
    return device.type == "cpu" and min(shape) >= _SINGLE_MIN_ROWS


def _buckets(
    shapes: Sequence[torch.Size], device: torch.device, itemsize: int, max_bytes: int | None
) -> Iterable[list[int]]:
    """Indices of matrices that share a workspace: equal shapes, bounded in size."""
    groups: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(index)
    bound = max_bytes or _STACK_BYTES.get(device.type, _STACK_BYTES["cuda"])
    for shape, indices in groups.items():
        limit = 1 if _is_single(shape, device) else max(1, bound // (shape.numel() * itemsize))
        yield from (indices[lo : lo + limit] for lo in range(0, len(indices), limit))


def orthogonalize_stream(
    shapes: Sequence[torch.Size],
    fill: Callable[[int, Tensor], None],
    finish: Callable[[int, LastProduct], None],
    schedule: Schedule,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    normalize: str = "frobenius",
    method: str = "auto",
    compute_dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    max_workspace_bytes: int | None = None,
) -> None:
    """Orthogonalize matrices that need not exist yet, bucket by bucket, so that one workspace lives at a time.

    Args:
        shapes: sizes of the matrices, 2-D and not empty, in any orientation.
        fill: ``fill(i, slot)`` writes matrix i to `slot` [rows, columns], a view of the workspace in fp32 (fp64 if
            `dtype` or `compute_dtype` is).
        finish: ``finish(i, product)`` takes the result of matrix i; it is valid during the call.
        schedule: the steps.
        dtype: of the matrices; float64 is computed in float64 unless `compute_dtype` says otherwise.
        device: where the workspace is.
        normalize, method, compute_dtype: as for :func:`orthogonalize`.
        eps: floor on the norm of a matrix scaled to entries of at most 1; guards the all-zero matrix.
        max_workspace_bytes: bound on a stack of matrices; one matrix alone may exceed it.

    A matrix's result does not depend, to the bit, on the others in the call.
    """
    check_options(method, normalize, compute_dtype)
    compute = compute_dtype_for(dtype, device, compute_dtype, method)
    work = torch.float64 if torch.float64 in (dtype, compute) else torch.float32
    for indices in _buckets(shapes, device, work.itemsize, max_workspace_bytes):
        shape = shapes[indices[0]]
        single = _is_single(shape, device)
        m, n = sorted(shape)
        chosen = choose_method(m, n, schedule, compute) if method == "auto" else method
        ops = TorchOps(triangle=uses_triangle(chosen, m, compute))
        first = _first_iterates(shape, indices, fill, work, compute, device, eps, single=single)
        bounds = phase_bounds(schedule, chosen, compute)
        p, it = iterate_schedule(ops, first, schedule.coefficients, bounds, normalize)
        _hand_out(ops, p, it, indices, shape, single, finish)
        del p, it  # before the next bucket's workspace comes


def _first_iterates(
    shape: torch.Size,
    indices: Sequence[int],
    fill: Callable[[int, Tensor], None],
    work: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    eps: float,
    *,
    single: bool,
) -> list[Iterate]:
    """A bucket's matrices, written by their owner and scaled; in a list, from which the iteration takes it."""
    rows, columns = _padded((shape[0], shape[1]), not single)
    make = torch.empty if single else torch.zeros  # only padding has to be zero
    stack = make(len(indices), rows, columns, dtype=work, device=device)
    for slot, i in zip(stack, indices, strict=True):
        fill(i, slot[: shape[0], : shape[1]])
    tall, size = shape[0] > shape[1], (min(shape), max(shape))
    return [unit_iterate(stack.mT if tall else stack, compute, size, eps, tall=tall, single=single)]


def _hand_out(
    ops: TorchOps,
    p: Symmetric,
    it: Iterate,
    indices: Sequence[int],
    shape: torch.Size,
    single: bool,
    finish: Callable[[int, LastProduct], None],
) -> None:
    """Pass each result of a bucket on; those of a stack are multiplied out together."""
    if single:

        def multiplied() -> Tensor:
            whole = ops.apply(p, it)
            return _without_gain(whole.x[0].mT if it.tall else whole.x[0], whole.gain)

        finish(indices[0], LastProduct(multiplied, p, it))
        return
    whole = ops.apply(p, it)
    for slot, i in zip(whole.x.mT if it.tall else whole.x, indices, strict=True):
        o = slot[: shape[0], : shape[1]]
        finish(i, LastProduct(partial(_without_gain, o, whole.gain), None, None))


def _without_gain(o: Tensor, gain: float) -> Tensor:
    return o if gain == 1.0 else o / gain


def _copy_through(
    pairs: Sequence[tuple[Tensor, Tensor]],
    schedule: Schedule,
    *,
    normalize: str,
    method: str,
    compute_dtype: torch.dtype | None,
) -> None:
    """Orthogonalize the first of each pair (equal dtypes and devices) into the second."""

    def fill(i: int, slot: Tensor) -> None:
        slot.copy_(pairs[i][0])

    def finish(i: int, product: LastProduct) -> None:
        pairs[i][1].copy_(product.value())

    orthogonalize_stream(
        [g.shape for g, _ in pairs],
        fill,
        finish,
        schedule,
        dtype=pairs[0][0].dtype,
        device=pairs[0][0].device,
        normalize=normalize,
        method=method,
        compute_dtype=compute_dtype,
    )


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
        compute_dtype: float16, bfloat16, float32 or float64; None asks the machine (float64 stays float64).
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
    targets = (
        [out] if isinstance(out, Tensor) else [torch.empty_like(g) for g in given] if out is None else [*out]
    )
    if [t.shape for t in targets] != [g.shape for g in given]:
        raise ValueError("out must match G in number and shape")
    check_options(method, normalize, compute_dtype)
    pairs: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for g, target in zip(given, targets, strict=True):
        if not g.is_floating_point():
            raise ValueError(f"expected real floating-point matrices, got {g.dtype}")
        for place in itertools.product(*map(range, g.shape[:-2])) if g.numel() else ():
            pairs.setdefault((g.dtype, target.dtype, g.device), []).append((g[place], target[place]))
    for (dtype, written, device), matrices in pairs.items():
        through = _copy_through
        if takes_triton(backend, "orthogonalize", device, (dtype, written), compute_dtype):
            from muonrl_kernels.muon_triton import orthogonalize_pairs as through
        through(matrices, resolved, normalize=normalize, method=method, compute_dtype=compute_dtype)
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

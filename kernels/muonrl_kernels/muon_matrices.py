"""Parameters as lists of matrices: what Muon orthogonalizes is a 2-D view of a parameter, its gradient and its state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from muonrl_kernels.muon_options import Sizes, lr_ratio

__all__ = ["BUFFER", "NEURONS", "MatrixItem", "check_shape", "expand", "init_state"]

BUFFER: Final = "momentum_buffer"
NEURONS: Final = "second_momentum_buffer"
STEP: Final = "step"
_STREAM_BITS: Final = 20
"""Streams of noise are numbered parameter << 20 | matrix."""


@dataclass(frozen=True, slots=True)
class MatrixItem:
    """One matrix of a step.

    Attributes:
        weight, grad, momentum: [rows, columns] views of a parameter, its gradient and its buffer; any strides.
        ratio: factor on the learning rate by the matrix's shape.
        neurons: [rows, 1] view of NorMuon's second moment, fp32 (fp64 for fp64 weights); None for plain Muon.
        finite: 0-d bool tensor on the device, False to leave weight and state alone; None where that is settled.
        step: 0-d float tensor, number of this update from 1; None without stochastic rounding.
        stream: number of the matrix's own stream of rounding noise.
    """

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    ratio: float
    neurons: Tensor | None = None
    finite: Tensor | None = None
    step: Tensor | None = None
    stream: int = 0

    @property
    def parameter(self) -> int:
        """Number of the parameter in its optimizer."""
        return self.stream >> _STREAM_BITS


def check_shape(group: Mapping[str, Any], p: Tensor) -> None:
    """Raise ValueError if a parameter cannot be seen as matrices under the group's options."""
    flatten, batched = group["flatten"], group["batched_matrices"]
    if p.ndim > 2 and flatten and batched:
        raise ValueError(
            f"flatten and batched_matrices exclude each other for a parameter of more than two dimensions, got size: {p.size()}"
        )
    if p.ndim != 2 and not (p.ndim > 2 and (flatten or batched)):
        hint = "" if p.ndim < 2 else "; flatten=True or batched_matrices=True makes matrices of it"
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}{hint}"
        )
    if p.numel():
        block_sizes(group, p)


def block_sizes(group: Mapping[str, Any], p: Tensor) -> tuple[int, ...]:
    """Sizes of the blocks along `split_dim` into which each matrix of the parameter is divided.

    Raises:
        ValueError: the sizes are not positive integers that add up to the matrix's side, or a number of equal blocks that
            does not divide it.
    """
    split = group["split"]
    sizes: Sizes = split(p) if callable(split) else split
    side = _matrix_shape(group, p)[group["split_dim"]]
    if sizes is None:
        return (side,)
    name = ("rows", "columns")[group["split_dim"]]
    if isinstance(sizes, int):
        if sizes < 1 or side % sizes:
            raise ValueError(f"split into {sizes} equal blocks needs {name} divisible by it, got {p.size()}")
        return (side // sizes,) * sizes
    if isinstance(sizes, str) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"split must be None, a number of blocks, positive block sizes or a function; got {sizes!r}"
        )
    if sum(sizes) != side:
        raise ValueError(
            f"split {tuple(sizes)} adds up to {sum(sizes)}, but a parameter of size {p.size()} has {side} {name}"
        )
    return tuple(sizes)


def _matrix_shape(group: Mapping[str, Any], p: Tensor) -> tuple[int, int]:
    if p.ndim > 2 and group["flatten"]:
        return p.shape[0], math.prod(p.shape[1:])
    return p.shape[-2], p.shape[-1]


def init_state(group: Mapping[str, Any], p: Tensor, state: dict[str, Any]) -> None:
    """Create what is missing of a parameter's state; the momentum has the parameter's layout in memory."""
    if BUFFER not in state:
        dtype = group["momentum_dtype"] or cast(Tensor, p.grad).dtype
        state[BUFFER] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    if group["variant"] == "normuon" and NEURONS not in state:
        rows, _ = _matrix_shape(group, p)
        blocks = len(block_sizes(group, p)) if group["split_dim"] == 1 else 1
        batch = p.shape[:-2] if group["batched_matrices"] else ()
        dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        state[NEURONS] = torch.zeros(*batch, rows, blocks, dtype=dtype, device=p.device)
    if group["stochastic_rounding"] and STEP not in state:
        device = p.device if group["capturable"] else "cpu"
        state[STEP] = torch.zeros((), dtype=torch.float32, device=device)


def expand(
    group: Mapping[str, Any], p: Tensor, state: dict[str, Any], finite: Tensor | None, number: int
) -> tuple[list[MatrixItem], Tensor | None]:
    """The matrices of one parameter that has a gradient, and the copy they are views of if the parameter has none.

    Args:
        group: complete options.
        p: the parameter, not empty.
        state: its state, complete; a buffer that cannot be viewed like the parameter is laid out anew.
        finite: see :class:`MatrixItem`.
        number: index of the parameter in the optimizer, which selects its rounding noise.
    """
    weight, grad = p.detach(), cast(Tensor, p.grad)
    copy = None
    if p.ndim > 2 and group["flatten"]:
        # The order of a matrix's columns does not matter, so the parameter's own order in memory makes it a view.
        strides = p.stride()
        order = [0, *sorted(range(1, p.ndim), key=lambda d: (-strides[d], d))]
        buffer, state[BUFFER] = _flat(state[BUFFER], order)
        flat, whole = _flat(weight, order)
        copy = None if whole is weight else whole
        triples = [(flat, grad.permute(order).flatten(1), buffer)]
    else:
        triples = list(zip(_matrices(weight), _matrices(grad), _matrices(state[BUFFER]), strict=True))
    sizes, dim = block_sizes(group, p), group["split_dim"]
    items: list[MatrixItem] = []
    for index, tensors in enumerate(triples):
        neurons = _matrices(state[NEURONS])[index] if group["variant"] == "normuon" else None
        start = 0
        for block, size in enumerate(sizes):
            w, g, m = (t.narrow(dim, start, size) for t in tensors)
            mine = (start, size) if dim == 0 else (block, 1)
            items.append(
                MatrixItem(
                    w,
                    g,
                    m,
                    lr_ratio(group["adjust_lr_fn"], w.shape),
                    neurons=None if neurons is None else neurons.narrow(dim, *mine),
                    finite=finite,
                    step=state[STEP] if group["stochastic_rounding"] else None,
                    stream=number << _STREAM_BITS | len(items),
                )
            )
            start += size
    return items, copy


def _matrices(t: Tensor) -> list[Tensor]:
    """The 2-D slices of [..., m, n], in order."""
    if t.ndim == 2:
        return [t]
    return [matrix for part in t.unbind(0) for matrix in _matrices(part)]


def _flat(t: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """[A, B, C, ...] as the matrix [A, B*C*...] with its columns in that order, and the tensor that this is a view of.

    The latter is `t`, or a copy of it, of the same shape, where the strides of `t` make no matrix.
    """
    permuted = t.permute(*order)
    flat = permuted.flatten(1)
    if flat.data_ptr() == t.data_ptr():
        return flat, t
    return flat, flat.view(permuted.shape).permute(*(order.index(d) for d in range(t.ndim)))

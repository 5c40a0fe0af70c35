"""Tables that tell the Triton kernels where matrices lie: in the workspace (panels) and in the tensors of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from muonrl_kernels.torch_ops import iterate_gain

__all__ = ["Gain", "Layout", "Places", "device_table", "panel_layout", "places"]

_WIDE: Final = 2**31 // 256
"""Distance between memory rows from which a tile of up to 256 rows spans more than int32 can count."""
_captured: Final[list[Layout]] = []
"""Layouts whose addresses are in CUDA graphs, which do not keep them alive."""


def _capturing(device: torch.device) -> bool:
    """Whether launches are being recorded in a CUDA graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers (integers exactly) on the device [len(values)], without waiting for it.

    Cached, so that a run whose numbers stay copies nothing. In a graph under capture kernels write them, in the graph's own
    memory: a copy would read its source at each replay, and what is cached could be evicted between two.
    """
    if _capturing(device):
        table = torch.zeros(len(values), dtype=dtype, device=device)
        torch._foreach_add_(list(table.unbind()), list(values))
        return table
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _uploaded(values, dtype, device, stream)


@lru_cache(maxsize=2048)
def _uploaded(values: tuple[float, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """The copy is asynchronous, so that it is there only for the stream on which it was made."""
    source = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return source.to(device, non_blocking=True)


@dataclass(frozen=True)
class Gain:
    """What iterates are multiplied by, and 1 / gain^2: fp32 [matrices] each, in tensors of their own (aligned)."""

    value: Tensor
    inverse_square: Tensor

    @classmethod
    def of(cls, value: Tensor) -> Gain:
        """Complete a gain."""
        return cls(value, value.double().pow(-2).float())

    def to(self, device: torch.device) -> Gain:
        """The same on a device, complete when this returns."""
        return Gain(self.value.to(device), self.inverse_square.to(device))


@dataclass(frozen=True)
class Layout:
    """Matrices that share the short side, as zero-padded column panels [side, width], one below the other.

    Attributes:
        side: padded short side; a multiple of `width` for the products, a power of two for the small kernel.
        width: columns of a panel.
        panels: number of panels of all matrices.
        starts, counts: int32 [matrices], first panel and number of panels of a matrix.
        owners: int32 [panels], the matrix of a panel.
        sizes: int32 [matrices, 2], short and long side.
        first, later: what the first iterate and the later ones are multiplied by.
    """

    side: int
    width: int
    panels: int
    starts: Tensor
    counts: Tensor
    owners: Tensor
    sizes: Tensor
    first: Gain
    later: Gain

    @property
    def matrices(self) -> int:
        """Number of matrices."""
        return self.starts.numel()

    def new_panels(self, dtype: torch.dtype) -> Tensor:
        """Uninitialized panels of all iterates: [panels * side, width]."""
        return torch.empty(self.panels * self.side, self.width, dtype=dtype, device=self.starts.device)

    def new_symmetric(self, dtype: torch.dtype) -> Tensor:
        """Uninitialized panels of one side x side matrix each: [matrices * (side / width) * side, width]."""
        rows = self.matrices * (self.side // self.width) * self.side
        return torch.empty(rows, self.width, dtype=dtype, device=self.starts.device)


def panel_layout(
    sizes: tuple[tuple[int, int], ...], side: int, width: int, dtype: torch.dtype, device: torch.device
) -> Layout:
    """Lay out matrices of sizes (short, long), in the given order; cached, because a training run asks every step."""
    layout = _new_layout(sizes, side, width, dtype, device)
    if _capturing(device):
        _captured.append(layout)
    return layout


@lru_cache(maxsize=256)
def _new_layout(
    sizes: tuple[tuple[int, int], ...], side: int, width: int, dtype: torch.dtype, device: torch.device
) -> Layout:
    """All tables are complete when this returns, whatever stream uses them."""
    with torch.device("cpu"):  # whatever the default device is
        counts = torch.tensor([-(-n // width) for _, n in sizes], dtype=torch.int32)
        ends = counts.cumsum(0, dtype=torch.int32)
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
        shapes = torch.tensor(sizes, dtype=torch.int32)
        first, later = (
            torch.tensor([iterate_gain(dtype, m, n, first=flag) for m, n in sizes], dtype=torch.float32)
            for flag in (True, False)
        )
    return Layout(
        side=side,
        width=width,
        panels=int(ends[-1]),
        starts=(ends - counts).to(device),
        counts=counts.to(device),
        owners=owners.to(device),
        sizes=shapes.to(device),
        first=Gain.of(first).to(device),
        later=Gain.of(later).to(device),
    )


@dataclass(frozen=True)
class Places:
    """Where 2-D tensors of one dtype lie: int64 [matrices] addresses and signed strides, see `update_tile`."""

    addresses: Tensor
    strides: Tensor
    dtype: torch.dtype
    aligned: bool
    wide: bool


def signed_stride(t: Tensor) -> int | None:
    """Distance between memory rows of t [rows, columns], negative if the long side runs along them; None if neither
    side is contiguous in memory. The short side is the first of equal ones."""
    rows, columns = t.shape
    down, right = t.stride()
    if right == 1 or columns == 1:
        return -down if rows > columns else max(down, 1)
    if down == 1 or rows == 1:
        return right if rows > columns else -right
    return None


def viewable(t: Tensor) -> bool:
    """Whether the kernels can address t [rows, columns] as it lies: one side contiguous, no element twice."""
    stride = signed_stride(t)
    if not stride:
        return False
    contiguous = t.shape[1] if t.stride(1) == 1 or t.shape[1] == 1 else t.shape[0]
    return abs(stride) >= contiguous or 1 in t.shape


def places(tensors: Sequence[Tensor]) -> Places:
    """Addresses of tensors for which `viewable` holds; they must outlive the launch."""
    strides = tuple(signed_stride(t) or 0 for t in tensors)
    addresses = tuple(t.data_ptr() for t in tensors)
    aligned = all(a % 16 == 0 for a in addresses) and all(
        n % 8 == 0 for t, stride in zip(tensors, strides, strict=True) for n in (stride, *t.shape)
    )
    device = tensors[0].device
    wide = max(map(abs, strides)) >= _WIDE
    return Places(
        device_table(addresses, torch.int64, device),
        device_table(strides, torch.int64, device),
        tensors[0].dtype,
        aligned,
        wide,
    )

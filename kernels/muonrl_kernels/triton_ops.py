"""The Newton-Schulz iteration's matrix operations as launches of Triton kernels, for matrices that share a short side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from muonrl_kernels.coefficients import Schedule, Triple
from muonrl_kernels.iteration import iterate_schedule, phase_bounds
from muonrl_kernels.muon_prep import matrix_norms, matrix_scales, write_iterate
from muonrl_kernels.small_ns import small_newton_schulz
from muonrl_kernels.symmetric_matmul import panel_product, symmetric_product
from muonrl_kernels.triton_layout import Gain, Layout, Places, device_table
from muonrl_kernels.tuning import Tile, Tuning
from muonrl_kernels.update_tile import update_panels

__all__ = ["OPTIONS", "Panels", "Source", "Target", "TritonOps", "prepare", "run", "triton_dtype"]

OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": True}
"""Compiler options of every launch; stated because Triton's default changes between versions."""

_DTYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a dtype; KeyError for one that the kernels do not take."""
    return _DTYPES[dtype]


@dataclass(frozen=True)
class Source:
    """What the first iterates are made of: gradients, and momentum buffers that are advanced on the way.

    style: "none" (the gradients themselves), "ema" or "sum". mu: fp32 [1] on the device.
    """

    grads: Places
    momenta: Places | None
    style: str
    nesterov: bool
    mu: Tensor


@dataclass(frozen=True)
class Target:
    """What happens to the results: see `update_tile`."""

    mode: str
    weights: Places
    finite: Tensor | None = None
    ratios: Tensor | None = None
    hyper: Tensor | None = None
    keys: Tensor | None = None
    cautious: bool = False

    def fuses(self, tuning: Tuning) -> bool:
        """Whether the last product updates the weights itself: always in fp32, never with rounding noise."""
        return self.weights.dtype == torch.float32 or (tuning.fuses_half and self.keys is None)

    def arguments(self, layout: Layout) -> dict[str, Any]:
        """Keyword arguments of the kernels that end in `update_tile`."""
        return {
            "weight_ptr": self.weights.addresses,
            "stride_ptr": self.weights.strides,
            "size_ptr": layout.sizes,
            "finite_ptr": self.finite,
            "ratio_ptr": self.ratios,
            "hyper_ptr": self.hyper,
            "key_ptr": self.keys,
            "MODE": self.mode,
            "WEIGHT_DTYPE": triton_dtype(self.weights.dtype),
            "ALIGNED": self.weights.aligned,
            "WIDE": self.weights.wide,
            "CAUTIOUS": self.cautious,
            "STOCHASTIC": self.keys is not None,
        }


_NO_TARGET: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("weight_ptr", "stride_ptr", "size_ptr", "finite_ptr", "ratio_ptr", "hyper_ptr", "key_ptr")
    ),
    "MODE": "panels",
    "WEIGHT_DTYPE": tl.float32,
    "ALIGNED": False,
    "WIDE": False,
    "CAUTIOUS": False,
    "STOCHASTIC": False,
}


@dataclass(frozen=True)
class Panels:
    """Iterates in panels; the matrices are ``x / gain``."""

    x: Tensor
    gain: Gain


@dataclass(frozen=True)
class Symmetric:
    """``shift I + w`` for symmetric w in panels."""

    w: Tensor
    shift: float


def _programs(device: torch.device, tile: Tile, work: int) -> int:
    """Number of persistent programs for that many tiles."""
    if device.type == "cpu":
        return min(work, 4)
    return min(work, _multiprocessors(device) * tile.programs)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


class TritonOps:
    """The operations of :class:`muonrl_kernels.iteration.MatrixOps` on one layout."""

    def __init__(self, layout: Layout, tile: Tile, *, tma: bool) -> None:
        self._layout = layout
        self._tile = tile
        self._tma = tma

    def gram(self, it: Panels) -> Symmetric:
        """X X^T."""
        return Symmetric(self._symmetric(it.x, it.x, scale=it.gain.inverse_square), 0.0)

    def polynomial(self, r: Symmetric, step: Triple) -> Symmetric:
        """a I + b R + c R^2."""
        a, b, c = step
        return Symmetric(self._symmetric(r.w, r.w, alpha=c, beta=b), a)

    def times(self, p: Symmetric, z: Symmetric) -> Symmetric:
        """P Z for commuting P and Z."""
        return Symmetric(self._symmetric(p.w, z.w, beta=z.shift, gamma=p.shift), p.shift * z.shift)

    def apply(self, p: Symmetric, it: Panels) -> Panels:
        """P X."""
        out = torch.empty_like(it.x)
        later = self._layout.later
        self.last(p, it, later.value / it.gain.value, out, _NO_TARGET)
        return Panels(out, later)

    def schatten4(self, it: Panels, r: Symmetric) -> tuple[Panels, Symmetric]:
        """X and R rescaled so that ||R||_F = 1; zero stays zero."""
        flat = r.w.view(self._layout.matrices, -1)
        norm = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float32)
        norm = torch.where(norm > 0, norm, 1.0)
        rescaled = Panels(it.x, Gain.of(it.gain.value * norm.sqrt()))
        return rescaled, Symmetric((flat / norm[:, None]).to(r.w.dtype).view_as(r.w), 0.0)

    def last(
        self, p: Symmetric, it: Panels, scale: Tensor, out: Tensor | None, target: dict[str, Any]
    ) -> None:
        """scale P X, to panels `out` or to the target."""
        layout, tile = self._layout, self._tile
        work = layout.panels * (layout.side // tile.block)
        panel_product[(_programs(it.x.device, tile, work),)](
            self._operand(p.w, tile.block, tile.block_k),
            self._operand(it.x, tile.block_k, tile.block),
            it.x,
            out,
            layout.owners,
            layout.starts,
            scale,
            p.shift,
            layout.panels,
            layout.side,
            BLOCK=tile.block,
            BLOCK_K=tile.block_k,
            USE_TMA=self._tma,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **target,
            **OPTIONS,
        )

    def _operand(self, panels: Tensor, rows: int, columns: int) -> Any:
        return TensorDescriptor.from_tensor(panels, [rows, columns]) if self._tma else panels

    def _symmetric(
        self,
        a: Tensor,
        b: Tensor,
        *,
        scale: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        gamma: float = 0.0,
    ) -> Tensor:
        """alpha A B + beta A + gamma B of m x m matrices, or with `scale` scale A B^T of iterates."""
        layout, tile = self._layout, self._tile
        out = layout.new_symmetric(a.dtype)
        blocks = layout.side // tile.block
        work = layout.matrices * (blocks * (blocks + 1) // 2)
        symmetric_product[(_programs(a.device, tile, work),)](
            self._operand(a, tile.block, tile.block_k),
            self._operand(b, *((tile.block_k, tile.block) if scale is None else (tile.block, tile.block_k))),
            a,
            b,
            out,
            layout.starts,
            layout.counts,
            scale,
            alpha,
            beta,
            gamma,
            layout.matrices,
            layout.side,
            BLOCK=tile.block,
            BLOCK_K=tile.block_k,
            ADD_OPERANDS=scale is None,
            RAGGED=scale is not None,
            USE_TMA=self._tma,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **OPTIONS,
        )
        return out


def prepare(layout: Layout, source: Source, tuning: Tuning, eps: float) -> tuple[Tensor, Tensor]:
    """(scales, finite) of each matrix, from one reading of gradients and momenta; nothing of the caller's is written."""
    device = layout.starts.device
    rows = min(tuning.rows, layout.side)
    bands = layout.side // rows
    peaks = torch.empty(layout.panels * bands, dtype=torch.float32, device=device)
    squares = torch.empty_like(peaks)
    matrix_norms[(peaks.numel(),)](
        *_sources(source, layout),
        peaks,
        squares,
        source.mu,
        bands,
        **_constants(source, layout, rows),
        num_warps=tuning.prep_warps,
        num_stages=1,
        **OPTIONS,
    )
    scales = torch.empty(layout.matrices, 2, dtype=torch.float32, device=device)
    finite = torch.empty(layout.matrices, dtype=torch.int32, device=device)
    matrix_scales[(layout.matrices,)](
        peaks, squares, layout.starts, layout.counts, layout.first.value, scales, finite, eps, bands, CHUNK=1024, **OPTIONS
    )  # fmt: skip
    return scales, finite


def first_iterate(
    layout: Layout, source: Source, tuning: Tuning, dtype: torch.dtype, scales: Tensor, finite: Tensor
) -> Panels:
    """Advance the momenta of finite gradients and write the first iterates."""
    rows = min(tuning.rows, layout.side)
    bands = layout.side // rows
    x = layout.new_panels(dtype)
    write_iterate[(layout.panels * bands,)](
        *_sources(source, layout),
        scales,
        finite,
        x,
        source.mu,
        bands,
        **_constants(source, layout, rows),
        num_warps=tuning.prep_warps,
        num_stages=1,
        **OPTIONS,
    )
    return Panels(x, layout.first)


def _sources(source: Source, layout: Layout) -> tuple[Tensor | None, ...]:
    momenta = source.momenta
    return (
        source.grads.addresses,
        source.grads.strides,
        None if momenta is None else momenta.addresses,
        None if momenta is None else momenta.strides,
        layout.sizes,
        layout.owners,
        layout.starts,
    )


def _constants(source: Source, layout: Layout, rows: int) -> dict[str, Any]:
    momenta = source.momenta or source.grads
    return {
        "ROWS": rows,
        "COLUMNS": layout.width,
        "GRAD_DTYPE": triton_dtype(source.grads.dtype),
        "MOMENTUM_DTYPE": triton_dtype(momenta.dtype),
        "STYLE": source.style,
        "NESTEROV": source.nesterov,
        "ALIGNED": source.grads.aligned and momenta.aligned,
        "WIDE": source.grads.wide or momenta.wide,
    }


def run(
    layout: Layout,
    it: Panels,
    schedule: Schedule,
    *,
    method: str,
    normalize: str,
    tuning: Tuning,
    tile: Tile | None,
    target: Target,
) -> None:
    """Iterate and hand the results to the target; `tile` None takes the small kernel (Gram form only)."""
    bounds = phase_bounds(schedule, method, it.x.dtype)
    if tile is None:
        _run_small(layout, it, schedule.coefficients, bounds, normalize, target)
        return
    ops = TritonOps(layout, tile, tma=tuning.tma)
    p, it = iterate_schedule(ops, [it], schedule.coefficients, bounds, normalize)
    scale = it.gain.value.reciprocal()
    if target.fuses(tuning):
        ops.last(p, it, scale, None, target.arguments(layout))
        return
    o = torch.empty_like(it.x)
    ops.last(p, it, scale, o, _NO_TARGET)
    rows = min(tuning.rows, layout.side)
    bands = layout.side // rows
    update_panels[(layout.panels * bands,)](
        o,
        layout.owners,
        layout.starts,
        bands,
        ROWS=rows,
        COLUMNS=layout.width,
        num_warps=tuning.prep_warps,
        num_stages=1,
        **target.arguments(layout),
        **OPTIONS,
    )


def _run_small(
    layout: Layout, it: Panels, steps: Sequence[Triple], bounds: Sequence[int], normalize: str, target: Target
) -> None:
    ends = {*bounds[1:], len(steps)}
    table = tuple(v for index, step in enumerate(steps) for v in (*step, float(index + 1 in ends)))
    device = it.x.device
    scratch = torch.empty(layout.matrices, 4, layout.side, layout.side, dtype=it.x.dtype, device=device)
    small_newton_schulz[(layout.matrices,)](
        it.x,
        scratch,
        layout.starts,
        layout.counts,
        layout.first.value,
        layout.later.value,
        device_table(table, torch.float32, device),
        len(steps),
        int(normalize == "schatten4"),
        SIDE=layout.side,
        COLUMNS=layout.width,
        num_warps=8 if layout.side >= 128 else 4,
        num_stages=1,
        **target.arguments(layout),
        **OPTIONS,
    )

"""The linear losses on Triton: a library product makes a chunk of logits, the row pass its gradient, two products the rest.

No number is brought to the host, forward or backward. That decides how masked rows are left out, because the size of a
product must be known when it is launched:

- A cumulative sum on the device orders the rows, valid ones first, and their number stays on the device. The programs of rows
  beyond it exit at once, after clearing their gradient, and these rows of hidden enter the products as zeros.
- The products run over `valid_rows` rows, an upper bound that the caller knows from making the mask; without it over all N.
  A bound that turns out too small makes the loss NaN: no token is lost silently.
- Rows whose gradient is exactly 0 are known on the device alone; they stay in the gradient products, as zeros. (The
  PyTorch path, where a look at the device costs nothing on a CPU, does leave them out.)

Gradients of the loss are accumulated for shares that are scaled to at most 1 and get the factor in the backward pass: shares
of 1 / 32768 would underflow in fp16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from muonrl_kernels.linear_head import Gradients, Head, matmul
from muonrl_kernels.loss_gemm import combine_tiles, tile_gradient, tile_statistics
from muonrl_kernels.loss_math import COLUMNS
from muonrl_kernels.loss_rows import logit_gradient, logprob_rows, loss_rows
from muonrl_kernels.loss_triton import OPTIONS, as_bytes, hyper, kl_name, on_device
from muonrl_kernels.options import LossOptions
from muonrl_kernels.policy_loss import Terms
from muonrl_kernels.tokens import Tokens
from muonrl_kernels.tuning import Tile, Tuning, tuning_for

__all__ = [
    "TILES",
    "add_gradients",
    "gradient_tile",
    "logprob_backward",
    "logprob_forward",
    "order_rows",
    "run_loss",
]

_COLUMNS: Final = int(COLUMNS.value)
TILES: Final = 256
"""Tiles of a row that are joined at once."""


P = ParamSpec("P")
R = TypeVar("R")


def _on_its_device(
    function: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Run on the device of the first argument."""

    @functools.wraps(function)
    def run(hidden: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with on_device(hidden.device):
            return function(hidden, *args, **kwargs)

    return run


def order_rows(valid: Tensor) -> tuple[Tensor, Tensor]:
    """(indices [N] int64 of the rows, valid ones first and otherwise in order; number of valid ones, 0-d int64)."""
    rank = valid.to(torch.int64).cumsum(0)
    count = rank[-1]
    at = torch.arange(valid.numel(), device=valid.device)
    place = torch.where(valid, rank - 1, count + at - rank)
    return torch.empty_like(at).scatter_(0, place, at), count


@dataclass(frozen=True)
class _Launch:
    """What every row kernel is told of a head."""

    head: Head
    dtype: torch.dtype

    def arguments(self, out: Tensor | None = None) -> dict[str, Any]:
        """Arguments by name; `out` is the view of the logits that the gradient is written to."""
        head, t = self.head, self.head.temperature
        tuning = tuning_for(head.weight.device)
        per_row = isinstance(t, Tensor)
        return {
            "bias_ptr": None if head.bias is None else head.bias.contiguous(),
            "temperature_ptr": t.to(head.weight.device).contiguous() if isinstance(t, Tensor) else None,
            "temperature_stride": int(isinstance(t, Tensor) and t.ndim > 0),
            "temperature": 1.0 if per_row else float(t),
            "scale": float(head.logit_scale),
            "softcap": 1.0 if head.softcap is None else float(head.softcap),
            "vocabulary": head.weight.shape[0],
            "pitch": head.weight.shape[0],
            "SOFTCAP": head.softcap is not None,
            "BLOCK": tuning.row_block,
            "num_warps": tuning.row_warps,
            "num_stages": 1,
            **({} if out is None else {"out_ptr": out, "out_pitch": out.stride(0)}),
            **OPTIONS,
        }

    def gradient_view(self, z: Tensor) -> Tensor:
        """Where the gradient of logits z [C, V] fp32 goes, in the dtype of the products: z itself, or half of each row."""
        return z if self.dtype == torch.float32 else z.view(self.dtype)[:, : z.shape[1]]


def add_gradients(grads: Gradients, head: Head, dz: Tensor, h: Tensor, rows: Tensor | slice) -> None:
    """Add one chunk: dz [C, V] in the products' dtype at rows h [C, H], which are `rows` of hidden."""
    size = dz.shape[1]
    if grads.bias is not None:
        grads.bias[:size] += dz.sum(0, dtype=torch.float32)
    if grads.hidden is not None:
        d_hidden = dz @ head.weight if dz.is_cuda else matmul(dz, head.weight).to(dz.dtype)
        if isinstance(rows, slice):
            grads.hidden[rows] = d_hidden
        else:
            grads.hidden.index_copy_(0, rows, d_hidden)
    if grads.weight is not None:
        total = grads.weight[:size]
        if dz.dtype == total.dtype:
            total.addmm_(dz.mT, h)
        elif dz.is_cuda:
            torch.addmm(total, dz.mT, h, out_dtype=torch.float32, out=total)
        else:
            total += matmul(dz.mT, h)


@_on_its_device
def logprob_forward(hidden: Tensor, head: Head, targets: Tensor, chunk_rows: int | None) -> Tensor:
    """[3, N] fp32: log-probability of the targets, entropy, logsumexp. A target outside of the vocabulary gives NaN."""
    outputs = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
    launch = _Launch(head, hidden.dtype)
    targets = targets.contiguous()
    for part in head.chunks(hidden.shape[0], chunk_rows):
        z = matmul(hidden[part], head.weight.mT)
        logprob_rows[(z.shape[0],)](
            z, target_ptr=targets, logp_ptr=outputs[0], entropy_ptr=outputs[1], lse_ptr=outputs[2],
            first=part.start, **launch.arguments(),
        )  # fmt: skip
    return outputs


@_on_its_device
def logprob_backward(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    d_outputs: tuple[Tensor, Tensor, Tensor],
    grads: Gradients,
    chunk_rows: int | None,
) -> None:
    """Add the gradients of :func:`logprob_forward`'s three outputs, each [N]; the logits are computed again."""
    launch = _Launch(head, hidden.dtype)
    targets = targets.contiguous()
    d_logp, d_entropy, d_lse = (d.float().contiguous() for d in d_outputs)
    for part in head.chunks(hidden.shape[0], chunk_rows):
        h = hidden[part]
        z = matmul(h, head.weight.mT)
        dz = launch.gradient_view(z)
        logit_gradient[(z.shape[0],)](
            z, target_ptr=targets, d_logp_ptr=d_logp, d_entropy_ptr=d_entropy, d_lse_ptr=d_lse,
            first=part.start, **launch.arguments(dz),
        )  # fmt: skip
        add_gradients(grads, head, dz, h, part)


def _token_tables(t: Tokens, o: LossOptions) -> dict[str, Any]:
    largest = t.share.abs().amax()
    return {
        "old_ptr": None if t.on_policy else t.old,
        "advantage_ptr": t.advantages,
        "ref_ptr": t.ref,
        "w_ptr": t.w,
        "w_log_ptr": t.w_log,
        "cut_ptr": as_bytes(t.w_cut),
        "share_ptr": t.share,
        "unit_ptr": torch.where(largest > 0, largest, 1.0),
        "LOSS_TYPE": o.loss_type,
        "KL": kl_name(o, t.ref is not None),
        "WITH_ENTROPY": o.entropy_coef != 0.0,
        **hyper(o),
    }


def _library_chunk(
    launch: _Launch, h: Tensor, first: int, batch: dict[str, Any], tables: dict[str, Any], with_grad: bool
) -> Tensor | None:
    """Partials of one chunk, and its gradient [C, V] over the logits that the library's product made."""
    z = matmul(h, launch.head.weight.mT)
    dz = launch.gradient_view(z) if with_grad else None
    nowhere: dict[str, Any] = {"out_ptr": None, "out_pitch": 0}
    loss_rows[(z.shape[0],)](z, first=first, **batch, **tables, **{**nowhere, **launch.arguments(dz)})
    return dz


def gradient_tile(tuning: Tuning, softcap: bool) -> Tile:
    """Tile of the gradient's product: with a softcap the large one would not fit into the registers."""
    return tuning.medium if softcap else tuning.logits


def _tile_launch(
    tile: Tile, h: Tensor, weight: Tensor, tma: bool
) -> tuple[list[Any], tuple[int], dict[str, Any]]:
    """Operands, grid and constants of a product of one tile shape; descriptors need rows of whole 16 bytes."""
    tma = tma and h.shape[1] * h.element_size() % 16 == 0
    operands = [
        TensorDescriptor.from_tensor(x, [tile.block, tile.block_k]) if tma else x for x in (h, weight)
    ]
    grid = (-(-h.shape[0] // tile.block) * -(-weight.shape[0] // tile.block),)
    shape = {"BLOCK": tile.block, "BLOCK_K": tile.block_k, "USE_TMA": tma}
    return operands, grid, {**shape, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _fused_chunk(
    launch: _Launch, h: Tensor, first: int, batch: dict[str, Any], tables: dict[str, Any], with_grad: bool
) -> Tensor | None:
    """The same without fp32 logits: statistics of tiles, loss terms of rows, gradients of tiles."""
    head, tuning = launch.head, tuning_for(h.device)
    weight, rows = head.weight.contiguous(), h.shape[0]
    tile = tuning.logits
    tiles = -(-weight.shape[0] // tile.block)
    found = torch.empty(4, rows, tiles, dtype=torch.float32, device=h.device)
    slopes = torch.empty(5, rows, dtype=torch.float32, device=h.device)
    given = launch.arguments()
    for name in ("pitch", "BLOCK", "num_warps", "num_stages"):
        del given[name]
    given.update(first=first, rows=rows, width=h.shape[1])
    given.update({k: batch[k] for k in ("index_ptr", "valid_count_ptr", "target_ptr")})
    operands, grid, shape = _tile_launch(tile, h, weight, tuning.tma)
    tile_statistics[grid](*operands, tile_ptr=found, **given, **shape)
    chosen = {k: v for k, v in tables.items() if k != "WITH_ENTROPY"}
    combine_tiles[(rows,)](
        found, slope_ptr=slopes, first=first, rows=rows, tiles=tiles, vocabulary=weight.shape[0], TILES=TILES,
        BLOCK=tile.block, num_warps=4, **batch, **chosen, **OPTIONS,
    )  # fmt: skip
    if not with_grad:
        return None
    dz = torch.empty(rows, weight.shape[0], dtype=h.dtype, device=h.device)
    operands, grid, shape = _tile_launch(
        gradient_tile(tuning, head.softcap is not None), h, weight, tuning.tma
    )
    tile_gradient[grid](
        *operands, out_ptr=dz, out_pitch=dz.stride(0), slope_ptr=slopes, WITH_ENTROPY=tables["WITH_ENTROPY"],
        **given, **shape,
    )  # fmt: skip
    return dz


@_on_its_device
def run_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    tokens: Tokens,
    options: LossOptions,
    grads: Gradients | None,
    chunk_rows: int | None,
    valid_rows: int | None,
    head_path: str = "cublas",
) -> tuple[Terms, Tensor]:
    """Loss and metrics of N >= 1 tokens (not gspo); `grads` is filled up to the factor that is returned.

    Terms hold no d_logp: it has been used. The metric `dropped` is left out. head_path "cublas" makes fp32 logits with the
    library's product and goes over their rows; "fused" reduces tiles of logits in a product of our own, and computes
    them twice for the gradient.

    Raises:
        ValueError: a negative valid_rows.
    """
    if valid_rows is not None and valid_rows < 0:
        raise ValueError(f"valid_rows must be >= 0, got {valid_rows}")
    order, count = order_rows(tokens.valid)
    rows = order.numel() if valid_rows is None else min(valid_rows, order.numel())
    partial = torch.zeros(rows, _COLUMNS, dtype=torch.float32, device=hidden.device)
    partial[:, -2:].fill_(-torch.inf)
    tables = _token_tables(tokens, options)
    launch = _Launch(head, hidden.dtype)
    batch = {
        "index_ptr": order,
        "valid_count_ptr": count,
        "target_ptr": targets.contiguous(),
        "partial_ptr": partial,
    }
    for part in head.chunks(rows, chunk_rows):
        index = order[part]
        inside = torch.arange(part.start, part.stop, device=hidden.device) < count
        # Masked rows may hold anything, and 0 * NaN is NaN.
        h = torch.where(inside.unsqueeze(1), hidden[index], 0.0)
        if head_path == "fused":
            dz = _fused_chunk(launch, h, part.start, batch, tables, grads is not None)
        else:
            dz = _library_chunk(launch, h, part.start, batch, tables, grads is not None)
        if grads is not None and dz is not None:
            add_gradients(grads, head, dz, h, index)
    sums = partial[:, :-2].sum(0)
    loss = torch.where(count > rows, torch.nan, sums[1])
    sums[1].copy_(loss)
    nothing = torch.empty(0, dtype=torch.float32, device=hidden.device)
    extrema = partial[:, -2:].amax(0) if rows else torch.full((2,), -torch.inf, device=hidden.device)
    return Terms(loss, nothing, None, sums, extrema), tables["unit_ptr"]

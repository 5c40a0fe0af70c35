"""Triton kernels that make tiles of logits and reduce them in registers: fp32 logits are never written to memory.

For a chunk of rows h [C, H] and a head W [V, H], `tile_statistics` computes each tile of h W^T and keeps of it, row by row,
the maximum, the two sums of :mod:`muonrl_kernels.loss_rows` and the target's logit; `combine_tiles` puts the tiles of a row
together and computes the row's loss terms; `tile_gradient` computes each tile again and writes its gradient in the dtype of
the gradient products. That is one more product than the row pass over logits in memory (8 N H V instead of 6).

Programs that run at the same time share columns of W, which is read from memory once. Rows are counted in int32, elements in
int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muonrl_kernels.loss_math import COLUMNS, store_metrics, token_terms
from muonrl_kernels.loss_rows import combine_statistics, transform

__all__ = ["combine_tiles", "tile_gradient", "tile_statistics"]


@triton.jit
def _product(
    h_source, w_source, top, left, rows, vocabulary, width,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """h[top:, :] W[left:, :]^T of one tile [BLOCK, BLOCK] in fp32, zero beyond the edges."""
    lanes = tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK_K)
    h_at = (top + lanes).to(tl.int64)[:, None] * width
    w_at = (left + lanes).to(tl.int64)[:, None] * width
    acc = tl.full((BLOCK, BLOCK), 0.0, dtype=tl.float32)
    for k in range(0, width, BLOCK_K):
        if USE_TMA:
            a = h_source.load([top, k])
            b = w_source.load([left, k])
        else:
            inner = k + depth[None, :]
            a = tl.load(
                h_source + h_at + inner, mask=((top + lanes)[:, None] < rows) & (inner < width), other=0.0
            )
            b = tl.load(
                w_source + w_at + inner,
                mask=((left + lanes)[:, None] < vocabulary) & (inner < width),
                other=0.0,
            )
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def _row_scale(temperature_ptr, temperature_stride, temperature, tokens, inside):
    """1 / temperature of each row of a tile [BLOCK, 1]."""
    if temperature_ptr is not None:
        t = tl.load(temperature_ptr + tokens * temperature_stride, mask=inside, other=1.0).to(tl.float32)
    else:
        t = tl.where(inside, temperature, 1.0)
    return (1.0 / t)[:, None]


@triton.jit
def _tile_logits(
    h_source, w_source, bias_ptr, temperature_ptr, temperature_stride, temperature, tokens, top, left, rows,
    vocabulary, width, scale, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """(z, columns, 1 / temperature) of one tile; z is -inf beyond the vocabulary, whatever the softcap."""
    lanes = tl.arange(0, BLOCK)
    columns = (left + lanes)[None, :]
    u = _product(h_source, w_source, top, left, rows, vocabulary, width, BLOCK, BLOCK_K, USE_TMA)
    if bias_ptr is not None:
        u += tl.load(bias_ptr + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)
    inverse = _row_scale(temperature_ptr, temperature_stride, temperature, tokens, top + lanes < rows)
    z = transform(u, scale, softcap, inverse, SOFTCAP)[0]
    return tl.where(columns < vocabulary, z, float("-inf")), columns, inverse


@triton.jit(do_not_specialize=["first", "rows", "temperature_stride"])
def tile_statistics(
    h_source, w_source, bias_ptr, temperature_ptr, index_ptr, valid_count_ptr, target_ptr, tile_ptr,
    first, rows, vocabulary, width, temperature_stride, temperature, scale, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Of each tile: row maxima, S and T without the target, and the target's logit (0 elsewhere): [4, rows, tiles].

    Rows are the tokens index_ptr[first + row]; a tile whose rows all lie beyond valid_count_ptr is left out.
    """
    bands = tl.cdiv(rows, BLOCK)
    tiles = tl.cdiv(vocabulary, BLOCK)
    top = tl.program_id(0) % bands * BLOCK
    tile = tl.program_id(0) // bands
    if first + top < tl.load(valid_count_ptr):
        row = top + tl.arange(0, BLOCK)
        inside = row < rows
        tokens = tl.load(index_ptr + first + row, mask=inside, other=0)
        target = tl.load(target_ptr + tokens, mask=inside, other=-1).to(tl.int32)
        z, columns, _inverse = _tile_logits(
            h_source, w_source, bias_ptr, temperature_ptr, temperature_stride, temperature, tokens, top,
            tile * BLOCK, rows, vocabulary, width, scale, softcap, SOFTCAP, BLOCK, BLOCK_K, USE_TMA,
        )  # fmt: skip
        is_target = columns == target[:, None]
        m = tl.max(z, axis=1)
        gap = z - tl.where(m == float("-inf"), 0.0, m)[:, None]
        e = tl.where(is_target, 0.0, tl.exp(gap))
        at = tile_ptr + row.to(tl.int64) * tiles + tile
        plane = rows.to(tl.int64) * tiles
        tl.store(at, m, mask=inside)
        tl.store(at + plane, tl.sum(e, axis=1), mask=inside)
        tl.store(at + 2 * plane, tl.sum(e * tl.where(e > 0.0, gap, 0.0), axis=1), mask=inside)
        tl.store(at + 3 * plane, tl.sum(tl.where(is_target, z, 0.0), axis=1), mask=inside)


@triton.jit
def _join(tile_ptr, plane, tiles, TILES: tl.constexpr):
    """(m, S, T) of a row from its tiles; tile_ptr points to the row in the first plane."""
    lanes = tl.arange(0, TILES)
    m = tl.full((TILES,), float("-inf"), dtype=tl.float32)
    for start in range(0, tiles, TILES):
        inside = start + lanes < tiles
        at = tile_ptr + start + lanes
        m = tl.maximum(m, tl.load(at, mask=inside, other=float("-inf")))
    peak = tl.max(m, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    others = tl.full((TILES,), 0.0, dtype=tl.float32)
    shifted = tl.full((TILES,), 0.0, dtype=tl.float32)
    for start in range(0, tiles, TILES):
        inside = start + lanes < tiles
        at = tile_ptr + start + lanes
        gap = tl.load(at, mask=inside, other=float("-inf")) - base
        fade = tl.exp(gap)
        s = tl.load(at + plane, mask=inside, other=0.0)
        others += fade * s
        shifted += fade * (
            tl.load(at + 2 * plane, mask=inside, other=0.0) + s * tl.where(fade > 0.0, gap, 0.0)
        )
    return peak, tl.sum(others, axis=0), tl.sum(shifted, axis=0)


@triton.jit(do_not_specialize=["first", "rows", "tiles"])
def combine_tiles(
    tile_ptr, index_ptr, valid_count_ptr, target_ptr, old_ptr, advantage_ptr, ref_ptr, w_ptr, w_log_ptr, cut_ptr,
    share_ptr, unit_ptr, partial_ptr, slope_ptr, first, rows, tiles, vocabulary, low, high, dual, beta, entropy_coef, limit,
    LOSS_TYPE: tl.constexpr, KL: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss terms of one row from its tiles, as `loss_rows` has them. Slopes: [5, rows] fp32: entropy, lse, 1 - p_y, d_logp and
    d_entropy, zero for a row beyond the valid ones. A target outside of the vocabulary gives NaN."""
    row = tl.program_id(0)
    number = first + row
    slopes = slope_ptr + row + tl.arange(0, 1)
    zero = tl.full((1,), 0.0, dtype=tl.float32)
    if number < tl.load(valid_count_ptr):
        one = tl.arange(0, 1)
        tile_row = tile_ptr + row.to(tl.int64) * tiles
        plane = rows.to(tl.int64) * tiles
        m, others, shifted = _join(tile_row, plane, tiles, TILES)
        at = tl.load(index_ptr + number) + one
        target = tl.load(target_ptr + at)
        known = (target >= 0) & (target < vocabulary)
        z_y = tl.load(tile_row + 3 * plane + target // BLOCK, mask=known, other=float("nan"))
        logp, entropy, lse, rest = combine_statistics(m + zero, others + zero, shifted + zero, z_y)
        valid = at >= 0
        old = logp
        if old_ptr is not None:
            old = tl.load(old_ptr + at)
        ref = logp
        if ref_ptr is not None:
            ref = tl.load(ref_ptr + at)
        w = tl.load(w_ptr + at)
        w_log = old * 0.0
        if w_log_ptr is not None:
            w_log = tl.load(w_log_ptr + at)
        unit = tl.load(unit_ptr)
        loss, d_logp, d_entropy, ratio, is_below, is_above, is_dual = token_terms(
            valid, logp, old, tl.load(advantage_ptr + at), ref, w, tl.load(share_ptr + at), entropy,
            low, high, dual, beta, entropy_coef, limit, LOSS_TYPE, KL,
        )  # fmt: skip
        store_metrics(
            partial_ptr + number.to(tl.int64) * COLUMNS, valid, valid == 0, loss, is_below, is_above, is_dual,
            tl.load(cut_ptr + at) != 0, ratio, w, logp - old, w_log, ref - logp, entropy, limit,
        )  # fmt: skip
        tl.store(slopes, entropy)
        tl.store(slopes + rows, lse)
        tl.store(slopes + 2 * rows, rest)
        tl.store(slopes + 3 * rows, d_logp / unit)
        tl.store(slopes + 4 * rows, d_entropy / unit)
    else:
        for plane in tl.static_range(5):
            tl.store(slopes + plane * rows, zero)


@triton.jit(do_not_specialize=["first", "rows", "temperature_stride"])
def tile_gradient(
    h_source, w_source, out_ptr, bias_ptr, temperature_ptr, index_ptr, valid_count_ptr, target_ptr, slope_ptr,
    first, rows, vocabulary, width, out_pitch, temperature_stride, temperature, scale, softcap,
    SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """Gradient with respect to h W^T + bias of each tile, to out [rows, out_pitch]; slopes as `combine_tiles` writes them."""
    bands = tl.cdiv(rows, BLOCK)
    top = tl.program_id(0) % bands * BLOCK
    left = tl.program_id(0) // bands * BLOCK
    row = top + tl.arange(0, BLOCK)
    inside = row < rows
    lanes = tl.arange(0, BLOCK)
    corner = out_ptr + top.to(tl.int64) * out_pitch + left
    at = corner + (
        lanes[:, None] * out_pitch + lanes[None, :]
    )  # 128 rows of up to 2^24 columns: int32 will do
    within = inside[:, None] & ((left + lanes)[None, :] < vocabulary)
    if first + top < tl.load(valid_count_ptr):
        tokens = tl.load(index_ptr + first + row, mask=inside, other=0)
        target = tl.load(target_ptr + tokens, mask=inside, other=-1).to(tl.int32)
        z, columns, inverse = _tile_logits(
            h_source, w_source, bias_ptr, temperature_ptr, temperature_stride, temperature, tokens, top, left, rows,
            vocabulary, width, scale, softcap, SOFTCAP, BLOCK, BLOCK_K, USE_TMA,
        )  # fmt: skip
        log_p = z - tl.load(slope_ptr + rows + row, mask=inside, other=0.0)[:, None]
        p = tl.exp(log_p)
        rest = tl.load(slope_ptr + 2 * rows + row, mask=inside, other=0.0)[:, None]
        d_logp = tl.load(slope_ptr + 3 * rows + row, mask=inside, other=0.0)[:, None]
        moving = d_logp != 0.0
        dz = tl.where(columns == target[:, None], d_logp * rest, -d_logp * p)
        if WITH_ENTROPY:
            entropy = tl.load(slope_ptr + row, mask=inside, other=0.0)[:, None]
            d_entropy = tl.load(slope_ptr + 4 * rows + row, mask=inside, other=0.0)[:, None]
            dz -= d_entropy * p * (entropy + tl.where(p > 0.0, log_p, 0.0))
            moving = moving | (d_entropy != 0.0)
        if SOFTCAP:
            bent = tl.where(p > 0.0, z, 0.0) / (softcap * inverse)
            dz = dz * (1.0 - bent * bent)
        dz = tl.where(moving, dz * (scale * inverse), 0.0)  # masked rows' temperature may be anything
        tl.store(at, dz.to(out_ptr.dtype.element_ty), mask=within)
    else:
        nothing = tl.full((BLOCK, BLOCK), 0.0, dtype=tl.float32)
        tl.store(at, nothing.to(out_ptr.dtype.element_ty), mask=within)

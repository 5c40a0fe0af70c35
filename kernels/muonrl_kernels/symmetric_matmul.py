"""Triton kernels of the Newton-Schulz iteration: symmetric products on one triangle, and the product with the iterate.

Panels are the one layout of the workspace: a matrix [m, n] is zero-padded to multiples of BLOCK and stored as column panels
of BLOCK columns, each panel contiguous [m_pad, BLOCK]. All panels of all matrices that share the short side m lie one below
the other, so

- one two-dimensional descriptor (or pointer) reaches every matrix of a launch, whatever its long side;
- no load in these kernels needs a mask: padding is zero and stays zero;
- a tile of a symmetric m x m matrix is BLOCK x BLOCK and fills the width of its panel.

Rows are counted in int32, elements in int64: a workspace may exceed 2^31 elements.

One source serves every target: with USE_TMA the operands arrive as tensor descriptors (Hopper, Blackwell), else as pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muonrl_kernels.update_tile import update_tile

__all__ = ["panel_product", "symmetric_product"]


@triton.jit(do_not_specialize=["matrices"])
def symmetric_product(
    a_source,
    b_source,
    a_ptr,
    b_ptr,
    out_ptr,
    starts_ptr,
    counts_ptr,
    scale_ptr,
    alpha,
    beta,
    gamma,
    matrices,
    m_pad,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD_OPERANDS: tl.constexpr,
    RAGGED: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """For each matrix a symmetric OUT, of which the lower triangle of tiles is computed and mirrored on storing.

    With RAGGED OUT = alpha scale[b] X X^T, where A = B = X and matrix b has counts[b] panels from panel starts[b]. Otherwise
    OUT = alpha A B + beta A + gamma B for symmetric m x m matrices that commute. They do so but for rounding errors, and
    taking B^T for B, which would suit the hardware, makes these errors add up instead of cancelling: the Gram form's
    result is then off by twice as much.

    Persistent: a program takes every num_programs-th tile; tiles of one row of blocks follow each other.
    """
    blocks = m_pad // BLOCK
    per_matrix = blocks * (blocks + 1) // 2
    SPLIT: tl.constexpr = BLOCK // BLOCK_K
    for tile in range(tl.program_id(0), matrices * per_matrix, tl.num_programs(0)):
        matrix = tile // per_matrix
        t = tile % per_matrix
        i = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > t, i - 1, i)  # the root may be off by one
        i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
        j = t - i * (i + 1) // 2
        if RAGGED:
            start = tl.load(starts_ptr + matrix)
            steps = tl.load(counts_ptr + matrix) * SPLIT
        else:
            start = matrix * blocks
            steps = blocks * SPLIT
        rows = tl.arange(0, BLOCK)
        depth = tl.arange(0, BLOCK_K)
        columns = tl.arange(0, BLOCK)
        acc = tl.full((BLOCK, BLOCK), 0.0, dtype=tl.float32)
        for k in range(steps):
            top = (start + k // SPLIT) * m_pad
            at = (k % SPLIT) * BLOCK_K
            a_row = top + i * BLOCK
            inner = rows[:, None] * BLOCK + depth[None, :]
            if USE_TMA:
                a = a_source.load([a_row, at])
            else:
                a = tl.load(a_source + (a_row.to(tl.int64) * BLOCK + at) + inner)
            if RAGGED:
                b_row = top + j * BLOCK
                if USE_TMA:
                    b = tl.trans(b_source.load([b_row, at]))
                else:
                    b = tl.trans(tl.load(b_source + (b_row.to(tl.int64) * BLOCK + at) + inner))
            else:
                b_row = (start + j) * m_pad + k * BLOCK_K
                if USE_TMA:
                    b = b_source.load([b_row, 0])
                else:
                    b = tl.load(
                        b_source + b_row.to(tl.int64) * BLOCK + depth[:, None] * BLOCK + columns[None, :]
                    )
            acc = tl.dot(a, b, acc)
        scale = alpha
        if RAGGED:
            scale = alpha * tl.load(scale_ptr + matrix)
        acc = acc * scale
        within = rows[:, None] * BLOCK + columns[None, :]
        place = ((matrix * blocks + j) * m_pad + i * BLOCK).to(tl.int64) * BLOCK
        if ADD_OPERANDS:
            acc += beta * tl.load(a_ptr + place + within).to(tl.float32)
            acc += gamma * tl.load(b_ptr + place + within).to(tl.float32)
        result = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place + within, result)
        if i != j:
            mirror = ((matrix * blocks + i) * m_pad + j * BLOCK).to(tl.int64) * BLOCK
            tl.store(out_ptr + mirror + within, tl.trans(result))


@triton.jit(do_not_specialize=["panels"])
def panel_product(
    p_source,
    x_source,
    x_ptr,
    out_ptr,
    owners_ptr,
    starts_ptr,
    scale_ptr,
    shift,
    panels,
    m_pad,
    weight_ptr,
    stride_ptr,
    size_ptr,
    finite_ptr,
    ratio_ptr,
    hyper_ptr,
    key_ptr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """scale[b] (shift X + P X) for symmetric P: to panels (MODE "panels"), or fused with what `update_tile` does.

    The fused product never stores the orthogonalized matrix: its epilogue reads and writes the weights. Consecutive tiles
    belong to one panel, whose columns of X then stay in cache.
    """
    blocks = m_pad // BLOCK
    SPLIT: tl.constexpr = BLOCK // BLOCK_K
    for tile in range(tl.program_id(0), panels * blocks, tl.num_programs(0)):
        panel = tile // blocks
        i = tile % blocks
        matrix = tl.load(owners_ptr + panel)
        rows = tl.arange(0, BLOCK)
        depth = tl.arange(0, BLOCK_K)
        columns = tl.arange(0, BLOCK)
        acc = tl.full((BLOCK, BLOCK), 0.0, dtype=tl.float32)
        for k in range(blocks * SPLIT):
            p_row = (matrix * blocks + k // SPLIT) * m_pad + i * BLOCK
            x_row = panel * m_pad + k * BLOCK_K
            at = (k % SPLIT) * BLOCK_K
            if USE_TMA:
                p = p_source.load([p_row, at])
                x = x_source.load([x_row, 0])
            else:
                p = tl.load(
                    p_source + (p_row.to(tl.int64) * BLOCK + at) + rows[:, None] * BLOCK + depth[None, :]
                )
                x = tl.load(x_source + x_row.to(tl.int64) * BLOCK + depth[:, None] * BLOCK + columns[None, :])
            acc = tl.dot(p, x, acc)
        within = rows[:, None] * BLOCK + columns[None, :]
        place = (panel * m_pad + i * BLOCK).to(tl.int64) * BLOCK
        acc += shift * tl.load(x_ptr + place + within).to(tl.float32)
        acc *= tl.load(scale_ptr + matrix)
        if MODE == "panels":
            tl.store(out_ptr + place + within, acc.to(out_ptr.dtype.element_ty))
        else:
            column = (panel - tl.load(starts_ptr + matrix)) * BLOCK
            update_tile(
                acc,
                matrix,
                i * BLOCK,
                column,
                weight_ptr,
                stride_ptr,
                size_ptr,
                finite_ptr,
                ratio_ptr,
                hyper_ptr,
                key_ptr,
                BLOCK,
                BLOCK,
                MODE,
                WEIGHT_DTYPE,
                ALIGNED,
                WIDE,
                CAUTIOUS,
                STOCHASTIC,
            )

"""Triton kernel: the whole Gram iteration of one small matrix (short side up to 128) in one program.

Launching 17 products for a 64 x 192 matrix would take far longer than the products. Here one program does them all; R, Z, P
and half-finished products lie in a scratch of four m x m matrices that never leaves the cache (in registers they would spill
at m = 128), and X is read from its panels once a phase.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muonrl_kernels.update_tile import update_tile

__all__ = ["small_newton_schulz"]


@triton.jit
def _gram(first, count, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """X X^T [SIDE, SIDE] in fp32; `first` points to the elements of the matrix's first panel."""
    acc = tl.full((SIDE, SIDE), 0.0, dtype=tl.float32)
    for _ in range(count):
        x = tl.load(first)
        acc = tl.dot(x, tl.trans(x), acc)
        first += SIDE * COLUMNS
    return acc


@triton.jit
def _restart(first, p_ptr, count, shift, factor, SIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """X <- factor (shift I + P) X in place; returns the new X X^T in fp32."""
    dtype: tl.constexpr = first.dtype.element_ty
    acc = tl.full((SIDE, SIDE), 0.0, dtype=tl.float32)
    for _ in range(count):
        x = tl.load(first)
        y = tl.dot(tl.load(p_ptr), x)
        y = ((y + shift * x.to(tl.float32)) * factor).to(dtype)
        tl.store(first, y)
        acc = tl.dot(y, tl.trans(y), acc)
        first += SIDE * COLUMNS
    return acc


@triton.jit
def _accumulate(r_ptr, z_ptr, p_ptr, a, b, c, shift, fresh):
    """Z = b R + c R^2 and P <- (a I + Z)(shift I + P) without its multiple of I; P counts as 0 if `fresh` is 0."""
    tl.debug_barrier()  # what other threads stored to the scratch is read below
    r = tl.load(r_ptr)
    z = tl.dot(r, r) * c + b * r.to(tl.float32)
    tl.store(z_ptr, z.to(r_ptr.dtype.element_ty))
    tl.debug_barrier()
    if fresh == 0.0:
        tl.store(p_ptr, tl.load(z_ptr))
    else:
        p = tl.dot(tl.load(z_ptr), tl.load(p_ptr))
        p += a * tl.load(p_ptr).to(tl.float32) + shift * tl.load(z_ptr).to(tl.float32)
        tl.debug_barrier()  # all have read P
        tl.store(p_ptr, p.to(p_ptr.dtype.element_ty))


@triton.jit
def _advance_gram(r_ptr, z_ptr, half_ptr, a):
    """R <- R (a I + Z)^2."""
    half = tl.dot(tl.load(r_ptr), tl.load(z_ptr))
    half += a * tl.load(r_ptr).to(tl.float32)
    tl.store(half_ptr, half.to(half_ptr.dtype.element_ty))
    tl.debug_barrier()
    new = tl.dot(tl.load(half_ptr), tl.load(z_ptr))
    new += a * tl.load(half_ptr).to(tl.float32)
    tl.store(r_ptr, new.to(r_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["steps", "schatten4"])
def small_newton_schulz(
    x_ptr,
    scratch_ptr,
    starts_ptr,
    counts_ptr,
    first_gain_ptr,
    later_gain_ptr,
    steps_ptr,
    steps,
    schatten4,
    weight_ptr,
    stride_ptr,
    size_ptr,
    finite_ptr,
    ratio_ptr,
    hyper_ptr,
    key_ptr,
    SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Gram form with restarts; the last product goes through `update_tile`.

    x: panels [SIDE, COLUMNS], overwritten at restarts; gains: what the first and the later iterates are multiplied by.
    steps: [steps, 4] rows (a, b, c, whether R is recomputed or the iteration ends after this step), run-time values.
    """
    matrix = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    start = tl.load(starts_ptr + matrix)
    count = tl.load(counts_ptr + matrix)
    gain = tl.load(first_gain_ptr + matrix)
    later_gain = tl.load(later_gain_ptr + matrix)
    rows = tl.arange(0, SIDE)
    rows_across = tl.arange(0, SIDE)
    columns = tl.arange(0, COLUMNS)
    within = rows[:, None] * COLUMNS + columns[None, :]
    first = x_ptr + start.to(tl.int64) * (SIDE * COLUMNS) + within
    acc = _gram(first, count, SIDE, COLUMNS) / (gain * gain)
    if schatten4 != 0:
        norm = tl.sqrt(tl.sum(acc * acc))  # at once: axis by axis Triton 3.6 fails to compile on sm_100
        norm = tl.where(norm > 0.0, norm, 1.0)
        acc = acc / norm
        gain = gain * tl.sqrt(norm)
    square_tile = rows[:, None] * SIDE + rows_across[None, :]
    r_ptr = scratch_ptr + matrix.to(tl.int64) * (4 * SIDE * SIDE) + square_tile
    z_ptr = r_ptr + SIDE * SIDE
    p_ptr = z_ptr + SIDE * SIDE
    half_ptr = p_ptr + SIDE * SIDE
    tl.store(r_ptr, acc.to(dtype))
    shift = 1.0
    fresh = 0.0  # 0 until P holds something since the last restart
    for step in range(steps):
        a = tl.load(steps_ptr + 4 * step)
        b = tl.load(steps_ptr + 4 * step + 1)
        c = tl.load(steps_ptr + 4 * step + 2)
        ends = tl.load(steps_ptr + 4 * step + 3) != 0.0
        _accumulate(r_ptr, z_ptr, p_ptr, a, b, c, shift, fresh)
        fresh = 1.0
        shift *= a
        if ends:
            if step + 1 < steps:
                tl.debug_barrier()
                acc = _restart(first, p_ptr, count, shift, later_gain / gain, SIDE, COLUMNS)
                gain = later_gain
                tl.store(r_ptr, (acc / (gain * gain)).to(dtype))
                shift = 1.0
                fresh = 0.0
        else:
            _advance_gram(r_ptr, z_ptr, half_ptr, a)
    tl.debug_barrier()
    for panel in range(count):
        x = tl.load(first)
        first += SIDE * COLUMNS
        o = (shift * x.to(tl.float32) + tl.dot(tl.load(p_ptr), x)) / gain
        update_tile(
            o,
            matrix,
            0,
            panel * COLUMNS,
            weight_ptr,
            stride_ptr,
            size_ptr,
            finite_ptr,
            ratio_ptr,
            hyper_ptr,
            key_ptr,
            SIDE,
            COLUMNS,
            MODE,
            WEIGHT_DTYPE,
            ALIGNED,
            WIDE,
            CAUTIOUS,
            STOCHASTIC,
        )

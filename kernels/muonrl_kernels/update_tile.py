"""What happens to a tile of the orthogonalized matrix: the epilogue of several kernels, and a kernel of its own."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_pitch", "two_sides", "update_panels", "update_tile"]


@triton.jit
def update_tile(
    o,
    matrix,
    short_at,
    long_at,
    weight_ptr,
    stride_ptr,
    size_ptr,
    finite_ptr,
    ratio_ptr,
    hyper_ptr,
    key_ptr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """W <- (1 - lr wd) W - lr ratio O (MODE "update"), or W <- O (MODE "write"), for one fp32 tile [SHORT, LONG] of O.

    `short_at` and `long_at` are where the tile begins along the short and the long side of the matrix. Tables by matrix:
    weight_ptr holds addresses, stride_ptr the distance between memory rows (negative: the long side runs along memory
    rows, so the tile is transposed before it is stored), size_ptr the two sides, finite_ptr whether the gradient was finite
    (the update is left out where it was not), ratio_ptr the factor on the learning rate. hyper_ptr holds lr and 1 - lr wd, so
    that no schedule compiles anything. ALIGNED: addresses are multiples of 16 bytes, strides and sides of 8. WIDE: strides are
    so large that a tile spans more than 2^31 elements. CAUTIOUS decays only where update and weight agree in sign.
    STOCHASTIC rounds to bfloat16 or float16 with the noise of `muonrl_kernels.rounding`, whose two keys by matrix are in
    key_ptr; elements are numbered in the order of memory, row by row.
    """
    n_short, n_long = two_sides(size_ptr, matrix, ALIGNED)
    base, pitch, turned = row_pitch(weight_ptr, stride_ptr, matrix, WEIGHT_DTYPE, ALIGNED, WIDE)
    short = tl.arange(0, SHORT)
    long = tl.arange(0, LONG)
    if turned:
        corner = base + long_at * tl.load(stride_ptr + matrix) * -1 + short_at
        within = (long[:, None] < n_long - long_at) & (short[None, :] < n_short - short_at)
        number = (long_at + long[:, None]) * n_short + (short_at + short[None, :])
        _write(
            tl.trans(o), corner + (long[:, None] * pitch + short[None, :]), number, within, matrix,
            finite_ptr, ratio_ptr, hyper_ptr, key_ptr, MODE, WEIGHT_DTYPE, CAUTIOUS, STOCHASTIC,
        )  # fmt: skip
    else:
        start = base + short_at * tl.load(stride_ptr + matrix) + long_at
        inside = (short[:, None] < n_short - short_at) & (long[None, :] < n_long - long_at)
        count = (short_at + short[:, None]) * n_long + (long_at + long[None, :])
        _write(
            o, start + (short[:, None] * pitch + long[None, :]), count, inside, matrix,
            finite_ptr, ratio_ptr, hyper_ptr, key_ptr, MODE, WEIGHT_DTYPE, CAUTIOUS, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def two_sides(size_ptr, matrix, ALIGNED: tl.constexpr):
    """(short, long) side of a matrix. That both are multiples of 8 lets masked accesses be 16 bytes wide."""
    n_short = tl.load(size_ptr + 2 * matrix)
    n_long = tl.load(size_ptr + 2 * matrix + 1)
    if ALIGNED:
        n_short = tl.multiple_of(n_short, 8)
        n_long = tl.multiple_of(n_long, 8)
    return n_short, n_long


@triton.jit
def row_pitch(
    address_ptr, stride_ptr, matrix, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr
):
    """(pointer to a matrix, distance between its memory rows, whether the long side runs along memory rows).

    The distance is an int32, which halves the registers that addresses take, unless WIDE.
    """
    base = tl.load(address_ptr + matrix).to(tl.pointer_type(DTYPE))
    stride = tl.load(stride_ptr + matrix)
    turned = stride < 0
    pitch = tl.abs(stride)
    if not WIDE:
        pitch = pitch.to(tl.int32)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        pitch = tl.multiple_of(pitch, 8)
    return base, pitch, turned


@triton.jit
def _write(
    o,
    places,
    number,
    inside,
    matrix,
    finite_ptr,
    ratio_ptr,
    hyper_ptr,
    key_ptr,
    MODE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    if MODE == "write":
        tl.store(places, o.to(WEIGHT_DTYPE), mask=inside)
    else:
        if tl.load(finite_ptr + matrix) != 0:
            w = tl.load(places, mask=inside, other=0.0).to(tl.float32)
            decay = tl.load(hyper_ptr + 1)
            kept = w * decay
            if CAUTIOUS:
                kept = tl.where(o * w >= 0.0, kept, w)
            new = kept - (tl.load(hyper_ptr) * tl.load(ratio_ptr + matrix)) * o
            if STOCHASTIC:
                x = number.to(tl.uint32) ^ tl.load(key_ptr + 2 * matrix).to(tl.uint32, bitcast=True)
                x = (x ^ (x >> 16)) * 0x7FEB352D
                x = x ^ tl.load(key_ptr + 2 * matrix + 1).to(tl.uint32, bitcast=True)
                x = (x ^ (x >> 15)) * 0x846CA68B
                x = x ^ (x >> 16)
                if WEIGHT_DTYPE == tl.bfloat16:
                    # bf16 is the upper half of fp32: add noise below it, then cut.
                    bits = new.to(tl.uint32, bitcast=True) + (x & 0xFFFF)
                    new = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
                else:
                    # Count in units of the last place, which stop shrinking at the subnormal numbers, and floor.
                    exponent = tl.maximum((new.to(tl.int32, bitcast=True) >> 23) & 0xFF, 113)
                    unit = ((exponent - 10) << 23).to(tl.float32, bitcast=True)
                    per_unit = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
                    new = tl.floor(new * per_unit + (x & 0x1FFF).to(tl.float32) * 0.0001220703125) * unit
            tl.store(places, new.to(WEIGHT_DTYPE), mask=inside)


@triton.jit(do_not_specialize=["bands"])
def update_panels(
    o_ptr,
    owners_ptr,
    starts_ptr,
    bands,
    weight_ptr,
    stride_ptr,
    size_ptr,
    finite_ptr,
    ratio_ptr,
    hyper_ptr,
    key_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """`update_tile` from orthogonalized matrices in panels, where fusing it with the last product would spill registers.

    Program = panel * bands + band of ROWS rows.
    """
    program = tl.program_id(0)
    panel = program // bands
    matrix = tl.load(owners_ptr + panel)
    rows = program * ROWS + tl.arange(0, ROWS)
    place = rows[:, None].to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    update_tile(
        tl.load(o_ptr + place).to(tl.float32),
        matrix,
        (program % bands) * ROWS,
        (panel - tl.load(starts_ptr + matrix)) * COLUMNS,
        weight_ptr,
        stride_ptr,
        size_ptr,
        finite_ptr,
        ratio_ptr,
        hyper_ptr,
        key_ptr,
        ROWS,
        COLUMNS,
        MODE,
        WEIGHT_DTYPE,
        ALIGNED,
        WIDE,
        CAUTIOUS,
        STOCHASTIC,
    )

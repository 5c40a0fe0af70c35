"""The epilogue that the kernels share: what happens to a tile of the orthogonalized matrix."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["update_tile"]


@triton.jit
def update_tile(
    o,
    matrix,
    short,
    long,
    weight_ptr,
    stride_ptr,
    size_ptr,
    finite_ptr,
    ratio_ptr,
    hyper_ptr,
    key_ptr,
    MODE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """W <- (1 - lr wd) W - lr ratio O (MODE "update"), or W <- O (MODE "write"), for one fp32 tile of O.

    `short` and `long` are the tile's indices along the short and the long side of the matrix. Tables by matrix: weight_ptr
    holds addresses, stride_ptr the distance between memory rows (negative: the long side runs along memory rows, so the
    tile is transposed before it is stored), size_ptr the two sides, finite_ptr whether the gradient was finite (the update
    is left out where it was not), ratio_ptr the factor on the learning rate. hyper_ptr holds lr and 1 - lr wd, so that no
    schedule compiles anything. CAUTIOUS decays only where update and weight agree in sign. STOCHASTIC rounds to bfloat16 or
    float16 with the noise of `muonrl_kernels.rounding`, whose two keys by matrix are in key_ptr; elements are numbered in
    the order of memory, row by row.
    """
    stride = tl.load(stride_ptr + matrix)
    n_short = tl.load(size_ptr + 2 * matrix)
    n_long = tl.load(size_ptr + 2 * matrix + 1)
    weight = tl.load(weight_ptr + matrix).to(tl.pointer_type(WEIGHT_DTYPE))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        stride = tl.multiple_of(stride, 8)
    if stride < 0:
        turned = long[:, None].to(tl.int64) * (-stride) + short[None, :]
        within = (long[:, None] < n_long) & (short[None, :] < n_short)
        number = long[:, None] * n_short + short[None, :]
        _write(
            tl.trans(o), weight + turned, number, within, matrix, finite_ptr, ratio_ptr, hyper_ptr, key_ptr,
            MODE, WEIGHT_DTYPE, CAUTIOUS, STOCHASTIC,
        )  # fmt: skip
    else:
        offsets = short[:, None].to(tl.int64) * stride + long[None, :]
        inside = (short[:, None] < n_short) & (long[None, :] < n_long)
        count = short[:, None] * n_long + long[None, :]
        _write(
            o, weight + offsets, count, inside, matrix, finite_ptr, ratio_ptr, hyper_ptr, key_ptr,
            MODE, WEIGHT_DTYPE, CAUTIOUS, STOCHASTIC,
        )  # fmt: skip


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

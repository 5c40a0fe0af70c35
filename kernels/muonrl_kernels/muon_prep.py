"""Triton kernels from gradient and momentum to the first iterate: many matrices of one short side in one launch.

Three launches, each deterministic: `matrix_norms` reads gradient and momentum tile by tile, `matrix_scales` adds up one matrix
per program, `write_iterate` advances the momentum and writes the iterate with entries of root mean square near 1. The momentum
is only written once it is known that the whole gradient is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muonrl_kernels.update_tile import row_pitch, two_sides

__all__ = ["matrix_norms", "matrix_scales", "write_iterate"]


@triton.jit
def _load_tile(
    address_ptr,
    stride_ptr,
    matrix,
    short_at,
    long_at,
    n_short,
    n_long,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile [ROWS, COLUMNS] of a matrix in its own layout, as fp32; zero outside. See `update_tile` for the tables."""
    base, pitch, turned = row_pitch(address_ptr, stride_ptr, matrix, DTYPE, ALIGNED, WIDE)
    stride = tl.load(stride_ptr + matrix)
    short = tl.arange(0, ROWS)
    long = tl.arange(0, COLUMNS)
    if turned:
        within = (long[:, None] < n_long - long_at) & (short[None, :] < n_short - short_at)
        corner = base - long_at * stride + short_at
        tile = tl.trans(tl.load(corner + (long[:, None] * pitch + short[None, :]), mask=within, other=0.0))
    else:
        inside = (short[:, None] < n_short - short_at) & (long[None, :] < n_long - long_at)
        start = base + short_at * stride + long_at
        tile = tl.load(start + (short[:, None] * pitch + long[None, :]), mask=inside, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _store_tile(
    tile,
    address_ptr,
    stride_ptr,
    matrix,
    short_at,
    long_at,
    n_short,
    n_long,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The inverse of `_load_tile`."""
    base, pitch, turned = row_pitch(address_ptr, stride_ptr, matrix, DTYPE, ALIGNED, WIDE)
    stride = tl.load(stride_ptr + matrix)
    short = tl.arange(0, ROWS)
    long = tl.arange(0, COLUMNS)
    if turned:
        within = (long[:, None] < n_long - long_at) & (short[None, :] < n_short - short_at)
        corner = base - long_at * stride + short_at
        tl.store(corner + (long[:, None] * pitch + short[None, :]), tl.trans(tile).to(DTYPE), mask=within)
    else:
        inside = (short[:, None] < n_short - short_at) & (long[None, :] < n_long - long_at)
        start = base + short_at * stride + long_at
        tl.store(start + (short[:, None] * pitch + long[None, :]), tile.to(DTYPE), mask=inside)


@triton.jit
def _advance(grad, momentum, mu, STYLE: tl.constexpr, NESTEROV: tl.constexpr):
    """(new momentum, what is orthogonalized): M + (1 - mu)(G - M) ("ema") or mu M + G ("sum"); Nesterov looks ahead."""
    if STYLE == "none":
        return grad, grad
    if STYLE == "ema":
        new = momentum + (1.0 - mu) * (grad - momentum)
        if NESTEROV:
            return new, grad + mu * (new - grad)
        return new, new
    new = mu * momentum + grad
    if NESTEROV:
        return new, grad + mu * new
    return new, new


@triton.jit(do_not_specialize=["bands"])
def matrix_norms(
    grad_ptr,
    grad_stride_ptr,
    momentum_ptr,
    momentum_stride_ptr,
    size_ptr,
    owners_ptr,
    starts_ptr,
    peak_ptr,
    square_ptr,
    mu_ptr,
    bands,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    MOMENTUM_DTYPE: tl.constexpr,
    STYLE: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """For each tile: a power of two near its largest entry, and the sum of squares in units of its square.

    Program = panel * bands + band, where a panel has COLUMNS columns and a band ROWS rows of the short side. The sum is NaN
    where the gradient is not finite. No square overflows or vanishes, whatever the scale of the gradient.
    """
    program = tl.program_id(0)
    panel = program // bands
    matrix = tl.load(owners_ptr + panel)
    n_short, n_long = two_sides(size_ptr, matrix, ALIGNED)
    short_at = (program % bands) * ROWS
    long_at = (panel - tl.load(starts_ptr + matrix)) * COLUMNS
    grad = _load_tile(
        grad_ptr, grad_stride_ptr, matrix, short_at, long_at, n_short, n_long,
        ROWS, COLUMNS, GRAD_DTYPE, ALIGNED, WIDE,
    )  # fmt: skip
    momentum = grad
    if STYLE != "none":
        momentum = _load_tile(
            momentum_ptr, momentum_stride_ptr, matrix, short_at, long_at, n_short, n_long,
            ROWS, COLUMNS, MOMENTUM_DTYPE, ALIGNED, WIDE,
        )  # fmt: skip
    _, u = _advance(grad, momentum, tl.load(mu_ptr), STYLE, NESTEROV)
    peak = tl.max(tl.max(tl.abs(u), axis=1), axis=0)
    # The exponent bits alone are the power of two below the peak; 2^(254 - e) is its reciprocal, both kept normal.
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23), 253 << 23)
    power = exponent.to(tl.float32, bitcast=True)
    reciprocal = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    scaled = u * reciprocal
    square = tl.sum(tl.sum(scaled * scaled, axis=1), axis=0)
    # x - x is NaN for infinities and NaN, and 0 otherwise.
    doubt = tl.sum(tl.sum(grad - grad, axis=1), axis=0)
    tl.store(peak_ptr + program, power)
    tl.store(square_ptr + program, square + doubt)


@triton.jit(do_not_specialize=["bands"])
def matrix_scales(
    peak_ptr,
    square_ptr,
    starts_ptr,
    counts_ptr,
    gain_ptr,
    scale_ptr,
    finite_ptr,
    eps,
    bands,
    CHUNK: tl.constexpr,
):
    """Per matrix: scales (2^-e, gain / norm of the gradient times 2^-e; NaN if that is not finite), and whether it is.

    One program adds the tiles of one matrix in a fixed order, so the sum does not depend on the launch.
    """
    matrix = tl.program_id(0)
    first = tl.load(starts_ptr + matrix) * bands
    tiles = tl.load(counts_ptr + matrix) * bands
    lanes = tl.arange(0, CHUNK)
    peaks = tl.full((CHUNK,), 0.0, dtype=tl.float32)
    for at in range(0, tiles, CHUNK):
        peaks = tl.maximum(peaks, tl.load(peak_ptr + first + at + lanes, mask=at + lanes < tiles, other=0.0))
    power = tl.max(peaks, axis=0)
    reciprocal = ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    sums = tl.full((CHUNK,), 0.0, dtype=tl.float32)
    for at in range(0, tiles, CHUNK):
        inside = at + lanes < tiles
        relative = tl.load(peak_ptr + first + at + lanes, mask=inside, other=0.0) * reciprocal
        sums += tl.load(square_ptr + first + at + lanes, mask=inside, other=0.0) * relative * relative
    norm = tl.sqrt(tl.sum(sums, axis=0))
    finite = norm - norm == 0.0
    factor = tl.load(gain_ptr + matrix) / tl.maximum(norm, eps)
    tl.store(scale_ptr + 2 * matrix, reciprocal)
    tl.store(scale_ptr + 2 * matrix + 1, tl.where(finite, factor, float("nan")))
    tl.store(finite_ptr + matrix, finite.to(tl.int32))


@triton.jit(do_not_specialize=["bands"])
def write_iterate(
    grad_ptr,
    grad_stride_ptr,
    momentum_ptr,
    momentum_stride_ptr,
    size_ptr,
    owners_ptr,
    starts_ptr,
    scale_ptr,
    finite_ptr,
    out_ptr,
    mu_ptr,
    bands,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    MOMENTUM_DTYPE: tl.constexpr,
    STYLE: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Advance the momentum of matrices with a finite gradient, and write all iterates to zero-padded panels.

    A matrix with a non-finite gradient becomes NaN (STYLE "none", the function) or zero, its momentum untouched (optimizer).
    """
    program = tl.program_id(0)
    panel = program // bands
    matrix = tl.load(owners_ptr + panel)
    n_short, n_long = two_sides(size_ptr, matrix, ALIGNED)
    short_at = (program % bands) * ROWS
    long_at = (panel - tl.load(starts_ptr + matrix)) * COLUMNS
    grad = _load_tile(
        grad_ptr, grad_stride_ptr, matrix, short_at, long_at, n_short, n_long,
        ROWS, COLUMNS, GRAD_DTYPE, ALIGNED, WIDE,
    )  # fmt: skip
    momentum = grad
    if STYLE != "none":
        momentum = _load_tile(
            momentum_ptr, momentum_stride_ptr, matrix, short_at, long_at, n_short, n_long,
            ROWS, COLUMNS, MOMENTUM_DTYPE, ALIGNED, WIDE,
        )  # fmt: skip
    new, u = _advance(grad, momentum, tl.load(mu_ptr), STYLE, NESTEROV)
    x = u * tl.load(scale_ptr + 2 * matrix) * tl.load(scale_ptr + 2 * matrix + 1)
    if STYLE != "none":
        finite = tl.load(finite_ptr + matrix) != 0
        x = tl.where(finite, x, 0.0)
        if finite:
            _store_tile(
                new, momentum_ptr, momentum_stride_ptr, matrix, short_at, long_at, n_short, n_long,
                ROWS, COLUMNS, MOMENTUM_DTYPE, ALIGNED, WIDE,
            )  # fmt: skip
    rows = program * ROWS + tl.arange(0, ROWS)
    place = rows[:, None].to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty))

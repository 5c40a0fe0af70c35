"""Triton kernels of the row pass: one program turns one row of fp32 logits into its statistics, loss and gradient.

A first sweep over the row keeps a running maximum m (from -inf), S = sum e^(z - m) and T = sum e^(z - m) (z - m), both without
the target's term e_y = e^(z_y - m). From these

    lse = m + log(S + e_y)    log p_y = z_y - lse = -log(1 + S / e_y)    1 - p_y = S / (S + e_y)
    H = log(S + e_y) - (T + e_y (z_y - m)) / (S + e_y)

so that rows which are certain of their target keep every digit of log p_y and of 1 - p_y, which is all of their gradient. The
second sweep writes the gradient with respect to h W^T + bias over the logits themselves: in fp32 in place, in a 16-bit dtype to
the front half of the row. Rows are counted in int32, elements in int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muonrl_kernels.loss_math import COLUMNS, log1p, store_metrics, tanh, token_terms

__all__ = ["combine_statistics", "logit_gradient", "logprob_rows", "loss_rows", "transform"]


@triton.jit
def transform(u, scale, softcap, inverse_temperature, SOFTCAP: tl.constexpr):
    """(z, dz/du without the factor scale / temperature) of u = h W^T + bias."""
    z = u * scale
    slope = tl.full(z.shape, 1.0, dtype=tl.float32)
    if SOFTCAP:
        bent = tanh(z / softcap)
        z = softcap * bent
        slope = 1.0 - bent * bent
    return z * inverse_temperature, slope


@triton.jit
def _logits(
    row_ptr, bias_ptr, columns, vocabulary, scale, softcap, inverse_temperature, SOFTCAP: tl.constexpr
):
    """(z, slope) of some columns of a row; columns beyond the vocabulary are -inf, whatever the softcap."""
    inside = columns < vocabulary
    u = tl.load(row_ptr + columns, mask=inside, other=0.0)
    if bias_ptr is not None:
        u += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    z, slope = transform(u, scale, softcap, inverse_temperature, SOFTCAP)
    return tl.where(inside, z, float("-inf")), slope


@triton.jit
def combine_statistics(m, others, shifted, z_y):
    """(logp, entropy, lse, 1 - p_y) from m, S, T (both without the target) and the target's logit."""
    gap = z_y - m
    e_y = tl.exp(gap)
    total = others + e_y
    shifted += e_y * tl.where(e_y > 0.0, gap, 0.0)
    log_total = tl.where(e_y >= 1.0, log1p(others), tl.log(total))
    near = e_y > others
    logp = tl.where(near, -log1p(others / tl.where(near, e_y, 1.0)), gap - tl.log(total))
    return logp, log_total - shifted / total, m + log_total, others / total


@triton.jit
def _statistics(
    row_ptr,
    bias_ptr,
    target,
    vocabulary,
    scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First sweep: (logp, entropy, lse, 1 - p_y) of a row, blocks of one element. A target that does not exist gives NaN."""
    one = tl.arange(0, 1)
    place = target + one
    known = (place >= 0) & (place < vocabulary)
    u_y = tl.load(row_ptr + place, mask=known, other=float("nan"))
    if bias_ptr is not None:
        u_y += tl.load(bias_ptr + place, mask=known, other=0.0).to(tl.float32)
    z_y = transform(u_y, scale, softcap, inverse_temperature, SOFTCAP)[0]
    lanes = tl.arange(0, BLOCK)
    m = float("-inf")
    others = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    shifted = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        z = _logits(row_ptr, bias_ptr, columns, vocabulary, scale, softcap, inverse_temperature, SOFTCAP)[0]
        peak = tl.maximum(m, tl.max(z, axis=0))
        base = tl.where(peak == float("-inf"), 0.0, peak)  # nothing but -inf so far
        fade = tl.exp(m - base)
        drop = tl.where(fade > 0.0, m - base, 0.0)
        gap = z - base
        e = tl.where(columns == target, 0.0, tl.exp(gap))
        shifted = fade * (shifted + drop * others) + e * tl.where(e > 0.0, gap, 0.0)
        others = fade * others + e
        m = peak
    return combine_statistics(
        m + one * 0.0, tl.sum(others, axis=0) + one * 0.0, tl.sum(shifted, axis=0) + one * 0.0, z_y
    )


@triton.jit
def _write_gradient(
    row_ptr,
    out_ptr,
    bias_ptr,
    target,
    vocabulary,
    scale,
    softcap,
    inverse_temperature,
    entropy,
    lse,
    rest,
    d_logp,
    d_entropy,
    d_lse,
    SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Second sweep: dz = p (d_lse - d_logp - d_entropy (H + log p)), d_logp more for the target, back through the transform.

    The target's d_logp (1 - p_y) is one product, not a difference. `out_ptr` may point to the row itself: what a block
    writes has been read by then, by all warps, which is what the barriers are for.
    """
    lanes = tl.arange(0, BLOCK)
    gain = scale * inverse_temperature
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        z, slope = _logits(
            row_ptr, bias_ptr, columns, vocabulary, scale, softcap, inverse_temperature, SOFTCAP
        )
        log_p = z - lse
        p = tl.exp(log_p)
        is_target = columns == target
        dz = tl.where(is_target, d_logp * rest, -d_logp * p) + d_lse * p
        if WITH_ENTROPY:
            dz -= d_entropy * p * (entropy + tl.where(p > 0.0, log_p, 0.0))
        dz = dz * slope * gain
        tl.debug_barrier()
        tl.store(out_ptr + columns, dz.to(out_ptr.dtype.element_ty), mask=columns < vocabulary)


@triton.jit
def _write_zeros(out_ptr, vocabulary, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        tl.store(out_ptr + columns, (lanes * 0.0).to(out_ptr.dtype.element_ty), mask=columns < vocabulary)


@triton.jit
def _inverse_temperature(temperature_ptr, temperature_stride, temperature, row):
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * temperature_stride).to(tl.float32)
    return 1.0 / temperature


@triton.jit(do_not_specialize=["first", "temperature_stride"])
def loss_rows(
    z_ptr,
    out_ptr,
    bias_ptr,
    temperature_ptr,
    index_ptr,
    valid_count_ptr,
    target_ptr,
    old_ptr,
    advantage_ptr,
    ref_ptr,
    w_ptr,
    w_log_ptr,
    cut_ptr,
    share_ptr,
    unit_ptr,
    partial_ptr,
    first,
    vocabulary,
    pitch,
    out_pitch,
    temperature_stride,
    temperature,
    scale,
    softcap,
    low,
    high,
    dual,
    beta,
    entropy_coef,
    limit,
    LOSS_TYPE: tl.constexpr,
    KL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics, loss terms and gradient of one row of a chunk of logits [C, pitch] fp32, whose first row is `first`.

    Rows are the tokens index_ptr[first + row], valid ones first; valid_count_ptr says how many there are, and a row beyond
    them only clears its gradient. Token tables hold whole calls. Shares are divided by unit_ptr, so that gradients have the
    size of log-probabilities'. old_ptr None: pi_old is pi_theta. out_ptr None: no gradient. Partials: [rows, COLUMNS], zero
    where no row is valid.
    """
    row = tl.program_id(0)
    number = first + row
    row_ptr = z_ptr + row.to(tl.int64) * pitch
    if number < tl.load(valid_count_ptr):
        token = tl.load(index_ptr + number)
        target = tl.load(target_ptr + token).to(tl.int32)
        inverse_temperature = _inverse_temperature(temperature_ptr, temperature_stride, temperature, token)
        logp, entropy, lse, rest = _statistics(
            row_ptr, bias_ptr, target, vocabulary, scale, softcap, inverse_temperature, SOFTCAP, BLOCK
        )
        at = token + tl.arange(0, 1)
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
        is_cut = tl.load(cut_ptr + at) != 0
        share = tl.load(share_ptr + at)
        unit = tl.load(unit_ptr)
        loss, d_logp, d_entropy, ratio, is_below, is_above, is_dual = token_terms(
            valid, logp, old, tl.load(advantage_ptr + at), ref, w, share, entropy,
            low, high, dual, beta, entropy_coef, limit, LOSS_TYPE, KL,
        )  # fmt: skip
        store_metrics(
            partial_ptr + number.to(tl.int64) * COLUMNS, valid, valid == 0, loss, is_below, is_above, is_dual,
            is_cut, ratio, w, logp - old, w_log, ref - logp, entropy, limit,
        )  # fmt: skip
        if out_ptr is not None:
            _write_gradient(
                row_ptr, out_ptr + row.to(tl.int64) * out_pitch, bias_ptr, target, vocabulary, scale, softcap,
                inverse_temperature, entropy, lse, rest, d_logp / unit, d_entropy / unit, d_logp * 0.0,
                SOFTCAP, WITH_ENTROPY, BLOCK,
            )  # fmt: skip
    else:
        if out_ptr is not None:
            _write_zeros(out_ptr + row.to(tl.int64) * out_pitch, vocabulary, BLOCK)


@triton.jit(do_not_specialize=["first", "temperature_stride"])
def logprob_rows(
    z_ptr,
    bias_ptr,
    temperature_ptr,
    target_ptr,
    logp_ptr,
    entropy_ptr,
    lse_ptr,
    first,
    vocabulary,
    pitch,
    temperature_stride,
    temperature,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """logp, entropy and logsumexp of one row of a chunk of logits [C, pitch] fp32, to outputs [N] of the whole call."""
    row = tl.program_id(0)
    number = (first + row).to(tl.int64)
    target = tl.load(target_ptr + number).to(tl.int32)
    inverse_temperature = _inverse_temperature(temperature_ptr, temperature_stride, temperature, number)
    logp, entropy, lse, _ = _statistics(
        z_ptr + row.to(tl.int64) * pitch, bias_ptr, target, vocabulary, scale, softcap, inverse_temperature,
        SOFTCAP, BLOCK,
    )  # fmt: skip
    at = number + tl.arange(0, 1)
    tl.store(logp_ptr + at, logp)
    tl.store(entropy_ptr + at, entropy)
    tl.store(lse_ptr + at, lse)


@triton.jit(do_not_specialize=["first", "temperature_stride"])
def logit_gradient(
    z_ptr,
    out_ptr,
    bias_ptr,
    temperature_ptr,
    target_ptr,
    d_logp_ptr,
    d_entropy_ptr,
    d_lse_ptr,
    first,
    vocabulary,
    pitch,
    out_pitch,
    temperature_stride,
    temperature,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient with respect to one row of a chunk of logits [C, pitch] fp32 from gradients [N] of the row's three outputs."""
    row = tl.program_id(0)
    number = (first + row).to(tl.int64)
    row_ptr = z_ptr + row.to(tl.int64) * pitch
    out_row = out_ptr + row.to(tl.int64) * out_pitch
    at = number + tl.arange(0, 1)
    d_logp, d_entropy, d_lse = tl.load(d_logp_ptr + at), tl.load(d_entropy_ptr + at), tl.load(d_lse_ptr + at)
    size = tl.abs(tl.load(d_logp_ptr + number)) + tl.abs(tl.load(d_entropy_ptr + number))
    if size + tl.abs(tl.load(d_lse_ptr + number)) == 0.0:
        _write_zeros(out_row, vocabulary, BLOCK)
    else:
        target = tl.load(target_ptr + number).to(tl.int32)
        inverse_temperature = _inverse_temperature(temperature_ptr, temperature_stride, temperature, number)
        _, entropy, lse, rest = _statistics(
            row_ptr, bias_ptr, target, vocabulary, scale, softcap, inverse_temperature, SOFTCAP, BLOCK
        )
        _write_gradient(
            row_ptr, out_row, bias_ptr, target, vocabulary, scale, softcap, inverse_temperature, entropy, lse,
            rest, d_logp, d_entropy, d_lse, SOFTCAP, True, BLOCK,
        )  # fmt: skip

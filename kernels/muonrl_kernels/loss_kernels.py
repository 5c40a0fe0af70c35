"""Triton kernels of the elementwise policy loss: one launch over the tokens, one that adds up what its programs found.

The loss is not normalized in the first launch: its gradient stays a multiple of the true one, and the factor 1 / normalizer,
known once all tokens have been counted, is handed on as a device scalar. So every token is read once, in 16-bit formats
gradients do not underflow, and nothing is brought to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muonrl_kernels.loss_math import COLUMNS, importance, store_metrics, token_terms

__all__ = ["reduce_terms", "token_loss"]


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")  # false for NaN


@triton.jit
def _clean(ptr, at, valid, inside):
    """Values in fp32, 0 where not valid, before any arithmetic."""
    return tl.where(valid, tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def token_loss(
    logp_ptr,
    old_ptr,
    advantage_ptr,
    mask_ptr,
    rollout_ptr,
    ref_ptr,
    entropy_ptr,
    w_ptr,
    w_log_ptr,
    cut_ptr,
    share_ptr,
    d_logp_ptr,
    d_entropy_ptr,
    partial_ptr,
    count,
    low,
    high,
    dual,
    is_low,
    is_high,
    beta,
    entropy_coef,
    limit,
    LOSS_TYPE: tl.constexpr,
    IS_MODE: tl.constexpr,
    KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss, gradient (both not normalized) and metric entries of BLOCK tokens; arrays [count], partials [programs, COLUMNS].

    mask_ptr: u8. With w_ptr the tokens are prepared: weights (w, w_log, cut) and shares are read and mask_ptr says which are
    valid; otherwise a token is valid if it is masked in and log pi_old and log pi_rollout are finite, and its share is 1.
    Pointers to what is not given are None.
    """
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wanted = tl.load(mask_ptr + at, mask=inside, other=0) != 0
    old = tl.load(old_ptr + at, mask=inside, other=0.0).to(tl.float32)
    valid = wanted & _finite(old)
    rollout = old
    if rollout_ptr is not None:
        rollout = tl.load(rollout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        valid = valid & _finite(rollout)
    old = tl.where(valid, old, 0.0)
    logp = _clean(logp_ptr, at, valid, inside)
    advantage = _clean(advantage_ptr, at, valid, inside)
    ref = logp
    if ref_ptr is not None:
        ref = _clean(ref_ptr, at, valid, inside)
    entropy = old * 0.0
    if entropy_ptr is not None:
        entropy = _clean(entropy_ptr, at, valid, inside)
    if w_ptr is not None:
        w = tl.load(w_ptr + at, mask=inside, other=0.0)
        w_log = old * 0.0
        if w_log_ptr is not None:
            w_log = tl.load(w_log_ptr + at, mask=inside, other=0.0)
        is_cut = tl.load(cut_ptr + at, mask=inside, other=0) != 0
        share = tl.load(share_ptr + at, mask=inside, other=0.0)
    else:
        w_log = old - tl.where(valid, rollout, 0.0)
        w, is_cut = importance(w_log, valid, is_low, is_high, limit, IS_MODE)
        share = old * 0.0 + 1.0
    loss, d_logp, d_entropy, ratio, is_below, is_above, is_dual = token_terms(
        valid, logp, old, advantage, ref, w, share, entropy, low, high, dual, beta, entropy_coef, limit, LOSS_TYPE, KL
    )  # fmt: skip
    tl.store(d_logp_ptr + at, d_logp, mask=inside)
    if d_entropy_ptr is not None:
        tl.store(d_entropy_ptr + at, d_entropy, mask=inside)
    row = partial_ptr + program.to(tl.int64) * COLUMNS
    dropped = wanted & (valid == 0)
    store_metrics(
        row, valid, dropped, loss, is_below, is_above, is_dual, is_cut, ratio, w,
        logp - old, w_log, ref - logp, entropy, limit,
    )  # fmt: skip


@triton.jit(do_not_specialize=["programs"])
def reduce_terms(
    partial_ptr, normalizer_ptr, out_ptr, loss_ptr, scale_ptr, programs, PREPARED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Add up partials [programs, COLUMNS] in a fixed order, by one program, to out [COLUMNS]; then the loss and its factor.

    The factor is 1 / normalizer, or 1 / number of valid tokens without one; it is 0 for 0. PREPARED shares hold it already.
    """
    entries = tl.arange(0, 32)
    rows = tl.arange(0, ROWS)
    sums = tl.full((32,), 0.0, dtype=tl.float32)
    peaks = tl.full((32,), float("-inf"), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        at = (start + rows[:, None]).to(tl.int64) * COLUMNS + entries[None, :]
        inside = (start + rows[:, None] < programs) & (entries[None, :] < COLUMNS)
        values = tl.load(partial_ptr + at, mask=inside, other=0.0)
        sums += tl.sum(tl.where(entries[None, :] < COLUMNS - 2, values, 0.0), axis=0)
        peaks = tl.maximum(peaks, tl.max(tl.where(inside, values, float("-inf")), axis=0))
    count = tl.sum(tl.where(entries == 0, sums, 0.0), axis=0)
    if PREPARED:
        count = count * 0.0 + 1.0
    else:
        if normalizer_ptr is not None:
            count = tl.load(normalizer_ptr).to(tl.float32)
    scale = tl.where(count != 0.0, 1.0 / tl.where(count != 0.0, count, 1.0), 0.0)
    loss = tl.sum(tl.where(entries == 1, sums, 0.0), axis=0) * scale
    sums = tl.where(entries == 1, loss, sums)
    tl.store(out_ptr + entries, tl.where(entries < COLUMNS - 2, sums, peaks), mask=entries < COLUMNS)
    tl.store(loss_ptr, loss)
    tl.store(scale_ptr, scale)

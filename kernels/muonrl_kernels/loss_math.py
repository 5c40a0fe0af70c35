"""Device functions of the policy-loss kernels: one token's importance weight, loss, gradient and metric entries.

The formulas are those of :mod:`muonrl_kernels.policy_loss` and :mod:`muonrl_kernels.tokens`. Every hyper-parameter is a
run-time argument; only what changes the shape of the computation (loss_type, is_mode, the KL estimator) is a constant.
Values are blocks of any length; the row kernels use blocks of one element.

A GPU's exp and log are fast approximations whose error is absolute near their zeros, so the differences that policy losses
are made of (e^x - 1 - x, log(1 + x), tanh) are written out as series where they cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COLUMNS", "expm1", "importance", "log1p", "precise_exp", "store_metrics", "tanh", "token_terms"]

COLUMNS = tl.constexpr(24)
"""Entries of a program's partial result: the 22 of SUMS, then the 2 of EXTREMA."""

_LOG2E_HIGH = tl.constexpr(1.4426950216293335)  # log2(e) rounded to fp32 ...
_LOG2E_LOW = tl.constexpr(1.925963033500e-08)  # ... and what the rounding took away
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def precise_exp(x):
    """e^x for finite x, with the rounding of x log2(e) put right: it is all of the error when |x| is large."""
    scaled = x * _LOG2E_HIGH
    lost = tl.fma(x, _LOG2E_HIGH, -scaled) + x * _LOG2E_LOW
    return tl.exp2(scaled) * (1.0 + lost * _LN2)


@triton.jit
def _exp_beyond_first_order(x):
    """e^x - 1 - x for |x| <= 1, by its series."""
    y = 1.0 / 6227020800.0
    y = y * x + 1.0 / 479001600.0
    y = y * x + 1.0 / 39916800.0
    y = y * x + 1.0 / 3628800.0
    y = y * x + 1.0 / 362880.0
    y = y * x + 1.0 / 40320.0
    y = y * x + 1.0 / 5040.0
    y = y * x + 1.0 / 720.0
    y = y * x + 1.0 / 120.0
    y = y * x + 1.0 / 24.0
    y = y * x + 1.0 / 6.0
    y = y * x + 0.5
    return x * x * y


@triton.jit
def expm1(x):
    """e^x - 1."""
    return tl.where(tl.abs(x) <= 1.0, x + _exp_beyond_first_order(x), precise_exp(x) - 1.0)


@triton.jit
def _k3(x):
    """e^x - 1 - x."""
    return tl.where(tl.abs(x) <= 1.0, _exp_beyond_first_order(x), precise_exp(x) - 1.0 - x)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0: 2 atanh(x / (2 + x)) while that converges fast."""
    s = x / (2.0 + x)
    q = s * s
    y = 1.0 / 13.0
    y = y * q + 1.0 / 11.0
    y = y * q + 1.0 / 9.0
    y = y * q + 1.0 / 7.0
    y = y * q + 1.0 / 5.0
    y = y * q + 1.0 / 3.0
    return tl.where(x <= 0.5, 2.0 * s * (1.0 + q * y), tl.log(1.0 + x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent; NaN stays NaN, infinity is 1."""
    e = expm1(tl.maximum(-2.0 * tl.abs(x), -40.0, propagate_nan=tl.PropagateNan.ALL))
    size = -e / (e + 2.0)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _between(x, low, high):
    """x held within low .. high; NaN stays NaN, which a GPU's plain minimum and maximum would drop."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, limit):
    return _between(x, -limit, limit)


@triton.jit
def importance(w_log, valid, is_low, is_high, limit, IS_MODE: tl.constexpr):
    """(w, whether it was cut) from log pi_old - log pi_rollout, token by token."""
    if IS_MODE == "none":
        return tl.full(w_log.shape, 1.0, dtype=tl.float32), valid & False
    else:
        raw = precise_exp(_clamp(w_log, limit))
        cut = ((raw > is_high) | (raw < is_low)) & valid
        if IS_MODE == "icepop":
            return tl.where(cut, 0.0, raw), cut
        else:
            return tl.minimum(tl.maximum(raw, is_low), is_high), cut


@triton.jit
def token_terms(
    valid,
    logp,
    old,
    advantage,
    ref,
    w,
    share,
    entropy,
    low,
    high,
    dual,
    beta,
    entropy_coef,
    limit,
    LOSS_TYPE: tl.constexpr,
    KL: tl.constexpr,
):
    """(loss, d_logp, d_entropy, ratio, clipped low, high, dual) of tokens whose masked slots hold 0.

    low, high: bounds of the ratio. dual: infinite for none. `share` weighs everything. KL: "none" leaves out the term; with
    "_weighted" after its name the estimator is multiplied by the ratio, through which a gradient flows as well.
    """
    raw = logp - old
    x = _clamp(raw, limit)
    inside = x == raw
    ratio = precise_exp(x)
    bounded = _between(ratio, low, high)
    if LOSS_TYPE == "cispo":
        is_below = valid & (ratio < low)
        is_above = valid & (ratio > high)
        is_dual = valid & False
        loss = -bounded * advantage * logp
        slope = tl.where(inside, -bounded * advantage, 0.0)
    else:
        is_below = valid & (advantage < 0.0) & (ratio < low)
        is_above = valid & (advantage > 0.0) & (ratio > high)
        is_dual = valid & (advantage < 0.0) & (ratio > dual)
        loss = tl.maximum(-ratio * advantage, -bounded * advantage, propagate_nan=tl.PropagateNan.ALL)
        loss = tl.where(is_dual, tl.where(is_dual, dual, 0.0) * -advantage, loss)
        moving = inside & ((is_below | is_above | is_dual) == 0)
        slope = tl.where(moving, -ratio * advantage, 0.0)
    loss = loss * w
    slope = slope * w
    if KL != "none":
        away = ref - logp
        y = _clamp(away, limit)
        if KL == "k1" or KL == "k1_weighted":
            term = -y
            d_term = tl.full(y.shape, 1.0, dtype=tl.float32)
        elif KL == "k2" or KL == "k2_weighted":
            term = 0.5 * y * y
            d_term = -y
        else:
            term = _k3(y)
            d_term = -expm1(y)
        d_term = tl.where(y == away, d_term, 0.0)
        if KL == "k1_weighted" or KL == "k2_weighted" or KL == "k3_weighted":
            term = term * ratio
            d_term = d_term * ratio + tl.where(inside, term, 0.0)
        loss += beta * term
        slope += beta * d_term
    loss -= entropy_coef * entropy
    loss = tl.where(valid, loss * share, 0.0)
    d_logp = tl.where(valid, slope * share, 0.0)
    d_entropy = tl.where(valid, -entropy_coef * share, 0.0)
    return loss, d_logp, d_entropy, ratio, is_below, is_above, is_dual


@triton.jit
def _put(ptr, value, valid, INDEX: tl.constexpr):
    tl.store(ptr + INDEX, tl.sum(tl.where(valid, value, 0.0).to(tl.float32), axis=0))


@triton.jit
def _put_estimators(ptr, x, valid, limit, INDEX: tl.constexpr):
    """The three estimators of KL(q | p) from x = log(p / q), sampled from q (Schulman)."""
    y = _clamp(x, limit)
    _put(ptr, -y, valid, INDEX)
    _put(ptr, 0.5 * y * y, valid, INDEX + 1)
    _put(ptr, _k3(y), valid, INDEX + 2)


@triton.jit
def store_metrics(
    ptr, valid, dropped, loss, is_below, is_above, is_dual, is_cut, ratio, w, delta, w_log, away, entropy, limit
):  # fmt: skip
    """Write a program's entries of SUMS and EXTREMA (the order of :mod:`muonrl_kernels.metrics`) to ptr[COLUMNS].

    delta, w_log, away: log-ratios theta|old, old|rollout, ref|theta, not clamped.
    """
    ones = tl.where(valid, 1.0, 0.0)
    _put(ptr, ones, valid, 0)
    _put(ptr, loss, valid, 1)
    _put(ptr, tl.where(is_below, 1.0, 0.0), valid, 2)
    _put(ptr, tl.where(is_above, 1.0, 0.0), valid, 3)
    _put(ptr, tl.where(is_dual, 1.0, 0.0), valid, 4)
    _put(ptr, tl.where(is_cut, 1.0, 0.0), valid, 5)
    _put(ptr, ratio, valid, 6)
    _put(ptr, ratio * ratio, valid, 7)
    _put(ptr, w, valid, 8)
    _put(ptr, w * w, valid, 9)
    _put_estimators(ptr, delta, valid, limit, 10)
    _put_estimators(ptr, w_log, valid, limit, 13)
    _put_estimators(ptr, away, valid, limit, 16)
    _put(ptr, entropy, valid, 19)
    _put(ptr, tl.abs(delta), valid, 20)
    _put(ptr, tl.where(dropped, 1.0, 0.0), dropped, 21)
    tl.store(ptr + 22, tl.max(tl.where(valid, -ratio, float("-inf")), axis=0))
    tl.store(ptr + 23, tl.max(tl.where(valid, ratio, float("-inf")), axis=0))

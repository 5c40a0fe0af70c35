"""The elementwise policy-gradient loss: value, closed-form gradient and metric sums in one pass.

With Delta = log pi_theta - log pi_old, r = exp(Delta) and the detached importance weight w of pi_old against pi_rollout:

    ppo    l = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -w dual_clip A
    cispo  l = -w sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta
    gspo   ppo with r replaced by exp(mean Delta over the sequence)

(PPO: arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476; CISPO: arXiv 2506.13585; GSPO: arXiv 2507.18071; truncated
importance sampling: Yao et al. 2025.) The gradient with respect to each token's log-probability is known in closed form, so
the linear loss can use it inside its forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from muonrl_kernels.backend import takes_loss_kernels
from muonrl_kernels.metrics import EXTREMA, SUMS, LossMetrics
from muonrl_kernels.options import LossKeywords, LossOptions, choose_options
from muonrl_kernels.parallel import DataParallel, Reduction
from muonrl_kernels.tokens import Tokens, check_tokens, inverse, prepare, sequence_sum

__all__ = ["ONCE", "Terms", "compute", "evaluate", "policy_loss", "refuse_second_derivative"]

ONCE: Final = (
    "the policy losses can be differentiated once: their gradients are computed in closed form, "
    "and a second derivative (double backward, create_graph=True) is not implemented"
)
"""What whoever asks for a second derivative is told."""


@dataclass(frozen=True)
class Terms:
    """Loss contributions of N tokens: their sum `loss` (0-d), dL/dlogp and dL/dentropy [N], and the metric vectors."""

    loss: Tensor
    d_logp: Tensor
    d_entropy: Tensor | None
    sums: Tensor
    extrema: Tensor


def _estimators(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k1, k2, k3 of KL(q | p) from x = log(p / q) sampled from q (Schulman, Approximating KL divergence)."""
    return -x, 0.5 * x * x, torch.expm1(x) - x


def _surrogate(
    ratio: Tensor, inside: Tensor, logp: Tensor, t: Tokens, o: LossOptions
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """l without w, dl/dDelta, and who was clipped low, high and dual; all [N].

    `inside` says where Delta was not clamped: the gradient is exactly 0 elsewhere.
    """
    a = t.advantages
    bounded = ratio.clamp(1.0 - o.clip_low, 1.0 + o.clip_high)
    if o.loss_type == "cispo":
        low, high = ratio < 1.0 - o.clip_low, ratio > 1.0 + o.clip_high
        return -bounded * a * logp, torch.where(inside, -bounded * a, 0.0), (low, high, torch.zeros_like(low))
    low = (a < 0) & (ratio < 1.0 - o.clip_low)
    high = (a > 0) & (ratio > 1.0 + o.clip_high)
    loss = torch.maximum(-ratio * a, -bounded * a)
    dual = torch.zeros_like(low)
    if o.dual_clip is not None:
        dual = (a < 0) & (ratio > o.dual_clip)
        loss = torch.where(dual, -o.dual_clip * a, loss)
    moving = inside & ~(low | high | dual)
    return loss, torch.where(moving, -ratio * a, 0.0), (low, high, dual)


def _log_ratio(delta: Tensor, t: Tokens, o: LossOptions) -> tuple[Tensor, Tensor | None]:
    """The log-ratio that the surrogate sees, [N], and 1 / length of each token's sequence for gspo."""
    if o.loss_type != "gspo":
        return delta, None
    assert t.sequence is not None
    lengths = sequence_sum(t.valid.to(delta.dtype), t.sequence, t.sequences)
    per_token = inverse(lengths)
    mean = sequence_sum(delta, t.sequence, t.sequences) * per_token
    return mean[t.sequence], per_token[t.sequence]


def _add_kl(loss: Tensor, slope: Tensor, ref_delta: Tensor, o: LossOptions) -> tuple[Tensor, Tensor]:
    """Add beta times the chosen estimator of KL(theta | ref) and its slope; ref_delta = log pi_ref - log pi_theta."""
    x = ref_delta.clamp(-o.log_ratio_clamp, o.log_ratio_clamp)
    k1, k2, k3 = _estimators(x)
    value, d = {"k1": (k1, torch.ones_like(x)), "k2": (k2, -x), "k3": (k3, -torch.expm1(x))}[o.kl]
    return loss + o.beta * value, slope + o.beta * torch.where(x == ref_delta, d, 0.0)


def evaluate(t: Tokens, logp: Tensor, entropy: Tensor | None, o: LossOptions) -> Terms:
    """Loss, gradient and metric sums of tokens given log pi_theta [N] (and the entropy [N], nats).

    For gspo the tokens must hold whole sequences; for the other losses any subset of the tokens will do, and results of
    disjoint subsets add up.
    """
    logp = torch.where(t.valid, logp.detach(), 0.0).to(t.old.dtype)
    raw_delta = torch.zeros_like(logp) if t.on_policy else logp - t.old
    raw, inverse_length = _log_ratio(raw_delta, t, o)
    x = raw.clamp(-o.log_ratio_clamp, o.log_ratio_clamp)
    ratio = x.exp()
    loss, slope, clipped = _surrogate(ratio, x == raw, logp, t, o)
    loss, slope = loss * t.w, slope * t.w * t.share
    extra = torch.zeros_like(loss)
    d_extra = extra
    if o.beta != 0.0 and t.ref is not None:
        extra, d_extra = _add_kl(extra, d_extra, t.ref - logp, o)
        if o.kl_weighted:
            slope = slope + torch.where(x == raw, extra * ratio, 0.0) * t.share
            extra, d_extra = extra * ratio, d_extra * ratio
    if inverse_length is not None and t.sequence is not None:
        # Each token of a sequence moves the one ratio of all of them.
        slope = sequence_sum(slope, t.sequence, t.sequences)[t.sequence] * inverse_length
    d_entropy = None
    if entropy is not None:
        entropy = torch.where(t.valid, entropy.detach(), 0.0).to(t.old.dtype)
        if o.entropy_coef != 0.0:
            extra = extra - o.entropy_coef * entropy
            d_entropy = -o.entropy_coef * t.share
    total = ((loss + extra) * t.share).sum()
    d_logp = torch.where(t.valid, slope + d_extra * t.share, 0.0)
    sums, extrema = _collect(t, total, raw_delta, ratio, clipped, logp, entropy, o)
    return Terms(total, d_logp, d_entropy, sums, extrema)


def _collect(
    t: Tokens,
    total: Tensor,
    raw_delta: Tensor,
    ratio: Tensor,
    clipped: tuple[Tensor, Tensor, Tensor],
    logp: Tensor,
    entropy: Tensor | None,
    o: LossOptions,
) -> tuple[Tensor, Tensor]:
    """The two metric vectors of these tokens (see :mod:`muonrl_kernels.metrics` for the entries)."""
    limit, valid = o.log_ratio_clamp, t.valid
    zero = torch.zeros_like(logp)
    per_token: list[Tensor] = [
        valid,
        zero,
        *(c & valid for c in clipped),
        t.w_cut,
        ratio,
        ratio * ratio,
        t.w,
        t.w * t.w,
    ]
    per_token += _estimators(raw_delta.clamp(-limit, limit))
    per_token += _estimators((zero if t.w_log is None else t.w_log).clamp(-limit, limit))
    per_token += _estimators((zero if t.ref is None else t.ref - logp).clamp(-limit, limit))
    per_token += [zero if entropy is None else entropy, raw_delta.abs(), zero]
    table = torch.stack([column.to(logp.dtype) for column in per_token])
    sums = torch.where(valid, table, 0.0).sum(1)
    sums[SUMS.index("loss")] = total
    sums = sums.float()
    extrema = sums.new_full((len(EXTREMA),), -torch.inf)
    if ratio.numel():
        extrema[0] = torch.where(valid, -ratio, -torch.inf).amax()
        extrema[1] = torch.where(valid, ratio, -torch.inf).amax()
    return sums, extrema


def compute(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_logp: Tensor | None,
    ref_logp: Tensor | None,
    entropy: Tensor | None,
    cu_seqlens: Tensor | None,
    options: LossOptions,
    triton: bool,
    parallel: DataParallel | None,
) -> tuple[Terms, Tensor | None]:
    """Terms of a whole call, gradients flat [N], `dropped` included, and the factor that the gradients still lack, if any.

    What a token's sequence decides comes from :func:`prepare` on either backend; the kernels do the rest.
    """
    for name, x in (("old_logp", old_logp), ("entropy", entropy)):
        if x is not None and x.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, logp has {tuple(logp.shape)}")
    if options.entropy_coef != 0.0 and entropy is None:
        raise ValueError("entropy_coef != 0 needs entropy")
    if parallel is not None:
        options = parallel.share(options, old_logp, mask, rollout_logp, cu_seqlens)
    dtype = torch.float64 if logp.dtype == torch.float64 else torch.float32
    weighted = rollout_logp is not None and options.is_mode != "none" and options.is_level == "sequence"
    if triton and options.agg != "sequence_mean" and not weighted:
        from muonrl_kernels.loss_triton import evaluate_raw

        check_tokens(old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens, options)
        return evaluate_raw(logp, old_logp, advantages, mask, rollout_logp, ref_logp, entropy, options)
    tokens = prepare(old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens, options, dtype)
    scale = None
    if triton:
        from muonrl_kernels.loss_triton import evaluate_prepared

        terms, scale = evaluate_prepared(tokens, logp, entropy, options)
    else:
        terms = evaluate(tokens, logp.reshape(-1), None if entropy is None else entropy.reshape(-1), options)
    terms.sums[SUMS.index("dropped")] = tokens.dropped
    return terms, scale


def refuse_second_derivative() -> None:
    """To be called in a backward pass.

    Raises:
        RuntimeError: a graph of the gradients is being recorded, for which there are no formulas.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(ONCE)


class _PolicyLoss(torch.autograd.Function):
    """Scalar loss whose gradient was computed with it, up to the factor `scale`."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, entropy: Tensor | None, terms: Terms, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(terms.d_logp, terms.d_entropy, scale)
        ctx.kinds = logp.dtype, None if entropy is None else entropy.dtype
        return terms.loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        d_logp, d_entropy, scale = ctx.saved_tensors
        kind, entropy_kind = ctx.kinds
        factor = grad if scale is None else grad * scale
        entropy_grad = None if d_entropy is None else (d_entropy * factor).to(entropy_kind)
        return (d_logp * factor).to(kind), entropy_grad, None, None


def _compiled(
    tensors: tuple[Tensor | None, ...], options: LossOptions, backend: str
) -> tuple[Tensor, LossMetrics]:
    """The loss as one operator of a compiled graph; `tensors` are the operator's, the entropy second."""
    from muonrl_kernels import loss_ops

    texts, numbers, normalizer = loss_ops.encode(options)
    loss, _, _, sums, extrema, _ = loss_ops.policy_loss_op(*tensors, normalizer, texts, numbers, backend)
    return loss, LossMetrics(sums.detach(), extrema.detach(), tensors[1] is not None)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    preset: str | None = None,
    dp_group: ProcessGroup | None = None,
    dp_reduction: Reduction = "mean",
    **options: Unpack[LossKeywords],
) -> tuple[Tensor, LossMetrics]:
    """Policy-gradient loss of tokens, with its metrics.

    Args:
        logp: log pi_theta of the sampled tokens, [B, T] or packed [N]; gets a gradient.
        old_logp: log pi_old, same shape, like every tensor below; None is log pi_theta itself (on policy, r = 1).
        advantages: A.
        mask: bool, True for tokens that are trained on. Whatever stands in other slots is never looked at.
        rollout_logp: log pi_rollout of the policy that sampled; None means w = 1. A token whose log pi_old or log
            pi_rollout is not finite is dropped and counted.
        ref_logp: log pi_ref for the KL term.
        entropy: entropies in nats; gets a gradient if entropy_coef is not 0, else it is only a metric.
        cu_seqlens: int [sequences + 1], bounds of the sequences of packed tokens; [B, T] takes rows as sequences.
        backend: "auto", "triton" or "torch".
        preset: "trl" or "verl" for that system's defaults and names (see :data:`muonrl_kernels.presets`).
        dp_group: ranks that hold the other tokens of the update: the count that the loss is divided by is theirs too.
        dp_reduction: how gradients are reduced over them later, "mean" (DDP, FSDP: the loss is times their number) or "sum".
        **options: the fields of :class:`muonrl_kernels.LossOptions`, by name.

    Returns:
        The scalar loss (fp32, or fp64 for fp64 logp) and the :class:`LossMetrics`.

    Raises:
        ValueError: shapes that differ, unknown names, or an option without the tensor that it needs.
        RuntimeError: backend="triton" where no kernel is available.
    """
    chosen = choose_options(preset, options)
    old_logp = logp.detach() if old_logp is None else old_logp
    if torch.compiler.is_compiling() and dp_group is None:
        tensors = (logp, entropy, old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens)
        return _compiled(tensors, chosen, backend)
    parallel = DataParallel.make(dp_group, dp_reduction)
    triton = takes_loss_kernels(backend, "policy_loss", logp.device, logp.dtype, chosen.loss_type)
    with torch.no_grad():
        terms, scale = compute(
            logp, old_logp, advantages, mask, rollout_logp, ref_logp, entropy, cu_seqlens, chosen, triton, parallel
        )  # fmt: skip
        metrics = LossMetrics(terms.sums, terms.extrema, entropy is not None)
        if parallel is not None:
            parallel.unscale_(metrics)
    flat_entropy = None if entropy is None else entropy.reshape(-1)
    result: Tensor = _PolicyLoss.apply(  # type: ignore[no-untyped-call]
        logp.reshape(-1), flat_entropy, terms, scale
    )
    return result, metrics

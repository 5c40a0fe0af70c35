"""Plain PyTorch truth of every operation: short, differentiable by autograd, in whatever dtype it is given.

Nothing here is clever. Tests run these functions in fp64 and compare everything else with them; benchmarks run them in the
dtype under test to know how far straightforward code is from the truth. Nothing is shared with the fast code but the names of
the options.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from muonrl_kernels.coefficients import Triple
from muonrl_kernels.options import LossKeywords, LossOptions, choose_options

__all__ = ["linear_logprob", "linear_policy_loss", "newton_schulz", "orthogonal_factor", "policy_loss"]


def newton_schulz(g: Tensor, coefficients: Sequence[Triple], eps: float = 0.0) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, from X = g / max(||g||_F, eps); g is [m, n], computed in its dtype."""
    x = g if g.shape[0] <= g.shape[1] else g.mT
    norm = x.norm().clamp(min=eps)
    x = x / norm if norm > 0 else x
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if g.shape[0] <= g.shape[1] else x.mT


def orthogonal_factor(g: Tensor, rank: int | None = None) -> Tensor:
    """U V^T of the singular value decomposition of g [m, n], with the first `rank` directions only if it is given."""
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    factor: Tensor = u[:, :rank] @ vh[:rank]
    return factor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) [N] by way of the whole logits [N, V]."""
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if vocab_size is not None:
        padding = torch.arange(weight.shape[0], device=weight.device) >= vocab_size
        logits = logits.masked_fill(padding, -torch.inf)
    logits = logits / (
        temperature.unsqueeze(1) if isinstance(temperature, Tensor) and temperature.ndim else temperature
    )
    log_p = torch.log_softmax(logits, 1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, torch.logsumexp(logits, 1)


def _sequences(shape: torch.Size, cu_seqlens: Tensor | None) -> list[list[int]]:
    """Flat positions of each sequence."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        return [list(range(lo, hi)) for lo, hi in itertools.pairwise(bounds)]
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    return [list(range(i * columns, (i + 1) * columns)) for i in range(rows)]


def _weight(log_w: Tensor, o: LossOptions) -> Tensor:
    """Detached importance weight of one log-ratio or of many."""
    raw = log_w.detach().clamp(-o.log_ratio_clamp, o.log_ratio_clamp).exp()
    low = o.is_low or 0.0
    if o.is_mode == "icepop":
        return raw * ((raw >= low) & (raw <= o.is_high))
    return raw.clamp(low, o.is_high)


def _token_loss(log_ratio: Tensor, logp: Tensor, advantages: Tensor, o: LossOptions) -> Tensor:
    ratio = log_ratio.clamp(-o.log_ratio_clamp, o.log_ratio_clamp).exp()
    bounded = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
    if o.loss_type == "cispo":
        # The bounded ratio is a constant; so is everything where the log-ratio is out of range.
        frozen = torch.where(log_ratio.abs() <= o.log_ratio_clamp, logp, logp.detach())
        return -bounded.detach() * advantages * frozen
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if o.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -o.dual_clip * advantages), loss)


def _kl(ref: Tensor, logp: Tensor, o: LossOptions) -> Tensor:
    x = (ref - logp).clamp(-o.log_ratio_clamp, o.log_ratio_clamp)
    return {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[o.kl]


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Unpack[LossKeywords],
) -> Tensor:
    """The loss alone, one sequence at a time; arguments as in :func:`muonrl_kernels.policy_loss`."""
    o = choose_options(None, options)
    valid = mask.bool() & old_logp.isfinite()
    if rollout_logp is not None:
        valid = valid & rollout_logp.isfinite()
    flat_valid = valid.reshape(-1)
    total = logp.new_zeros(())
    lengths = []
    for positions in _sequences(logp.shape, cu_seqlens):
        chosen = torch.tensor([i for i in positions if flat_valid[i]], dtype=torch.int64)
        if chosen.numel() == 0:
            continue
        lengths.append(chosen.numel())
        current, old, a = (x.reshape(-1)[chosen] for x in (logp, old_logp, advantages))
        delta = current - old
        term = _token_loss(delta.mean().expand_as(delta) if o.loss_type == "gspo" else delta, current, a, o)
        if rollout_logp is not None and o.is_mode != "none":
            log_w = old - rollout_logp.reshape(-1)[chosen]
            term = term * _weight(log_w.sum() if o.is_level == "sequence" else log_w, o)
        if ref_logp is not None and o.beta:
            kl = _kl(ref_logp.reshape(-1)[chosen], current, o)
            if o.kl_weighted:
                ratio = (delta.mean() if o.loss_type == "gspo" else delta).clamp(
                    -o.log_ratio_clamp, o.log_ratio_clamp
                )
                kl = kl * ratio.exp()
            term = term + o.beta * kl
        if entropy is not None and o.entropy_coef:
            term = term - o.entropy_coef * entropy.reshape(-1)[chosen]
        total = total + (term.mean() if o.agg == "sequence_mean" else term.sum())
    if not lengths:
        return total
    count: Any = len(lengths) if o.agg == "sequence_mean" else sum(lengths)
    return total / (count if o.normalizer is None else o.normalizer)


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Unpack[LossKeywords],
) -> Tensor:
    """The loss alone, through the whole logits; arguments as in :func:`muonrl_kernels.linear_policy_loss`."""
    logp, entropy, _ = linear_logprob(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        vocab_size=vocab_size,
    )
    return policy_loss(
        logp,
        old_logp,
        advantages,
        mask,
        rollout_logp=rollout_logp,
        ref_logp=ref_logp,
        entropy=entropy,
        cu_seqlens=cu_seqlens,
        **options,
    )

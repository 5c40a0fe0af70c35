"""Policy loss and log-probabilities from hidden states through the language-model head; the logits never exist whole.

`linear_policy_loss` computes its gradients inside the forward pass: once a row's logsumexp is known, dL/dlogp is known in
closed form, so each chunk of rows needs three products (logits, d hidden, d weight) and nothing is computed again.
Rows that are masked out never enter a product; rows whose gradient is exactly 0 skip the last two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from muonrl_kernels.backend import resolve
from muonrl_kernels.linear_head import Gradients, Head, RowStats, statistics_dtype
from muonrl_kernels.metrics import LossMetrics
from muonrl_kernels.options import LossKeywords, LossOptions, choose_options
from muonrl_kernels.parallel import DataParallel, Reduction, VocabShard, require_torch
from muonrl_kernels.policy_loss import Terms, evaluate, finish
from muonrl_kernels.tokens import Tokens, prepare

__all__ = ["linear_logprob", "linear_policy_loss"]


def _check_rows(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, H] and weight [V, H], got {tuple(hidden.shape)}, {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [{hidden.shape[0]}], got {tuple(targets.shape)}")
    if isinstance(temperature, Tensor) and temperature.ndim and temperature.shape != targets.shape:
        raise ValueError(
            f"temperature must be a scalar or [{hidden.shape[0]}], got {tuple(temperature.shape)}"
        )


def _check_targets(targets: Tensor, head: Head) -> None:
    """Out-of-range targets are named on the CPU; on a GPU the look would cost a synchronisation."""
    if targets.device.type == "cpu" and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= head.columns:
            raise ValueError(f"targets of valid rows must lie in 0..{head.columns - 1}, found {low}..{high}")


class _LinearLogprob(torch.autograd.Function):
    """logp, entropy and logsumexp of each row; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        rows: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = statistics_dtype(hidden)
        outputs = torch.zeros(3, hidden.shape[0], dtype=kind, device=hidden.device)
        for part in head.chunks(hidden.shape[0], rows):
            s = head.take(part).stats(hidden[part], targets[part])
            for row, values in zip(outputs, (s.logp, s.entropy, s.lse), strict=True):
                row[part] = values
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.rows = head, rows
        logp, entropy, lse = outputs.unbind()
        return logp.clone(), entropy.clone(), lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logp: Tensor, d_entropy: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        grads = Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad[:3])
        used = ((d_logp != 0) | (d_entropy != 0) | (d_lse != 0)).nonzero().squeeze(1)
        with_entropy = bool((d_entropy != 0).any())
        for part in ctx.head.chunks(used.numel(), ctx.rows):
            index = used[part]
            head, h, y = ctx.head.take(index), hidden[index], targets[index]
            slope = d_entropy[index] if with_entropy else None
            dz = head.logit_grad(head.stats(h, y), y, d_logp[index], slope, d_lse[index])
            grads.add(head, dz, h, index)
        d_weight = None if grads.weight is None else grads.weight.to(weight.dtype)
        d_bias = None if grads.bias is None else grads.bias.to(bias.dtype)
        return grads.hidden, d_weight, d_bias, None, None, None


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
    chunk_rows: int | None = None,
    backend: str = "auto",
    tp_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each row's target, entropy and logsumexp of each row, all differentiable.

    Args:
        hidden: [N, H].
        weight: [V, H], the head's weight.
        targets: [N] int64, each in 0..vocab_size-1.
        bias: [V].
        temperature: a number, or [N] for one a row; no gradient.
        softcap: logits become softcap tanh(logits / softcap).
        logit_scale: factor on the logits before the softcap.
        vocab_size: columns from here on are padding and are left out.
        chunk_rows: rows of logits that exist at once; None lets the device decide (256 to 8192).
        backend: "auto", "triton" or "torch".
        tp_group: ranks over which the vocabulary is spread: weight [V_local, H] and bias [V_local] are this rank's part,
            everything else is the same on every rank. The gradient of hidden is complete, those of weight and bias
            are this rank's part. Runs on PyTorch operations.
        vocab_start: first column of this rank's part; None is rank * V_local. Needs vocab_size, the whole vocabulary.

    Returns:
        (logp, entropy, lse), each [N], fp32 (fp64 for fp64 input); entropy in nats.

    Raises:
        ValueError: shapes that do not fit or arguments out of range.
        RuntimeError: backend="triton" where no kernel is available.
    """
    _check_rows(hidden, weight, targets, temperature)
    resolve(require_torch(backend, tp_group), "linear_logprob", hidden.device)
    shard = VocabShard.make(tp_group, weight.shape[0], vocab_start, vocab_size)
    head = Head.make(weight, bias, temperature, softcap, logit_scale, vocab_size, hidden.dtype, shard)
    _check_targets(targets, head)
    with torch.autocast(hidden.device.type, enabled=False):
        result: tuple[Tensor, Tensor, Tensor] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, head, targets, chunk_rows
        )
    return result


@dataclass
class _Pass:
    """One call's state: compacted rows [M] of the batch, their tokens, and what accumulates over chunks.

    `index` are the places of the rows in hidden [N, H]; `head`, `targets` and `tokens` are already restricted to them.
    """

    hidden: Tensor
    index: Tensor
    head: Head
    targets: Tensor
    tokens: Tokens
    options: LossOptions
    grads: Gradients | None
    chunk_rows: int | None

    def parts(self) -> list[slice]:
        return self.head.chunks(self.index.numel(), self.chunk_rows)

    def stats(self, part: slice) -> tuple[Head, Tensor, RowStats]:
        """Head, hidden rows and statistics of one chunk."""
        head, h = self.head.take(part), self.hidden[self.index[part]]
        return head, h, head.stats(h, self.targets[part])

    def backward(
        self, part: slice, head: Head, h: Tensor, s: RowStats, d_logp: Tensor, d_entropy: Tensor | None
    ) -> None:
        """Add the gradients of one chunk; rows whose gradient is exactly 0 do not enter the products."""
        if self.grads is None:
            return
        index, targets = self.index[part], self.targets[part]
        moving = d_logp != 0 if d_entropy is None else (d_logp != 0) | (d_entropy != 0)
        kept = moving.nonzero().squeeze(1)
        if kept.numel() == 0:
            return
        if kept.numel() < index.numel():
            head, h, index, targets, d_logp = (
                head.take(kept),
                h[kept],
                index[kept],
                targets[kept],
                d_logp[kept],
            )
            d_entropy = None if d_entropy is None else d_entropy[kept]
            s = s.take(kept, with_log_p=d_entropy is not None or head.softcap is not None)
        self.grads.add(head, head.logit_grad(s, targets, d_logp, d_entropy), h, index)


def _add_terms(total: Terms | None, part: Terms) -> Terms:
    if total is None:
        return part
    extrema = torch.maximum(total.extrema, part.extrema)
    return Terms(total.loss + part.loss, part.d_logp, part.d_entropy, total.sums + part.sums, extrema)


def _run_by_token(state: _Pass) -> Terms | None:
    """Loss, metrics and gradients in one pass over the chunks; None without rows."""
    total: Terms | None = None
    for part in state.parts():
        head, h, s = state.stats(part)
        terms = evaluate(state.tokens.take(part), s.logp, s.entropy, state.options)
        state.backward(part, head, h, s, terms.d_logp, terms.d_entropy)
        total = _add_terms(total, terms)
    return total


def _run_by_sequence(state: _Pass) -> Terms | None:
    """The same for gspo, whose ratio needs every log-probability of a sequence first: the logits are computed twice."""
    if not state.parts():
        return None
    logp, entropy = torch.zeros_like(state.tokens.old), torch.zeros_like(state.tokens.old)
    for part in state.parts():
        _, _, s = state.stats(part)
        logp[part], entropy[part] = s.logp, s.entropy
    terms = evaluate(state.tokens, logp, entropy, state.options)
    if state.grads is not None:
        for part in state.parts():
            head, h, s = state.stats(part)
            slope = None if terms.d_entropy is None else terms.d_entropy[part]
            state.backward(part, head, h, s, terms.d_logp[part], slope)
    return terms


def _run(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    tokens: Tokens,
    options: LossOptions,
    grads: Gradients | None,
    chunk_rows: int | None,
) -> Terms:
    """Compact the valid rows and run over them; `grads` is filled on the way."""
    index = tokens.valid.nonzero().squeeze(1)
    kept, head, tokens = targets[index], head.take(index), tokens.take(index)
    _check_targets(kept, head)
    state = _Pass(hidden, index, head, kept, tokens, options, grads, chunk_rows)
    terms = (_run_by_sequence if options.loss_type == "gspo" else _run_by_token)(state)
    return evaluate(tokens, tokens.old, tokens.old, options) if terms is None else terms


class _Attach(torch.autograd.Function):
    """Hand out gradients that the forward pass has already computed, scaled by the incoming one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: Tensor, grads: Gradients | None
    ) -> Tensor:
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.kinds = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if g is None else (g * grad).to(kind)
            for g, kind in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        )
        return (*scaled, None, None)


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
    chunk_rows: int | None = None,
    backend: str = "auto",
    preset: str | None = None,
    tp_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    dp_group: ProcessGroup | None = None,
    dp_reduction: Reduction = "mean",
    **options: Unpack[LossKeywords],
) -> tuple[Tensor, LossMetrics]:
    """:func:`policy_loss` of the log-probabilities of :func:`linear_logprob`, without logits [N, V] or a second pass.

    Args:
        hidden, weight, bias, temperature, softcap, logit_scale, vocab_size, chunk_rows: as in :func:`linear_logprob`.
        targets: [N] int64; masked slots may hold anything.
        old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens: as in :func:`policy_loss`, packed [N].
        backend: "auto", "triton" or "torch".
        tp_group, vocab_start: as in :func:`linear_logprob`. preset, dp_group, dp_reduction: as in :func:`policy_loss`.
        **options: the fields of :class:`LossOptions`; entropy_coef needs nothing else here.

    Returns:
        The scalar loss (fp32, or fp64 for fp64 input) with gradients for hidden, weight and bias, and the
        :class:`LossMetrics`, entropy included.

    Raises:
        ValueError: shapes that do not fit, unknown names, or an option without the tensor that it needs.
        RuntimeError: backend="triton" where no kernel is available.
    """
    chosen = choose_options(preset, options)
    parallel = DataParallel.make(dp_group, dp_reduction)
    _check_rows(hidden, weight, targets, temperature)
    if old_logp.shape != targets.shape:
        raise ValueError(f"old_logp must be [{targets.shape[0]}], got {tuple(old_logp.shape)}")
    resolve(require_torch(backend, tp_group), "linear_policy_loss", hidden.device)
    shard = VocabShard.make(tp_group, weight.shape[0], vocab_start, vocab_size)
    head = Head.make(weight, bias, temperature, softcap, logit_scale, vocab_size, hidden.dtype, shard)
    differentiable = [
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)
    ]
    wanted = (differentiable[0], differentiable[1], differentiable[2])
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        kind = statistics_dtype(hidden)
        if parallel is not None:
            chosen = parallel.share(chosen, old_logp, mask, rollout_logp, cu_seqlens)
        tokens = prepare(old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens, chosen, kind)
        grads = Gradients.zeros(hidden, weight, bias, wanted) if any(wanted) else None
        terms = _run(hidden.detach(), head, targets, tokens, chosen, grads, chunk_rows)
        metrics = finish(terms, tokens.dropped, has_entropy=True)
        if parallel is not None:
            parallel.unscale_(metrics)
    loss: Tensor = _Attach.apply(hidden, weight, bias, terms.loss, grads)  # type: ignore[no-untyped-call]
    return loss, metrics

"""What the linear losses compute, without autograd: chunk by chunk on PyTorch operations, or handed to the Triton row pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muonrl_kernels.linear_head import Gradients, Head, RowStats, statistics_dtype
from muonrl_kernels.metrics import SUMS
from muonrl_kernels.options import LossOptions
from muonrl_kernels.policy_loss import Terms, evaluate
from muonrl_kernels.tokens import Tokens, prepare

__all__ = ["TokenInputs", "check_targets", "compute_loss", "logprob_backward", "logprob_forward"]


def check_targets(targets: Tensor, head: Head) -> None:
    """Out-of-range targets are named on the CPU; on a GPU the look would cost a synchronisation."""
    if targets.device.type == "cpu" and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= head.columns:
            raise ValueError(f"targets of valid rows must lie in 0..{head.columns - 1}, found {low}..{high}")


def logprob_forward(
    hidden: Tensor, head: Head, targets: Tensor, rows: int | None, triton: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) [N], each of its own memory, in chunks of `rows`."""
    if triton:
        from muonrl_kernels import linear_triton

        outputs = linear_triton.logprob_forward(hidden, head, targets, rows)
    else:
        outputs = torch.zeros(3, hidden.shape[0], dtype=statistics_dtype(hidden), device=hidden.device)
        for part in head.chunks(hidden.shape[0], rows):
            s = head.take(part).stats(hidden[part], targets[part])
            for row, values in zip(outputs, (s.logp, s.entropy, s.lse), strict=True):
                row[part] = values
    logp, entropy, lse = outputs.unbind()
    return logp.clone(), entropy.clone(), lse.clone()


def logprob_backward(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    d_outputs: tuple[Tensor, Tensor, Tensor],
    grads: Gradients,
    rows: int | None,
    triton: bool,
) -> None:
    """Add the gradients of the three outputs [N] to `grads`; the logits are computed again, chunk by chunk."""
    if triton:
        from muonrl_kernels import linear_triton

        linear_triton.logprob_backward(hidden, head, targets, d_outputs, grads, rows)
        return
    d_logp, d_entropy, d_lse = d_outputs
    used = ((d_logp != 0) | (d_entropy != 0) | (d_lse != 0)).nonzero().squeeze(1)
    with_entropy = bool((d_entropy != 0).any())
    for part in head.chunks(used.numel(), rows):
        index = used[part]
        chosen, h, y = head.take(index), hidden[index], targets[index]
        slope = d_entropy[index] if with_entropy else None
        dz = chosen.logit_grad(chosen.stats(h, y), y, d_logp[index], slope, d_lse[index])
        grads.add(chosen, dz, h, index)


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
            s = s.take(kept)
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
        del s  # before the next chunk's logits come
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
        del s
    terms = evaluate(state.tokens, logp, entropy, state.options)
    if state.grads is not None:
        for part in state.parts():
            head, h, s = state.stats(part)
            slope = None if terms.d_entropy is None else terms.d_entropy[part]
            state.backward(part, head, h, s, terms.d_logp[part], slope)
            del s
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
    check_targets(kept, head)
    state = _Pass(hidden, index, head, kept, tokens, options, grads, chunk_rows)
    terms = (_run_by_sequence if options.loss_type == "gspo" else _run_by_token)(state)
    return evaluate(tokens, tokens.old, tokens.old, options) if terms is None else terms


@dataclass(frozen=True)
class TokenInputs:
    """The caller's token tensors, packed [N] (and the bounds of their sequences); old_logp is not read if on_policy."""

    old_logp: Tensor
    advantages: Tensor
    mask: Tensor
    rollout_logp: Tensor | None
    ref_logp: Tensor | None
    cu_seqlens: Tensor | None
    on_policy: bool = False


def _run_triton_by_sequence(
    hidden: Tensor, head: Head, targets: Tensor, tokens: Tokens, options: LossOptions, grads: Gradients | None,
    rows: int | None,
) -> tuple[Terms, Tensor]:  # fmt: skip
    """gspo on the row kernels: the sequences' sums are PyTorch operations between two passes; masked rows are zeros."""
    from muonrl_kernels import linear_triton

    h = torch.where(tokens.valid.unsqueeze(1), hidden, 0.0)
    y = torch.where(tokens.valid, targets, 0)
    logp, entropy, _ = linear_triton.logprob_forward(h, head, y, rows).unbind()
    terms = evaluate(tokens, logp, entropy, options)
    largest = tokens.share.abs().amax()
    unit = torch.where(largest > 0, largest, 1.0)
    if grads is not None:
        nothing = torch.zeros_like(terms.d_logp)
        d_entropy = nothing if terms.d_entropy is None else torch.where(tokens.valid, terms.d_entropy, 0.0)
        slopes = (terms.d_logp / unit, d_entropy / unit, nothing)
        linear_triton.logprob_backward(h, head, y, slopes, grads, rows)
    return terms, unit


def compute_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    given: TokenInputs,
    options: LossOptions,
    grads: Gradients | None,
    chunk_rows: int | None,
    valid_rows: int | None,
    triton: bool,
) -> tuple[Terms, Tensor | None]:
    """Loss and metrics of a call, `dropped` included; `grads` is filled, up to the factor that is returned, if any."""
    tokens = prepare(
        given.old_logp, given.advantages, given.mask, given.rollout_logp, given.ref_logp, given.cu_seqlens, options,
        statistics_dtype(hidden),
    )  # fmt: skip
    if given.on_policy:
        tokens = replace(tokens, on_policy=True)
    scale = None
    if not triton or hidden.shape[0] == 0:
        terms = _run(hidden, head, targets, tokens, options, grads, chunk_rows)
    elif options.loss_type == "gspo":
        terms, scale = _run_triton_by_sequence(hidden, head, targets, tokens, options, grads, chunk_rows)
    else:
        from muonrl_kernels import linear_triton

        terms, scale = linear_triton.run_loss(
            hidden, head, targets, tokens, options, grads, chunk_rows, valid_rows
        )
    terms.sums[SUMS.index("dropped")] = tokens.dropped
    return terms, scale

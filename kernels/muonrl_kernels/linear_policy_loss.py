"""Policy loss and log-probabilities from hidden states through the language-model head; the logits never exist whole.

`linear_policy_loss` computes its gradients inside the forward pass: once a row's logsumexp is known, dL/dlogp is known in
closed form, so each chunk of rows needs three products (logits, d hidden, d weight) and nothing is computed again.
Rows that are masked out never enter a product; rows whose gradient is exactly 0 skip the last two.
"""

from __future__ import annotations

import math
from typing import Any, Final, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from muonrl_kernels.backend import takes_loss_kernels
from muonrl_kernels.linear_compute import (
    TokenInputs,
    check_targets,
    compute_loss,
    logprob_backward,
    logprob_forward,
)
from muonrl_kernels.linear_head import Gradients, Head
from muonrl_kernels.metrics import LossMetrics
from muonrl_kernels.options import LossKeywords, LossOptions, choose_options
from muonrl_kernels.parallel import DataParallel, Reduction, VocabShard, require_torch
from muonrl_kernels.policy_loss import refuse_second_derivative

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
        triton: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head, ctx.rows, ctx.triton = head, rows, triton
        return logprob_forward(hidden, head, targets, rows, triton)

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor, d_entropy: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias, targets = ctx.saved_tensors
        grads = Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad[:3])
        logprob_backward(hidden, ctx.head, targets, (d_logp, d_entropy, d_lse), grads, ctx.rows, ctx.triton)
        d_weight = None if grads.weight is None else grads.weight.to(weight.dtype)
        d_bias = None if grads.bias is None else grads.bias.to(bias.dtype)
        return grads.hidden, d_weight, d_bias, None, None, None, None


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
    if torch.compiler.is_compiling() and tp_group is None:
        from muonrl_kernels import loss_ops

        temperatures, numbers = _head_arguments(temperature, softcap, logit_scale)
        outputs: tuple[Tensor, Tensor, Tensor] = loss_ops.linear_logprob_op(
            hidden, weight, bias, targets, temperatures, numbers, vocab_size, chunk_rows, backend
        )
        return outputs
    requested = require_torch(backend, None if tp_group is None else "tp_group")
    triton = takes_loss_kernels(requested, "linear_logprob", hidden.device, hidden.dtype)
    shard = VocabShard.make(tp_group, weight.shape[0], vocab_start, vocab_size)
    head = Head.make(weight, bias, temperature, softcap, logit_scale, vocab_size, hidden.dtype, shard)
    check_targets(targets, head)
    with torch.autocast(hidden.device.type, enabled=False):
        result: tuple[Tensor, Tensor, Tensor] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, head, targets, chunk_rows, triton
        )
    return result


class _Attach(torch.autograd.Function):
    """Hand out gradients that the forward pass has already computed, scaled by the incoming one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        grads: Gradients | None,
        scale: Tensor | None,
    ) -> Tensor:
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.weight, grads.bias, scale)
        ctx.kinds = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        *grads, scale = ctx.saved_tensors
        factor = grad if scale is None else grad * scale
        scaled = (
            None if g is None else _scaled(g, factor, kind, look=scale is None)
            for g, kind in zip(grads, ctx.kinds, strict=True)
        )
        return (*scaled, None, None, None)


_SCALED_ELEMENTS: Final = 1 << 22
"""Elements of a gradient that are scaled at a time, so that no second fp32 copy of it exists."""


def _scaled(g: Tensor, factor: Tensor, kind: torch.dtype, *, look: bool) -> Tensor:
    """factor g in dtype `kind`; g itself, which autograd copies if it must, where nothing has to be done to it.

    Looking at the factor is free on the CPU only; elsewhere it would be a synchronisation. The Triton path never looks.
    """
    if look and g.dtype == kind and factor.device.type == "cpu" and float(factor) == 1.0:
        return g
    out = torch.empty_like(g, dtype=kind)
    rows = max(1, _SCALED_ELEMENTS * len(g) // max(1, g.numel()))
    for lo in range(0, len(g), rows):
        out[lo : lo + rows] = g[lo : lo + rows] * factor
    return out


def _tokens(
    targets: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    rollout_logp: Tensor | None,
    ref_logp: Tensor | None,
    cu_seqlens: Tensor | None,
) -> TokenInputs:
    """The tokens as they are computed with."""
    on_policy = old_logp is None
    if old_logp is None:
        if rollout_logp is not None:
            raise ValueError("rollout_logp needs old_logp: the importance weight is their ratio")
        old_logp = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    if old_logp.shape != targets.shape:
        raise ValueError(f"old_logp must be [{targets.shape[0]}], got {tuple(old_logp.shape)}")
    return TokenInputs(old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens, on_policy)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    given: TokenInputs,
    options: LossOptions,
    parallel: DataParallel | None,
    chunk_rows: int | None,
    valid_rows: int | None,
    triton: bool,
) -> tuple[Tensor, LossMetrics]:
    """Loss, gradients for whatever wants one, and metrics, once the arguments are known to be good."""
    differentiable = [
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)
    ]
    wanted = (differentiable[0], differentiable[1], differentiable[2])
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        if parallel is not None:
            tokens = (given.old_logp, given.mask, given.rollout_logp, given.cu_seqlens)
            options = parallel.share(options, *tokens)
        grads = Gradients.zeros(hidden, weight, bias, wanted) if any(wanted) else None
        terms, scale = compute_loss(
            hidden.detach(), head, targets, given, options, grads, chunk_rows, valid_rows, triton
        )
        metrics = LossMetrics(terms.sums, terms.extrema)
        if parallel is not None:
            parallel.unscale_(metrics)
    loss: Tensor = _Attach.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, terms.loss, grads, scale
    )
    return loss, metrics


def _head_arguments(
    temperature: float | Tensor, softcap: float | None, logit_scale: float
) -> tuple[Tensor | None, list[float]]:
    """What the operators take: temperatures by row, and numbers (NaN for no softcap)."""
    per_row = temperature if isinstance(temperature, Tensor) else None
    number = 1.0 if isinstance(temperature, Tensor) else float(temperature)
    return per_row, [number, math.nan if softcap is None else float(softcap), float(logit_scale)]


def _compiled(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    given: TokenInputs,
    options: LossOptions,
    head: tuple[Tensor | None, list[float]],
    sizes: tuple[int | None, int | None, int | None],
    backend: str,
) -> tuple[Tensor, LossMetrics]:
    """The loss as one operator of a compiled graph; sizes are vocab_size, chunk_rows and valid_rows."""
    from muonrl_kernels import loss_ops

    texts, numbers, normalizer = loss_ops.encode(options)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss, _, _, _, sums, extrema, _ = loss_ops.linear_policy_loss_op(
        hidden, weight, bias, targets, given.old_logp, given.advantages, given.mask, given.rollout_logp, given.ref_logp,
        head[0], given.cu_seqlens, normalizer, given.on_policy, head[1], *sizes, wanted, texts, numbers, backend,
    )  # fmt: skip
    return loss, LossMetrics(sums.detach(), extrema.detach())


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logp: Tensor | None,
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
    valid_rows: int | None = None,
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
            Without old_logp rollout_logp cannot be given.
        valid_rows: upper bound on the number of valid rows, where the host knows one: on a GPU, which is not asked for the
            number, the products run over so many rows instead of all N. Too small a bound makes the loss NaN there.
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
    given = _tokens(targets, old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens)
    if torch.compiler.is_compiling() and tp_group is None and parallel is None:
        transform = _head_arguments(temperature, softcap, logit_scale)
        sizes = (vocab_size, chunk_rows, valid_rows)
        return _compiled(hidden, weight, bias, targets, given, chosen, transform, sizes, backend)
    requested = require_torch(backend, None if tp_group is None else "tp_group")
    triton = takes_loss_kernels(requested, "linear_policy_loss", hidden.device, hidden.dtype)
    shard = VocabShard.make(tp_group, weight.shape[0], vocab_start, vocab_size)
    head = Head.make(weight, bias, temperature, softcap, logit_scale, vocab_size, hidden.dtype, shard)
    return _run(hidden, weight, bias, targets, head, given, chosen, parallel, chunk_rows, valid_rows, triton)

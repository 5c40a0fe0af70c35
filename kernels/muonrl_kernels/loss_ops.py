"""The losses as operators of torch.library, each with a fake, so that torch.compile sees one node and no graph break.

The operators run on every device and decide by their `backend` argument what runs. Eager calls do not pass through here: the
dispatcher costs more than a small elementwise loss. Options travel as a string and a list of numbers (NaN is None);
gradients that are not wanted are empty tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from muonrl_kernels.backend import takes_loss_kernels
from muonrl_kernels.linear_compute import (
    TokenInputs,
    check_targets,
    compute_loss,
    logprob_backward,
    logprob_forward,
)
from muonrl_kernels.linear_head import Gradients, Head, statistics_dtype
from muonrl_kernels.metrics import EXTREMA, SUMS
from muonrl_kernels.options import LossOptions
from muonrl_kernels.policy_loss import ONCE, compute

__all__ = ["encode", "linear_logprob_op", "linear_policy_loss_op", "policy_loss_op"]

_TEXTS: Final = tuple(f.name for f in fields(LossOptions) if isinstance(f.default, str))
_FLAGS: Final = tuple(f.name for f in fields(LossOptions) if isinstance(f.default, bool))
_NUMBERS: Final = tuple(f.name for f in fields(LossOptions) if f.name not in _TEXTS)


def encode(o: LossOptions) -> tuple[str, list[float], Tensor | None]:
    """Options as an operator takes them: texts, numbers, and the normalizer where it is a tensor."""
    texts = ",".join([getattr(o, name) for name in _TEXTS])
    values = [getattr(o, name) for name in _NUMBERS]
    numbers = [math.nan if v is None or isinstance(v, Tensor) else float(v) for v in values]
    return texts, numbers, o.normalizer if isinstance(o.normalizer, Tensor) else None


def _decode(texts: str, numbers: Sequence[float], normalizer: Tensor | None) -> LossOptions:
    values: dict[str, Any] = dict(zip(_TEXTS, texts.split(","), strict=True))
    for name, value in zip(_NUMBERS, numbers, strict=True):
        values[name] = None if math.isnan(value) else bool(value) if name in _FLAGS else value
    if normalizer is not None:
        values["normalizer"] = normalizer
    return LossOptions(**values)


@torch.library.custom_op("muonrl::scale_gradient", mutates_args=())
def _scale_gradient(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """gradient * factor in the dtype of `like`: the whole backward pass of a loss whose gradient is known."""
    return (gradient * factor).to(like.dtype)


@_scale_gradient.register_fake
def _(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=like.dtype)


def _refuse_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(ONCE)


_scale_gradient.register_autograd(_refuse_second_derivative)


@torch.library.custom_op("muonrl::policy_loss", mutates_args=())
def policy_loss_op(
    logp: Tensor,
    entropy: Tensor | None,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_logp: Tensor | None,
    ref_logp: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: Tensor | None,
    texts: str,
    numbers: Sequence[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, d_logp, d_entropy, sums, extrema, factor that the gradients lack) of :func:`muonrl_kernels.policy_loss`."""
    options = _decode(texts, numbers, normalizer)
    triton = takes_loss_kernels(backend, "policy_loss", logp.device, logp.dtype, options.loss_type)
    with torch.no_grad():
        terms, scale = compute(
            logp, old_logp, advantages, mask, rollout_logp, ref_logp, entropy, cu_seqlens, options, triton, None
        )  # fmt: skip
    d_entropy = terms.loss.new_empty(0) if terms.d_entropy is None else terms.d_entropy.reshape(logp.shape)
    factor = torch.ones_like(terms.loss) if scale is None else scale
    d_logp = terms.d_logp.reshape(logp.shape)
    return terms.loss.clone(), d_logp, d_entropy, terms.sums, terms.extrema, factor


@policy_loss_op.register_fake
def _(
    logp: Tensor, entropy: Tensor | None, old_logp: Tensor, advantages: Tensor, mask: Tensor, rollout_logp: Tensor | None,
    ref_logp: Tensor | None, cu_seqlens: Tensor | None, normalizer: Tensor | None, texts: str, numbers: Sequence[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kind = statistics_dtype(logp)
    used = entropy is not None and numbers[_NUMBERS.index("entropy_coef")] != 0.0
    d_logp = torch.empty(logp.shape, dtype=kind, device=logp.device)
    return (
        logp.new_empty((), dtype=kind),
        d_logp,
        torch.empty_like(d_logp) if used else logp.new_empty(0, dtype=kind),
        logp.new_empty(len(SUMS), dtype=torch.float32),
        logp.new_empty(len(EXTREMA), dtype=torch.float32),
        logp.new_empty((), dtype=kind),
    )


def _keep_token_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], inputs[1], output[1], output[2], output[5])


def _token_gradients(ctx: Any, d_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    logp, entropy, d_logp, d_entropy, scale = ctx.saved_tensors
    if d_loss is None:
        return (None,) * 12
    factor = d_loss * scale
    entropy_grad = None if d_entropy.numel() == 0 else _scale_gradient(d_entropy, factor, entropy)
    return _scale_gradient(d_logp, factor, logp), entropy_grad, *(None,) * 10


policy_loss_op.register_autograd(_token_gradients, setup_context=_keep_token_gradients)


def _head(
    weight: Tensor, bias: Tensor | None, temperatures: Tensor | None, numbers: Sequence[float], vocab_size: int | None,
    dtype: torch.dtype,
) -> Head:  # fmt: skip
    """The head from an operator's arguments; numbers are temperature, softcap (NaN: none) and logit_scale."""
    temperature, softcap, scale = numbers
    given = temperature if temperatures is None else temperatures
    return Head.make(weight, bias, given, None if math.isnan(softcap) else softcap, scale, vocab_size, dtype)


def _given(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if gradient is None else gradient


@torch.library.custom_op("muonrl::linear_policy_loss", mutates_args=())
def linear_policy_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_logp: Tensor | None,
    ref_logp: Tensor | None,
    temperatures: Tensor | None,
    cu_seqlens: Tensor | None,
    normalizer: Tensor | None,
    on_policy: bool,
    head_numbers: Sequence[float],
    vocab_size: int | None,
    chunk_rows: int | None,
    valid_rows: int | None,
    wanted: Sequence[bool],
    texts: str,
    numbers: Sequence[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, d_hidden, d_weight, d_bias, sums, extrema, factor) of :func:`muonrl_kernels.linear_policy_loss`."""
    triton = takes_loss_kernels(backend, "linear_policy_loss", hidden.device, hidden.dtype)
    options = _decode(texts, numbers, normalizer)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = _head(weight, bias, temperatures, head_numbers, vocab_size, hidden.dtype)
        given = TokenInputs(old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens, on_policy)
        grads = Gradients.zeros(hidden, weight, bias, (wanted[0], wanted[1], wanted[2]))
        terms, scale = compute_loss(
            hidden.detach(), head, targets, given, options, grads if any(wanted) else None, chunk_rows,
            valid_rows, triton,
        )  # fmt: skip
    loss = terms.loss
    parts = [_given(g, loss) for g in (grads.hidden, grads.weight, grads.bias)]
    factor = torch.ones_like(loss) if scale is None else scale.clone()
    return loss.clone(), parts[0], parts[1], parts[2], terms.sums, terms.extrema, factor


@linear_policy_loss_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor,
    rollout_logp: Tensor | None, ref_logp: Tensor | None, temperatures: Tensor | None, cu_seqlens: Tensor | None,
    normalizer: Tensor | None, on_policy: bool, head_numbers: Sequence[float], vocab_size: int | None,
    chunk_rows: int | None, valid_rows: int | None, wanted: Sequence[bool], texts: str, numbers: Sequence[float], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kind = statistics_dtype(hidden)
    return (
        hidden.new_empty((), dtype=kind),
        *_fake_gradients(hidden, weight, bias, wanted),
        hidden.new_empty(len(SUMS), dtype=torch.float32),
        hidden.new_empty(len(EXTREMA), dtype=torch.float32),
        hidden.new_empty((), dtype=kind),
    )


def _fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    kind = statistics_dtype(hidden)
    nothing = hidden.new_empty(0, dtype=kind)
    return (
        hidden.new_empty(hidden.shape) if wanted[0] else nothing,
        hidden.new_empty(weight.shape, dtype=kind) if wanted[1] else nothing.clone(),
        nothing.clone() if bias is None or not wanted[2] else hidden.new_empty(bias.shape, dtype=kind),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[1:4], output[6])


def _gradients(ctx: Any, d_loss: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, *found, scale = ctx.saved_tensors
    if d_loss is None:
        return (None,) * 21
    factor = d_loss * scale
    scaled = (
        None if like is None or g.numel() != like.numel() else _scale_gradient(g, factor, like)
        for g, like in zip(found, (hidden, weight, bias), strict=True)
    )
    return *scaled, *(None,) * 18


linear_policy_loss_op.register_autograd(_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("muonrl::linear_logprob", mutates_args=())
def linear_logprob_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    head_numbers: Sequence[float],
    vocab_size: int | None,
    chunk_rows: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`muonrl_kernels.linear_logprob`."""
    triton = takes_loss_kernels(backend, "linear_logprob", hidden.device, hidden.dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = _head(weight, bias, temperatures, head_numbers, vocab_size, hidden.dtype)
        check_targets(targets, head)
        return logprob_forward(hidden.detach(), head, targets, chunk_rows, triton)


@linear_logprob_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor | None,
    head_numbers: Sequence[float], vocab_size: int | None, chunk_rows: int | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    row = hidden.new_empty(hidden.shape[:1], dtype=statistics_dtype(hidden))
    return row, torch.empty_like(row), torch.empty_like(row)


@torch.library.custom_op("muonrl::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    d_logp: Tensor,
    d_entropy: Tensor,
    d_lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    head_numbers: Sequence[float],
    vocab_size: int | None,
    chunk_rows: int | None,
    wanted: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    triton = takes_loss_kernels(backend, "linear_logprob", hidden.device, hidden.dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = _head(weight, bias, temperatures, head_numbers, vocab_size, hidden.dtype)
        grads = Gradients.zeros(hidden, weight, bias, (wanted[0], wanted[1], wanted[2]))
        slopes = (d_logp, d_entropy, d_lse)
        logprob_backward(hidden.detach(), head, targets, slopes, grads, chunk_rows, triton)
    return _given(grads.hidden, d_logp), _given(grads.weight, d_logp), _given(grads.bias, d_logp)


@_linear_logprob_backward.register_fake
def _(
    d_logp: Tensor, d_entropy: Tensor, d_lse: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
    temperatures: Tensor | None, head_numbers: Sequence[float], vocab_size: int | None, chunk_rows: int | None,
    wanted: Sequence[bool], backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake_gradients(hidden, weight, bias, wanted)


_linear_logprob_backward.register_autograd(_refuse_second_derivative)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _logprob_gradients(
    ctx: Any, d_logp: Tensor, d_entropy: Tensor, d_lse: Tensor
) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, temperatures = ctx.saved_tensors
    numbers, vocab_size, chunk_rows, backend = ctx.rest
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    found = _linear_logprob_backward(
        d_logp, d_entropy, d_lse, hidden, weight, bias, targets, temperatures, numbers, vocab_size, chunk_rows, wanted,
        backend,
    )  # fmt: skip
    inputs = (hidden, weight, bias)
    used = (g.to(x.dtype) if w else None for g, x, w in zip(found, inputs, wanted, strict=True))
    return *used, *(None,) * 6


linear_logprob_op.register_autograd(_logprob_gradients, setup_context=_keep_inputs)

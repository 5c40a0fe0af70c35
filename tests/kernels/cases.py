"""Inputs for the tests of the losses, made in fp64 and rounded to the dtype under test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonrl_kernels import reference

Tensors = dict[str, Tensor]


def token_inputs(*shape: int, spread: float = 0.3, seed: int = 0) -> Tensors:
    """Log-probabilities of three policies, advantages and a mask, fp64."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp = -draw().abs() - 0.1
    old = logp + spread * draw()
    return {
        "logp": logp,
        "old_logp": old,
        "advantages": draw(),
        "mask": torch.rand(*shape, generator=generator) < 0.7,
        "rollout_logp": old + spread * draw(),
        "ref_logp": logp + spread * draw(),
        "entropy": draw().abs(),
    }


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Floating-point entries in `dtype`."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}


def linear_inputs(n: int, h: int, v: int, *, sharp: float = 1.0, seed: int = 0) -> Tensors:
    """Hidden states, head and token inputs whose old policy is close to what the head says, fp64.

    `sharp` scales the logits: at 30 most rows are certain of one token, the target of every other row.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = draw(n, h), sharp * draw(v, h) / h**0.5, draw(v) * 0.1
    targets = torch.randint(0, v, (n,), generator=generator)
    if sharp > 1:
        targets[::2] = (hidden @ weight.mT + bias)[::2].argmax(1)
    logp, _, _ = reference.linear_logprob(hidden, weight, targets, bias=bias)
    tokens = token_inputs(n, seed=seed + 1)
    shift = tokens["old_logp"] - tokens["logp"]
    old = (logp + shift).float().double()
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "targets": targets,
        "old_logp": old,
        "advantages": tokens["advantages"].float().double(),
        "mask": tokens["mask"],
        "rollout_logp": (old + 0.3 * draw(n)).float().double(),
        "ref_logp": (logp + 0.3 * draw(n)).float().double(),
    }


def values_and_grads(
    function: Any, inputs: Tensors, wrt: tuple[str, ...], **options: Any
) -> tuple[Tensor, ...]:
    """The loss (first result if there are several) and its gradients with respect to the named inputs."""
    leaves = {k: t.detach().clone().requires_grad_() if k in wrt else t for k, t in inputs.items()}
    result = function(**leaves, **options)
    loss = result[0] if isinstance(result, tuple) else result
    grads = torch.autograd.grad(loss, [leaves[k] for k in wrt])
    return loss.detach(), *grads

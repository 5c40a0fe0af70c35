"""Hidden states, a head and tokens to compute the loss on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["CLIP_HIGH", "CLIP_LOW", "IS_HIGH", "SEQUENCE", "Batch", "draw", "draw_logp"]

CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
IS_HIGH: Final = 2.0
SEQUENCE: Final = 512
"""Tokens of a sequence, which share an advantage; rows that it does not divide are one sequence."""
_WEIGHT_STD: Final = 0.02
_RATIO_STD: Final = 0.1
"""Spread of the log-ratios: about one token in a hundred is clipped."""


@dataclass(frozen=True)
class Batch:
    """N packed tokens in sequences of equal length.

    Attributes:
        hidden: [N, H] and weight [V, H], leaves that get a gradient; [N, 0] and [0, 0] where only `logp` is used.
        logp: [N] fp32, a leaf: log pi_theta for the elementwise loss.
        targets: [N] int64.
        old_logp, rollout_logp: [N] fp32.
        sequence_advantages: [sequences] fp32. advantages: the same by token, [N].
        mask: [N] bool, with exactly the number of true entries that was asked for. valid: that number.
    """

    hidden: Tensor
    weight: Tensor
    logp: Tensor
    targets: Tensor
    old_logp: Tensor
    rollout_logp: Tensor
    sequence_advantages: Tensor
    advantages: Tensor
    mask: Tensor
    valid: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient: logp alone, or hidden and weight."""
        return (self.logp,) if self.weight.numel() == 0 else (self.hidden, self.weight)

    def double(self) -> Batch:
        """The same with fresh float64 leaves."""
        hidden, weight, logp = (
            x.detach().double().requires_grad_() for x in (self.hidden, self.weight, self.logp)
        )
        return Batch(
            hidden,
            weight,
            logp,
            self.targets,
            self.old_logp.double(),
            self.rollout_logp.double(),
            self.sequence_advantages.double(),
            self.advantages.double(),
            self.mask,
            self.valid,
        )


def _tokens(
    logp: Tensor, valid: int, spread: float, sequence: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Everything about tokens whose log-probability is `logp` [N] but hidden, weight and targets."""
    rows, device = logp.shape[0], logp.device

    def normal(count: int) -> Tensor:
        return torch.randn(count, device=device, generator=generator)

    sequences = rows // sequence if rows % sequence == 0 else 1
    old = logp + spread * normal(rows)
    by_sequence = 0.5 + normal(sequences)
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    mask[torch.randperm(rows, device=device, generator=generator)[:valid]] = True
    return {
        "old_logp": old,
        "rollout_logp": old + spread * normal(rows),
        "sequence_advantages": by_sequence,
        "advantages": by_sequence.repeat_interleave(rows // sequences),
        "mask": mask,
    }


def draw(
    rows: int,
    hidden: int,
    vocabulary: int,
    valid: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    spread: float = _RATIO_STD,
    weight_std: float = _WEIGHT_STD,
    sequence: int = SEQUENCE,
) -> Batch:
    """Gaussian hidden states and weights; `valid` of the rows are valid, and log pi_old is near log pi_theta.

    The logsumexp of a row of Gaussian logits is log V + variance / 2 closely enough, so nothing of size N x V is made here.
    """
    generator = torch.Generator(device).manual_seed(seed)
    h = torch.randn(rows, hidden, device=device, generator=generator).to(dtype)
    w = torch.randn(vocabulary, hidden, device=device, generator=generator).mul_(weight_std).to(dtype)
    targets = torch.randint(vocabulary, (rows,), device=device, generator=generator)
    logits = (h.float() * w[targets].float()).sum(1)
    lse = math.log(vocabulary) + 0.5 * weight_std**2 * h.float().square().sum(1)
    tokens = _tokens(logits - lse, valid, spread, sequence, generator)
    unused = torch.empty(0, device=device)
    return Batch(h.requires_grad_(), w.requires_grad_(), unused, targets, **tokens, valid=valid)


def draw_logp(
    tokens: int,
    valid: int,
    device: torch.device,
    *,
    seed: int = 0,
    spread: float = _RATIO_STD,
    sequence: int = SEQUENCE,
) -> Batch:
    """Tokens for the elementwise loss: log-probabilities alone."""
    generator = torch.Generator(device).manual_seed(seed)
    logp = -torch.rand(tokens, device=device, generator=generator).mul_(3.0)
    nothing = torch.empty(0, 0, device=device)
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)
    rest = _tokens(logp, valid, spread, sequence, generator)
    return Batch(nothing, nothing, logp.requires_grad_(), targets, **rest, valid=valid)

"""The metric sums that the policy loss collects in the same pass as the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["EXTREMA", "SUMS", "LossMetrics"]

SUMS: Final[tuple[str, ...]] = (
    "n",  # 0: valid tokens (mask true, not dropped)
    "loss",  # 1: the loss itself: it adds up over micro-batches and ranks that share one normalizer
    "clip_low",  # 2: tokens whose ratio is held at 1 - clip_low
    "clip_high",  # 3: tokens whose ratio is held at 1 + clip_high
    "clip_dual",  # 4: tokens with A < 0 and a ratio beyond dual_clip
    "w_truncated",  # 5: tokens whose importance weight was cut (tis) or set to zero (icepop)
    "ratio",  # 6: r = pi_theta / pi_old
    "ratio_squared",  # 7: r^2
    "w",  # 8: importance weight pi_old / pi_rollout after truncation
    "w_squared",  # 9: w^2
    "k1_theta_old",  # 10: -x with x = log pi_theta - log pi_old, sampled from pi_old
    "k2_theta_old",  # 11: x^2 / 2
    "k3_theta_old",  # 12: exp(x) - 1 - x
    "k1_old_rollout",  # 13: the same with x = log pi_old - log pi_rollout, sampled from pi_rollout
    "k2_old_rollout",  # 14
    "k3_old_rollout",  # 15
    "k1_ref",  # 16: the same with x = log pi_ref - log pi_theta: the estimators of KL(theta | ref)
    "k2_ref",  # 17
    "k3_ref",  # 18
    "entropy",  # 19: entropy of the next-token distribution, nats
    "abs_delta",  # 20: |log pi_theta - log pi_old|
    "dropped",  # 21: tokens with mask true but a log-probability of pi_old or pi_rollout that is not finite
)
"""Names of the entries of :attr:`LossMetrics.sums`, by index."""

EXTREMA: Final[tuple[str, ...]] = (
    "negated_min_ratio",  # 0: -min r, so that one MAX all-reduce serves both entries
    "max_ratio",  # 1: max r
)
"""Names of the entries of :attr:`LossMetrics.extrema`, by index."""

_COUNTS: Final = frozenset({"n", "loss", "dropped"})
_RENAMED: Final = {"w": "mean_w", "ratio": "mean_ratio"}
_HIDDEN: Final = frozenset({"ratio_squared", "w_squared"})


@dataclass(frozen=True)
class LossMetrics:
    """Two device vectors; nothing but :meth:`as_dict` moves them to the host.

    Attributes:
        sums: fp32 [22], entries named by :data:`SUMS`; reduce over ranks with SUM.
        extrema: fp32 [2], entries named by :data:`EXTREMA`; reduce over ranks with MAX.
        has_entropy: whether the entropy was known; without it ``as_dict`` says nan.
    """

    sums: Tensor
    extrema: Tensor
    has_entropy: bool = True

    def __add__(self, other: LossMetrics) -> LossMetrics:
        """The metrics of two micro-batches together, on the device."""
        return LossMetrics(
            self.sums + other.sums,
            torch.maximum(self.extrema, other.extrema),
            self.has_entropy and other.has_entropy,
        )

    def as_dict(self) -> dict[str, float]:
        """Means over the valid tokens as plain numbers; this is the one synchronisation.

        `n` and `dropped` are counts, `loss` is the loss, `clip_low`, `clip_high`, `clip_dual` and `w_truncated` are shares of
        tokens, `ess` is (sum w)^2 / (n sum w^2) (1 when all weights are equal), the rest are means. Without a valid token
        everything is 0 and both extreme ratios are 1.
        """
        values = dict(zip(SUMS, self.sums.tolist(), strict=True))
        n = values["n"]
        result: dict[str, float] = {}
        for name, total in values.items():
            if name not in _HIDDEN:
                result[_RENAMED.get(name, name)] = total if name in _COUNTS else total / max(n, 1.0)
        weight_energy = n * values["w_squared"]
        result["ess"] = values["w"] ** 2 / weight_energy if weight_energy > 0 else 0.0
        if not self.has_entropy:
            result["entropy"] = float("nan")
        low, high = self.extrema.tolist()
        result["min_ratio"], result["max_ratio"] = (-low, high) if n > 0 else (1.0, 1.0)
        return result

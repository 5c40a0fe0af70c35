"""Options of the policy loss, shared by the elementwise and the linear form, and their validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from torch import Tensor

__all__ = ["Aggregation", "IsLevel", "IsMode", "KlEstimator", "LossKeywords", "LossOptions", "LossType"]

LossType = Literal["ppo", "cispo", "gspo"]
IsMode = Literal["tis", "icepop", "none"]
IsLevel = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "loss_type": ("ppo", "cispo", "gspo"),
    "is_mode": ("tis", "icepop", "none"),
    "is_level": ("token", "sequence"),
    "agg": ("token_mean", "sequence_mean", "constant"),
    "kl": ("k1", "k2", "k3"),
}


class LossKeywords(TypedDict, total=False):
    """The fields of :class:`LossOptions` as keyword arguments, all optional."""

    loss_type: LossType
    clip_low: float
    clip_high: float
    dual_clip: float | None
    is_mode: IsMode
    is_high: float
    is_low: float | None
    is_level: IsLevel
    agg: Aggregation
    normalizer: float | Tensor | None
    beta: float
    kl: KlEstimator
    entropy_coef: float
    log_ratio_clamp: float


@dataclass(frozen=True)
class LossOptions:
    """What the loss computes. With r = pi_theta / pi_old and l the loss of one token:

    Attributes:
        loss_type: "ppo", "cispo" or "gspo" (see the module's text).
        clip_low, clip_high: the ratio is held within 1 - clip_low .. 1 + clip_high.
        dual_clip: bound c > 1 on the loss of tokens with A < 0 and a ratio above c; None is no bound.
        is_mode: "tis" truncates w into [is_low, is_high], "icepop" sets w outside of it to zero, "none" takes w = 1.
        is_high, is_low: those bounds; is_low None is 0.
        is_level: ratio of each token, or the product of the ratios of its sequence.
        agg: "token_mean": sum l / tokens; "sequence_mean": mean over sequences of the mean over their tokens;
            "constant": sum l / normalizer.
        normalizer: takes the place of the number of tokens (or sequences): give that of the whole update when this
            is one of its micro-batches. A number or a one-element device tensor.
        beta, kl: adds beta times the estimator "k1", "k2" or "k3" of KL(theta | ref) to each token's l.
        entropy_coef: subtracts entropy_coef times the entropy from each token's l.
        log_ratio_clamp: log-ratios are clamped to +- this (natural logarithm); outside, their gradient is exactly 0.

    Raises:
        ValueError: an unknown name or a number outside its range.
    """

    loss_type: LossType = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    is_mode: IsMode = "tis"
    is_high: float = 2.0
    is_low: float | None = None
    is_level: IsLevel = "token"
    agg: Aggregation = "token_mean"
    normalizer: float | Tensor | None = None
    beta: float = 0.0
    kl: KlEstimator = "k3"
    entropy_coef: float = 0.0
    log_ratio_clamp: float = 20.0

    def __post_init__(self) -> None:
        for field, allowed in _NAMES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {getattr(self, field)!r}")
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low and clip_high must be >= 0, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and (self.loss_type == "cispo" or not self.dual_clip > 1):
            raise ValueError(f"dual_clip must be > 1 and needs loss_type ppo or gspo, got {self.dual_clip}")
        if not self.is_high > 0 or (self.is_low is not None and not 0 <= self.is_low <= self.is_high):
            raise ValueError(
                f"need 0 <= is_low <= is_high and is_high > 0, got {self.is_low} and {self.is_high}"
            )
        if not self.log_ratio_clamp > 0:
            raise ValueError(f"log_ratio_clamp must be > 0, got {self.log_ratio_clamp}")
        if self.agg == "constant" and self.normalizer is None:
            raise ValueError("agg='constant' divides by a constant: give normalizer")
        if isinstance(self.normalizer, Tensor) and self.normalizer.numel() != 1:
            raise ValueError("normalizer must be a number or a one-element tensor")

    @property
    def needs_sequences(self) -> bool:
        """Whether the tokens of one sequence depend on each other."""
        weighted_by_sequence = self.is_mode != "none" and self.is_level == "sequence"
        return self.loss_type == "gspo" or self.agg == "sequence_mean" or weighted_by_sequence

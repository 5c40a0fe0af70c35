"""Options of the policy loss, shared by the elementwise and the linear form, and their validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict

from torch import Tensor

from muonrl_kernels.presets import presets

__all__ = [
    "Aggregation",
    "IsLevel",
    "IsMode",
    "KlEstimator",
    "LossKeywords",
    "LossOptions",
    "LossType",
    "choose_options",
]

LossType = Literal["ppo", "cispo", "gspo"]
IsMode = Literal["tis", "icepop", "none"]
IsLevel = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]

# Names of other systems, each with its preset only (see muonrl_kernels.presets).
_ForeignLossType = Literal["vanilla", "grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
_ForeignIsMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_ForeignAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
_ForeignKl = Literal["kl", "mse", "low_var_kl"]

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "loss_type": ("ppo", "cispo", "gspo"),
    "is_mode": ("tis", "icepop", "none"),
    "is_level": ("token", "sequence"),
    "agg": ("token_mean", "sequence_mean", "constant"),
    "kl": ("k1", "k2", "k3"),
}


class LossKeywords(TypedDict, total=False):
    """The fields of :class:`LossOptions` as keyword arguments, all optional; with a preset its system's names as well."""

    loss_type: LossType | _ForeignLossType
    clip_low: float
    clip_high: float
    dual_clip: float | None
    is_mode: IsMode | _ForeignIsMode
    is_high: float
    is_low: float | None
    is_level: IsLevel
    agg: Aggregation | _ForeignAggregation
    normalizer: float | Tensor | None
    beta: float
    kl: KlEstimator | _ForeignKl
    kl_weighted: bool
    entropy_coef: float
    log_ratio_clamp: float


@dataclass(frozen=True)
class LossOptions:
    """What the loss computes. With r = pi_theta / pi_old and l the loss of one token:

    Attributes:
        loss_type: "ppo", "cispo" or "gspo" (see the module's text).
        clip_low, clip_high: the ratio is held within 1 - clip_low .. 1 + clip_high. For cispo clip_high may be negative:
            it is an upper bound below 1.
        dual_clip: bound c > 1 on the loss of tokens with A < 0 and a ratio above c; None is no bound.
        is_mode: "tis" truncates w into [is_low, is_high], "icepop" sets w outside of it to zero, "none" takes w = 1.
        is_high, is_low: those bounds; is_low None is 0.
        is_level: ratio of each token, or the product of the ratios of its sequence.
        agg: "token_mean": sum l / tokens; "sequence_mean": mean over sequences of the mean over their tokens;
            "constant": sum l / normalizer.
        normalizer: takes the place of the number of tokens (or sequences): give that of the whole update when this
            is one of its micro-batches. A number or a one-element device tensor.
        beta, kl: adds beta times the estimator "k1", "k2" or "k3" of KL(theta | ref) to each token's l.
        kl_weighted: the estimator is multiplied by r, through which its gradient flows as well (DeepSeek-V3.2,
            arXiv 2512.02556).
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
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    log_ratio_clamp: float = 20.0

    def __post_init__(self) -> None:
        for field, allowed in _NAMES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {getattr(self, field)!r}")
        lowest = -min(1.0, self.clip_low) if self.loss_type == "cispo" else 0.0
        if not self.clip_low >= 0 or not self.clip_high >= lowest:
            raise ValueError(
                f"clip_low must be >= 0 and clip_high >= {lowest}, got {self.clip_low} and {self.clip_high}"
            )
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

    def needs_sequences(self, weighted: bool) -> bool:
        """Whether the tokens of one sequence depend on each other; `weighted` says that there is a rollout policy."""
        by_sequence = weighted and self.is_mode != "none" and self.is_level == "sequence"
        return self.loss_type == "gspo" or self.agg == "sequence_mean" or by_sequence


def choose_options(preset: str | None, given: LossKeywords) -> LossOptions:
    """The options of one call: defaults, then the preset's, then what its names in `given` stand for, then `given`.

    With a preset that bounds CISPO's ratio itself, clip_high is that bound r <= clip_high and clip_low has no effect.

    Raises:
        ValueError: an unknown preset, an unknown name or a number outside its range.
    """
    if preset is None:
        return LossOptions(**given)  # type: ignore[arg-type]  # a foreign name is refused by LossOptions itself
    if preset not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}, or None; got {preset!r}")
    entry = presets[preset]
    chosen: dict[str, Any] = dict(entry.options)
    explicit: dict[str, Any] = {}
    for field, value in given.items():
        meaning = entry.names.get(field, {}).get(value) if isinstance(value, str) else None
        if meaning is None:
            explicit[field] = value
        else:
            chosen.update(meaning)
    chosen.update(explicit)
    if entry.cispo_raw_bound and chosen.get("loss_type") == "cispo":
        chosen["clip_low"], chosen["clip_high"] = 1.0, chosen["clip_high"] - 1.0
    return LossOptions(**chosen)

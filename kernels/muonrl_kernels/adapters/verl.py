"""verl's policy-loss interface on :func:`policy_loss`.

    from verl.trainer.ppo.core_algos import register_policy_loss
    register_policy_loss("muonrl")(make_policy_loss("vanilla"))

and ``policy_loss.loss_mode=muonrl`` in the actor's configuration. Read from verl 0.9.1. verl adds its entropy and KL terms by
itself. Its rollout weights are taken as it computed them: l is linear in A and w >= 0, so they are multiplied into A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from muonrl_kernels.metrics import LossMetrics
from muonrl_kernels.options import LossKeywords
from muonrl_kernels.policy_loss import policy_loss
from muonrl_kernels.presets import presets

__all__ = ["PolicyLossFunction", "make_policy_loss"]

PolicyLossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]

_LOSS_TYPES: Final = tuple(presets["verl"].names["loss_type"])
_AGGREGATIONS: Final = tuple(presets["verl"].names["agg"])


def make_policy_loss(loss_type: str = "vanilla", backend: str = "auto") -> PolicyLossFunction:
    """A function to register with verl, with the clip bounds and the dual clip of its actor's configuration.

    With "gspo" the ratio of a sequence moves all of its tokens by their mean of w A, where verl moves each by its own: the
    same wherever w and A are constant over a sequence.

    Raises:
        ValueError: `loss_type` is not "vanilla", "gspo" or "cispo".
    """
    if loss_type not in _LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(_LOSS_TYPES)}, got {loss_type!r}")

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """verl's arguments, [B, T] each: the loss and its metrics as numbers."""
        if config is None:
            raise ValueError("config must be the actor's configuration, got None")
        mask = response_mask.bool()
        options = _options(config, loss_type)
        options["agg"] = "sequence_mean" if loss_agg_mode == "seq-mean-token-mean" else "constant"
        options["normalizer"] = _normalizer(loss_agg_mode, mask, dict(config.global_batch_info))
        if rollout_is_weights is not None:
            advantages = advantages * rollout_is_weights
        loss, metrics = policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            mask,
            preset="verl",
            backend=backend,
            **options,
        )
        return loss, _metrics(metrics)

    return compute


def _options(config: Any, loss_type: str) -> LossKeywords:
    def bound(name: str) -> float:
        value = getattr(config, name, None)
        return float(config.clip_ratio if value is None else value)

    options: LossKeywords = {"clip_low": bound("clip_ratio_low"), "clip_high": bound("clip_ratio_high")}
    options["is_mode"] = "none"
    options["loss_type"] = loss_type  # type: ignore[typeddict-item]
    if loss_type == "vanilla":
        options["dual_clip"] = float(getattr(config, "clip_ratio_c", 3.0))
    return options


def _normalizer(mode: str, mask: Tensor, batch: dict[str, Any]) -> Tensor | float:
    """What the sum over tokens (of seq-mean-token-mean: over sequences) is divided by, before gradients are averaged.

    Raises:
        ValueError: an unknown mode, or several data-parallel ranks without the count of the whole batch.
    """
    if mode not in _AGGREGATIONS:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(_AGGREGATIONS)}, got {mode!r}")
    ranks = batch.get("dp_size") or 1
    if mode == "token-sum":
        return 1.0 / ranks
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    count = batch.get(name)
    if count is None:
        if ranks > 1:
            raise ValueError(f"{name} must be given with dp_size={ranks}")
        count = mask.sum() if mode == "token-mean" else mask.any(1).sum()
    if mode == "seq-mean-token-sum-norm":
        count = count * (batch.get("loss_scale_factor") or mask.shape[1])
    normalizer: Tensor | float = count / ranks
    return normalizer


def _metrics(metrics: LossMetrics) -> dict[str, Any]:
    values = metrics.as_dict()
    return {
        "actor/pg_clipfrac": values["clip_low"] + values["clip_high"],
        "actor/ppo_kl": values["k1_theta_old"],
        "actor/pg_clipfrac_lower": values["clip_dual"],
    }

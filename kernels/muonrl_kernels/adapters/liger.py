"""Liger's fused linear GRPO loss by its own argument list, on :func:`linear_policy_loss`.

Read from liger-kernel 0.8.5 (``liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss``). `compiled` is accepted and not needed:
nothing is compiled. Chunks are of rows, so `chunk_size` is not theirs and left to the device.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonrl_kernels.linear_policy_loss import linear_logprob, linear_policy_loss
from muonrl_kernels.metrics import SUMS, LossMetrics
from muonrl_kernels.options import LossKeywords

__all__ = ["FusedLinearGRPOLoss"]

_LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo")
_AGGREGATIONS: Final[dict[str, Any]] = {
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "luspo": "constant",
}


class FusedLinearGRPOLoss(nn.Module):
    """A stand-in for ``LigerFusedLinearGRPOLoss``: the same arguments, loss, gradients and metrics.

    Unlike there, masked slots may hold anything; the gradient of the weight is accumulated in fp32.

    Args:
        beta, use_ref_model: weight of k3 of KL(theta | ref), and whether there is a reference at all.
        epsilon_low, epsilon_high: clip bounds; with "cispo" epsilon_high is the bound on the ratio itself.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo" or "luspo".
        max_completion_length: needed by "dr_grpo".
        importance_sampling_level: "token" or "sequence"; "cispo" needs the first, "luspo" the second.
        delta: bound on the ratio of tokens with A < 0, at least 1 + epsilon_high.
        use_bias_correction_kl: multiplies the KL term by the ratio.
        temperature: of the logits. compiled, chunk_size: accepted for the sake of the argument list.

    Raises:
        ValueError: a loss or a combination that is not supported ("sapo" and "vespo" are not).
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(k for k in unused if not k.startswith(("sapo_temperature_", "vespo_")))
        if unknown:
            raise TypeError(f"unexpected arguments: {', '.join(unknown)}")
        if loss_type not in _LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {', '.join(_LOSS_TYPES)}, got {loss_type!r}")
        level = {"cispo": ("token",), "luspo": ("sequence",)}.get(loss_type, ("token", "sequence"))
        if importance_sampling_level not in level:
            raise ValueError(
                f"importance_sampling_level must be {' or '.join(level)} with loss_type={loss_type!r}, "
                f"got {importance_sampling_level!r}"
            )
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError("max_completion_length must be given with loss_type='dr_grpo'")
        if delta is not None and loss_type != "cispo" and delta < 1.0 + epsilon_high:
            raise ValueError(f"delta must be >= 1 + epsilon_high = {1.0 + epsilon_high}, got {delta}")
        self.loss_type, self.temperature = loss_type, temperature
        self.max_completion_length = max_completion_length
        self.use_ref_model, self.beta = use_ref_model, beta
        by_sequence = importance_sampling_level == "sequence"
        self.options: LossKeywords = {
            "loss_type": "cispo" if loss_type == "cispo" else ("gspo" if by_sequence else "ppo"),
            "clip_low": epsilon_low,
            "clip_high": epsilon_high,
            "dual_clip": None if loss_type == "cispo" else delta,
            "is_mode": "none",
            "agg": _AGGREGATIONS.get(loss_type, "token_mean"),
            # Without a reference theirs is pi_theta itself: a KL of 0 with a gradient of 0.
            "beta": beta if use_ref_model else 0.0,
            "kl_weighted": use_bias_correction_kl,
        }

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and metrics, (mean k3 if beta != 0, share of clipped tokens), as device tensors.

        Args:
            _input: hidden states [B, T, H]. lin_weight: [V, H]. bias: [V].
            selected_token_ids, attention_mask, ref_per_token_logps, old_per_token_logps: [B, T].
            advantages: [B]. vllm_is_ratio: [B], [B, 1] or [B, T] weights, >= 0.
            ref_input, ref_weight, ref_bias: the reference model's, where its log-probabilities are not given.
            num_items_in_batch: tokens of the whole update over all processes, for "dapo" and "cispo".

        Raises:
            ValueError: shapes that do not fit, or no reference where one is needed.
        """
        rows, columns = attention_mask.shape
        mask = attention_mask.bool()
        if self.options["beta"] != 0.0 and ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError("use_ref_model needs ref_per_token_logps, or ref_input and ref_weight")
            ref_per_token_logps = self._reference(ref_input, ref_weight, ref_bias, selected_token_ids, mask)
        weighted = advantages.unsqueeze(1)
        if vllm_is_ratio is not None:
            weighted = weighted * (vllm_is_ratio.unsqueeze(1) if vllm_is_ratio.ndim == 1 else vllm_is_ratio)
        options = self.options.copy()
        options["normalizer"] = self._normalizer(mask, num_items_in_batch)
        flat = [None if x is None else x.reshape(-1) for x in (old_per_token_logps, ref_per_token_logps)]
        loss, metrics = linear_policy_loss(
            _input.reshape(rows * columns, -1),
            lin_weight,
            selected_token_ids.reshape(-1),
            flat[0],
            weighted.expand(rows, columns).reshape(-1),
            mask.reshape(-1),
            ref_logp=flat[1],
            bias=bias,
            temperature=self.temperature,
            cu_seqlens=torch.arange(rows + 1, device=_input.device) * columns,
            preset="trl",
            **options,
        )
        return loss, self._metrics(metrics)

    def _normalizer(self, mask: Tensor, num_items: Tensor | float | None) -> Tensor | float:
        if self.loss_type in ("grpo", "luspo"):
            return float(mask.shape[0])
        if self.loss_type == "dr_grpo":
            return float(mask.shape[0] * (self.max_completion_length or 0))
        count = mask.sum().float()
        if self.loss_type == "bnpo":
            return count.clamp(min=1.0)
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if num_items is not None:
            count = torch.as_tensor(num_items, dtype=torch.float32, device=mask.device)
        elif ranks > 1:
            dist.all_reduce(count)
        return (count / ranks).clamp(min=1.0)

    def _reference(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor
    ) -> Tensor:
        """log pi_ref [B, T]; what it is in masked slots does not matter."""
        kept = mask.reshape(-1)
        h = torch.where(kept.unsqueeze(1), hidden.reshape(kept.numel(), -1), 0.0)
        y = torch.where(kept, targets.reshape(-1), 0)
        with torch.no_grad():
            logp, _, _ = linear_logprob(h, weight, y, bias=bias, temperature=self.temperature)
        return logp.reshape(mask.shape)

    def _metrics(self, metrics: LossMetrics) -> tuple[Tensor, ...]:
        """Theirs, on the device; with "cispo" clipped tokens count whatever the sign of A."""
        at = {name: metrics.sums[i] for i, name in enumerate(SUMS)}
        count = at["n"].clamp(min=1.0)
        clipped = (at["clip_low"] + at["clip_high"]) / count
        return (at["k3_ref"] / count, clipped) if self.options["beta"] != 0.0 else (clipped,)

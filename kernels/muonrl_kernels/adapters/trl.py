"""TRL's GRPOTrainer on :func:`linear_policy_loss`: from hidden states to gradients in one pass, logits never whole.

    class Trainer(GRPOLossMixin, GRPOTrainer): ...

Read from and tested against trl 1.16.0. The trainer's own code generates, rewards, logs and steps; only its loss is replaced.
TRL's importance weights for vLLM are taken as it computed them: l is linear in A and w >= 0, so they are multiplied into A.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from muonrl_kernels.linear_policy_loss import linear_policy_loss
from muonrl_kernels.metrics import LossMetrics
from muonrl_kernels.options import LossKeywords

__all__ = ["GRPOLossMixin", "compute_loss", "grpo_options"]

_LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo")
_SCALES: Final = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_TEXT: Final = frozenset(
    {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "tool_mask",
        "advantages",
        "num_items_in_batch",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
    }
)
"""What a batch of text may hold."""


class GRPOLossMixin:
    """Put before GRPOTrainer among the bases: its loss becomes :func:`compute_loss`."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return compute_loss(self, model, inputs)


def grpo_options(args: Any) -> LossKeywords:
    """The options, for ``preset="trl"``, that a GRPOConfig stands for; the normaliser comes with each batch.

    Raises:
        ValueError: what this loss cannot do, or a delta below the upper bound of the clip.
    """
    by_sequence = args.importance_sampling_level == "sequence"
    refused = {
        "loss_type": args.loss_type not in _LOSS_TYPES,
        "importance_sampling_level": by_sequence and args.loss_type == "cispo",
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "entropy_coef": args.entropy_coef != 0.0,
        "use_adaptive_entropy": args.use_adaptive_entropy,
    }
    for name, unable in refused.items():
        if unable:
            allowed = f"; allowed: {', '.join(_LOSS_TYPES)}" if name == "loss_type" else ""
            raise ValueError(
                f"{name}={getattr(args, name)!r} with loss_type={args.loss_type!r} "
                f"is not supported by this loss{allowed}"
            )
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    agg: dict[str, Any] = {"grpo": "sequence_mean", "dr_grpo": "constant", "luspo": "constant"}
    options: LossKeywords = {
        "clip_low": args.epsilon,
        "clip_high": high,
        "beta": args.beta,
        "is_mode": "none",
    }
    options["kl_weighted"] = args.use_bias_correction_kl
    options["agg"] = agg.get(args.loss_type, "token_mean")
    options["loss_type"] = "cispo" if args.loss_type == "cispo" else ("gspo" if by_sequence else "ppo")
    if args.delta is not None and args.loss_type != "cispo":
        if args.delta < 1.0 + high:
            raise ValueError(f"delta must be >= 1 + epsilon_high = {1.0 + high}, got {args.delta}")
        options["dual_clip"] = args.delta
    return options


def _normalizer(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor | float:
    """What TRL divides the sum over tokens (over sequences for loss_type grpo) by, accumulation steps included."""
    training = bool(trainer.model.training)
    steps = trainer.current_gradient_accumulation_steps if training else 1
    kind = trainer.loss_type
    if kind in ("grpo", "luspo"):
        return float(mask.shape[0] * steps)
    if kind == "dr_grpo":
        return float(mask.shape[0] * trainer.max_completion_length * steps)
    if kind == "bnpo":
        return mask.sum().clamp(min=1.0) * steps
    # The count spans a whole generation batch over all processes; gradients are averaged over these later.
    count: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    return count * steps / trainer.args.steps_per_generation if training else count


def _head_options(config: Any) -> dict[str, Any]:
    """What a model does to its logits, by the names that transformers' configurations use for it."""
    text = config.get_text_config()
    scale = next((s for name in _SCALES if (s := getattr(text, name, None)) is not None), None)
    divisor = getattr(text, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if text.model_type == "hyperclovax" else 1.0 / divisor
    return {
        "softcap": getattr(text, "final_logit_softcapping", None),
        "logit_scale": 1.0 if scale is None else float(scale),
    }


def _install(model: Any) -> None:
    """Let ``model(..., policy_loss=arguments)`` answer with the loss, so that DDP's and FSDP's hooks around forward run.

    Called without that argument the model is what it was.
    """
    original = model.forward
    if getattr(original, "computes_policy_loss", False):
        return

    @functools.wraps(original)
    def forward(*args: Any, policy_loss: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if policy_loss is None:
            return original(*args, **kwargs)
        hidden = model.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        return _fused_head(model, hidden, policy_loss)

    forward.computes_policy_loss = True  # type: ignore[attr-defined]
    model.forward = forward


def _gathered(parameter: Any) -> Any:
    """The whole of a parameter that FSDP2 keeps in parts (a DTensor); its gradient goes back to the parts."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _fused_head(model: Any, hidden: Tensor, call: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and metric vectors of completions [B, T] from the backbone's hidden states [B, prompt + T, H]."""
    call = dict(call)
    targets: Tensor = call.pop("targets")
    rows, columns = targets.shape
    hidden = hidden[:, -columns - 1 : -1].reshape(rows * columns, -1)
    if call.pop("cast_lm_head_to_fp32"):
        hidden = hidden.float()
    lm_head = model.get_output_embeddings()
    weight, bias = _gathered(lm_head.weight), _gathered(getattr(lm_head, "bias", None))
    head: dict[str, Any] = {"bias": bias, "temperature": call.pop("temperature")}
    head |= _head_options(model.config)
    flat: dict[str, Any] = {
        k: v.reshape(-1) if isinstance(v, Tensor) and v.ndim == 2 else v for k, v in call.items()
    }
    bounds = torch.arange(rows + 1, device=hidden.device) * columns
    loss, metrics = linear_policy_loss(
        hidden, weight, targets.reshape(-1), cu_seqlens=bounds, preset="trl", **head, **flat
    )
    return {"loss": loss, "sums": metrics.sums, "extrema": metrics.extrema}


def _log(trainer: Any, mode: str, metrics: LossMetrics, options: LossKeywords) -> None:
    """Put what has the same meaning in TRL under TRL's names, the rest under policy_loss/."""
    whole = LossMetrics(trainer.accelerator.reduce(metrics.sums, reduction="sum"), metrics.extrema)
    values, log = whole.as_dict(), trainer._metrics[mode]
    log["entropy"].append(values["entropy"])
    if options["beta"] != 0.0:
        # TRL's "kl" holds the factor r where the loss has it; this is the estimator itself.
        log["policy_loss/k3_ref" if options["kl_weighted"] else "kl"].append(values["k3_ref"])
    if options["loss_type"] == "ppo":
        log["clip_ratio/low_mean"].append(values["clip_low"])
        log["clip_ratio/high_mean"].append(values["clip_high"])
        log["clip_ratio/region_mean"].append(values["clip_low"] + values["clip_high"])
    for name in ("clip_dual", "mean_ratio", "k3_theta_old", "dropped"):
        log[f"policy_loss/{name}"].append(values[name])


def compute_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
    """What ``GRPOTrainer._compute_loss(model, inputs)`` returns, by :func:`linear_policy_loss`.

    Raises:
        ValueError: an option, or a kind of input, that this loss does not support.
    """
    options = grpo_options(trainer.args)
    unknown = sorted(k for k, v in inputs.items() if k not in _TEXT and v is not None)
    if unknown or trainer.aux_loss_enabled:
        raise ValueError(f"this loss takes text without an auxiliary loss, got {unknown or 'aux_loss'}")
    completion, mask = inputs["completion_ids"], inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    advantages: Tensor = inputs["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    if "importance_sampling_ratio" in inputs:
        advantages = advantages * inputs["importance_sampling_ratio"]
    inner = trainer.accelerator.unwrap_model(model)
    _install(inner.get_base_model() if hasattr(inner, "get_base_model") else inner)
    call = {
        "targets": completion,
        "old_logp": inputs.get("old_per_token_logps"),
        "advantages": advantages.expand(completion.shape),
        "mask": mask.bool(),
        "valid_rows": int(mask.sum()),
        "ref_logp": inputs["ref_per_token_logps"] if trainer.args.beta != 0.0 else None,
        "temperature": trainer.temperature,
        "cast_lm_head_to_fp32": trainer.args.cast_lm_head_to_fp32,
        "normalizer": _normalizer(trainer, inputs, mask),
        **options,
    }
    with trainer.accelerator.autocast():
        answer = model(
            input_ids=torch.cat((inputs["prompt_ids"], completion), 1),
            attention_mask=torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1),
            policy_loss=call,
        )
    mode = "train" if trainer.model.training else "eval"
    _log(trainer, mode, LossMetrics(answer["sums"], answer["extrema"]), options)
    loss: Tensor = answer["loss"]
    return loss

"""The learner: proximal log-probabilities, the policy loss over micro-batches, one optimizer step a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonrl.config import Config, LossConfig, OptimizerConfig
from muonrl.training.batch import MicroBatch, Rollout, micro_batches
from muonrl_kernels import Muon, linear_logprob, linear_policy_loss, orthogonality_residual, split_params

MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class GroupReport:
    """One parameter group in one update; ``update_*`` are of the change really applied, weight decay included."""

    grad_norm: float
    update_rms: float
    update_spectral: float  # the largest over the group's matrices
    lr: float


@dataclass(frozen=True)
class UpdateReport:
    """What one update did: the loss metrics over all of its tokens, and each parameter group."""

    metrics: dict[str, float]
    groups: dict[str, GroupReport]
    ns_residual: float
    losses: list[float]  # one a pass
    drift: list[float]  # per rollout: mean |logp before the update - at rollout| of its action tokens


def build_optimizer(model: Any, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon on the hidden matrices and AdamW on the rest, or AdamW on both, as two named groups."""
    split = split_params(model)
    adamw = {
        "lr": config.lr_adamw,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw":
        return torch.optim.AdamW(
            [
                {"params": split.muon, "name": "hidden", **adamw},
                {"params": split.adamw, "name": "other", **adamw},
            ]
        )
    hidden = {"params": split.muon, "name": "hidden", "lr": config.lr_muon}
    return Muon(
        [hidden, {"params": split.adamw, "name": "other", "algorithm": "adamw", **adamw}],
        lr=config.lr_muon,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.adjust_lr,
    )


class Learner:
    """Owns the model and its optimizer. Single-threaded use; ``step`` is one update of the recipe."""

    def __init__(self, model: Any, config: Config) -> None:
        self.model = model.train()
        self.loss_config: LossConfig = config.loss
        self.config: OptimizerConfig = config.optimizer
        self.temperature = config.agent.temperature
        # SPO's retention reads how far the policy has moved, which the proximal "rollout" does not show by itself.
        self.measure_drift = config.algorithm.baseline == "spo" and config.loss.proximal == "rollout"
        self.optimizer = build_optimizer(model, config.optimizer)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.updates = 0

    def _hidden(self, ids: Tensor) -> Tensor:
        return self.model.model(input_ids=ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def logprobs(self, batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Log-probability [B, T-1] of every action token under the current weights, 0 elsewhere."""
        result = []
        for batch in batches:
            hidden = self._hidden(batch.input_ids)[batch.mask]
            logp, _, _ = linear_logprob(
                hidden, self.model.lm_head.weight, batch.targets[batch.mask], temperature=self.temperature
            )
            full = torch.zeros(batch.mask.shape)
            full[batch.mask] = logp
            result.append(full)
        return result

    def step(self, rollouts: Sequence[Rollout]) -> UpdateReport:
        """One update over the whole batch: ``loss.epochs`` passes, each one optimizer step with a token mean over all."""
        batches = list(micro_batches(rollouts, MICRO_BATCH_TOKENS))
        old = (
            [b.rollout_logp for b in batches]
            if self.loss_config.proximal == "rollout"
            else self.logprobs(batches)
        )
        drift = _drift(batches, self.logprobs(batches) if self.measure_drift else old)
        valid = sum(int(b.mask.sum()) for b in batches)
        normalizer = torch.tensor(float(valid if self.loss_config.agg == "token_mean" else len(rollouts)))
        self._set_lr()
        total = None
        losses: list[float] = []
        for _ in range(self.loss_config.epochs):
            self.optimizer.zero_grad(set_to_none=True)
            loss_sum = torch.zeros(())
            for batch, old_logp in zip(batches, old, strict=True):
                loss, metrics = self._loss(batch, old_logp, normalizer)
                loss.backward()
                loss_sum += loss.detach()
                total = metrics if total is None else total + metrics
            groups, residual = self._apply()
            losses.append(float(loss_sum))
        self.updates += 1
        assert total is not None
        return UpdateReport(total.as_dict(), groups, residual, losses, drift)

    def _loss(self, batch: MicroBatch, old_logp: Tensor, normalizer: Tensor) -> tuple[Tensor, Any]:
        c = self.loss_config
        hidden = self._hidden(batch.input_ids)
        rows, width = batch.mask.shape
        return linear_policy_loss(
            hidden.reshape(rows * width, -1),
            self.model.lm_head.weight,
            batch.targets.reshape(-1),
            old_logp.reshape(-1),
            batch.advantages.reshape(-1),
            batch.mask.reshape(-1),
            rollout_logp=batch.rollout_logp.reshape(-1),
            temperature=self.temperature,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            dual_clip=c.dual_clip or None,
            is_mode=c.is_mode,
            is_high=c.is_high,
            is_low=c.is_low or None,
            agg=c.agg,
            loss_type=c.loss_type,
            entropy_coef=c.entropy_coef,
            normalizer=normalizer,
            cu_seqlens=torch.arange(0, rows * width + 1, width),
        )

    def _set_lr(self) -> None:
        warm = self.config.warmup_updates
        scale = min(1.0, (self.updates + 1) / warm) if warm else 1.0
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * scale

    def _apply(self) -> tuple[dict[str, GroupReport], float]:
        """Clip, step, and measure what the step changed."""
        groups = self.optimizer.param_groups
        norms = {g["name"]: _norm([p.grad for p in g["params"] if p.grad is not None]) for g in groups}
        if self.config.max_grad_norm:
            parameters = [p for g in groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        before = {g["name"]: [p.detach().clone() for p in g["params"]] for g in groups}
        self.optimizer.step()
        reports: dict[str, GroupReport] = {}
        residual = 0.0
        for group in groups:
            name = group["name"]
            change = [p.detach() - b for p, b in zip(group["params"], before[name], strict=True)]
            count = sum(d.numel() for d in change)
            reports[name] = GroupReport(
                grad_norm=norms[name],
                update_rms=_norm(change) / count**0.5,
                update_spectral=max((spectral_norm(d) for d in change if d.ndim == 2), default=0.0),
                lr=group["lr"],
            )
            if name == "hidden" and self.config.name == "muon":
                decay = group["lr"] * group["weight_decay"]
                residual = _residual(change, before[name], decay)
        return reports, residual


def _drift(batches: Sequence[MicroBatch], old: Sequence[Tensor]) -> list[float]:
    by_rollout: dict[int, float] = {}
    for batch, logp in zip(batches, old, strict=True):
        moved = ((logp - batch.rollout_logp).abs() * batch.mask).sum(1) / batch.mask.sum(1).clamp_min(1)
        by_rollout.update(zip(batch.index, moved.tolist(), strict=True))
    return [by_rollout[i] for i in range(len(by_rollout))]


def _norm(tensors: Iterable[Tensor]) -> float:
    given = list(tensors)
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(given)))) if given else 0.0


def spectral_norm(matrix: Tensor, iterations: int = 8) -> float:
    """Power-iteration estimate (from below) of the largest singular value of ``matrix`` [m, n]."""
    v = torch.ones(matrix.shape[1]) / matrix.shape[1] ** 0.5
    for _ in range(iterations):
        v = matrix.T @ (matrix @ v)
        v = v / v.norm().clamp_min(1e-30)
    return float((matrix @ v).norm())


def _residual(changes: Sequence[Tensor], before: Sequence[Tensor], decay: float) -> float:
    """Mean over matrices of the orthogonality residual of the update, scaled to mean squared singular value 1.

    The update is what the weight decay leaves of the change. A matrix whose update drowns in the rounding of its weights
    (no gradient so far) is left out.
    """
    values = []
    for change, weight in zip(changes, before, strict=True):
        update = change + decay * weight
        energy = float(update.norm()) / min(update.shape) ** 0.5
        if float(update.norm()) > 16 * torch.finfo(weight.dtype).eps * float(weight.norm()):
            values.append(float(orthogonality_residual(update / energy)))
    return sum(values) / len(values) if values else 0.0

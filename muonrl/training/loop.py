"""The asynchronous loop: rollouts are sampled while the learner updates on those that have finished."""

from __future__ import annotations

import resource
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muonrl.algorithms.advantages import Advantages, compute_advantages
from muonrl.algorithms.shaping import TurnPenalty, turn_penalties
from muonrl.config import Config
from muonrl.policy.model import save_policy
from muonrl.reporting.console import Progress
from muonrl.reporting.metrics import MetricsWriter
from muonrl.tasks.schema import RepairTask
from muonrl.training.batch import flatten
from muonrl.training.checkpoint import (
    load_optimizer,
    prune,
    read_json,
    save_checkpoint,
    save_optimizer,
    write_json,
)
from muonrl.training.collector import Collector
from muonrl.training.learner import Learner, UpdateReport
from muonrl.training.messages import Usage
from muonrl.training.staleness import Selection, staleness_histogram
from muonrl.training.weights import clear_save_faults
from muonrl.trajectory import PolicyId, Trajectory

MODEL, TRAINER = "model", "trainer.json"


class Trainer:
    """One run: owns the learner and the collector; everything it must remember goes into a checkpoint."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        learner: Learner,
        collector: Collector,
        tokenizer: Any,
        metrics: MetricsWriter,
        console: Progress,
        heldout: Sequence[RepairTask],
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.learner, self.collector, self.tokenizer = learner, collector, tokenizer
        self.metrics, self.console, self.heldout = metrics, console, heldout
        self.update = 0
        self.before_seconds = 0.0  # wall time of earlier sittings of a resumed run
        self.heldout_before: float | None = None
        self.heldout_after: float | None = None
        self.began = time.perf_counter()
        self._usage = Usage()
        self._drops: Counter[str] = Counter()
        self._sync = 0.0

    @property
    def wall_seconds(self) -> float:
        return self.before_seconds + time.perf_counter() - self.began

    def run(self) -> None:
        """Evaluate, update until the recipe's count is reached, evaluate again. Raises Interrupted between two steps."""
        if self.heldout_before is None:
            self.heldout_before = self._evaluate("before")
        self._usage = self.collector.usage
        while self.update < self.config.run.updates:
            self.step()
            last = self.update == self.config.run.updates
            if last or self.update % self.config.run.checkpoint_every == 0:
                self.save()
        self.heldout_after = self._evaluate("after")
        self.save()

    def _evaluate(self, label: str) -> float | None:
        samples = self.config.run.eval_samples
        if not samples or not self.heldout:
            return None
        self.console.stage(f"held-out pass@1 {label} training: {len(self.heldout)} tasks x {samples}")
        result = self.collector.evaluate(self.heldout, samples, label)
        self.console.stage(f"held-out pass@1 {label} training: {result:.3f}")
        return result

    def step(self) -> None:
        """One update: collect, weigh, learn, publish, report."""
        began = time.perf_counter()
        waited = self.collector.wait_seconds
        selection = self.collector.collect()
        batch = selection.batch
        now = self.collector.policy
        advantages, penalties = self._advantages(batch)
        rollouts = [flatten(t, list(a)) for t, a in zip(batch, advantages.turns, strict=True)]
        report = self.learner.step(rollouts)
        for trajectory, drift in zip(batch, report.drift, strict=True):
            self.collector.drift[trajectory.task_id] = drift
        self.collector.drain()
        self.collector.publish(PolicyId(now.epoch, now.step + 1), self.learner.model.state_dict())
        self.collector.dispatch()
        self.update += 1
        seconds = time.perf_counter() - began
        record = {
            "update": self.update,
            **_outcome_metrics(batch, penalties),
            **_loss_metrics(report),
            **self._flow_metrics(selection, now, seconds, self.collector.wait_seconds - waited),
            "adv_mean_weighted": advantages.weighted_mean,
            "adv_mu": advantages.mu,
            "adv_sigma": advantages.sigma,
            "adv_quantiles": advantages.quantiles(),
            "tracker_n_eff": self.collector.tracker.n_eff(),
        }
        self.console.update(self.metrics.write(record))

    def _advantages(self, batch: Sequence[Trajectory]) -> tuple[Advantages, list[tuple[TurnPenalty, ...]]]:
        algorithm = self.config.algorithm
        limit = self.config.agent.max_new_tokens
        penalties = [turn_penalties(t.turns, limit, algorithm) for t in batch]
        advantages = compute_advantages(
            [t.reward for t in batch],
            [self.collector.baselines.pop(t.id) for t in batch],
            [[p.c for p in row] for row in penalties],
            [[turn.n_action for turn in t.turns] for t in batch],
            algorithm.normalization,
        )
        return advantages, penalties

    def _flow_metrics(
        self, selection: Selection, now: PolicyId, seconds: float, waited: float
    ) -> dict[str, Any]:
        histogram, mean = staleness_histogram(selection.batch, now)
        usage, before = self.collector.usage, self._usage
        self._usage = usage
        drops = {k: v - self._drops[k] for k, v in self.collector.drops.items() if v != self._drops[k]}
        self._drops = Counter(self.collector.drops)
        sync = self.collector.client.sync_seconds
        sync_before, self._sync = self._sync, sync
        wall = max(usage.wall_seconds - before.wall_seconds, 1e-9)
        sampled = usage.sampled_tokens - before.sampled_tokens
        remaining = self.config.run.updates - self.update
        done_here = self.wall_seconds / max(self.update, 1)
        return {
            "staleness": histogram,
            "staleness_mean": mean,
            "selection_bias": selection.selection_bias,
            "tokens_per_s": sampled / wall,
            "idle_sampler": max(0.0, 1 - (usage.busy_seconds - before.busy_seconds) / wall),
            "idle_learner": waited / seconds,
            "sync_s": sync - sync_before,
            "grade_s": usage.grade_seconds - before.grade_seconds,
            "gradings": usage.gradings - before.gradings,
            "gradings_cached": usage.gradings_cached - before.gradings_cached,
            "sandboxes": usage.sandboxes - before.sandboxes,
            "sandbox_s": usage.sandbox_seconds - before.sandbox_seconds,
            "drops": drops,
            "wall_s": self.wall_seconds,
            "update_s": seconds,
            "eta_s": remaining * done_here,
            "policy": [now.epoch, now.step],
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + usage.rss_mb,
        }

    def save(self) -> Path:
        """Write a checkpoint of everything that a resumed run needs."""
        path = save_checkpoint(self.run_dir / "checkpoints", self.update, self._write)
        prune(self.run_dir / "checkpoints", self.config.run.keep_checkpoints)
        return path

    def _write(self, folder: Path) -> None:
        with clear_save_faults(folder / MODEL):
            save_policy(folder / MODEL, self.learner.model, self.tokenizer)
        save_optimizer(folder, self.learner.optimizer.state_dict())
        state = {
            "update": self.update,
            "wall_s": self.wall_seconds,
            "heldout_before": self.heldout_before,
            "heldout_after": self.heldout_after,
            "learner_updates": self.learner.updates,
            "collector": self.collector.state_dict(),
            "drops": dict(self.collector.drops - self._drops),  # since the last update's record
        }
        write_json(folder / TRAINER, state)
        shutil.copy(self.run_dir / "config.toml", folder / "config.toml")

    def restore(self, folder: Path, *, lost_epoch: int | None) -> None:
        """Continue from a checkpoint; ``lost_epoch`` is the newest epoch of updates that the checkpoint is older than.

        Policies of that lost lineage are never named again: the run goes on in a new epoch.
        """
        state = read_json(folder / TRAINER)
        self.update = int(state["update"])
        self.before_seconds = float(state["wall_s"])
        self.heldout_before = state["heldout_before"]
        self.learner.updates = int(state["learner_updates"])
        self.learner.optimizer.load_state_dict(load_optimizer(folder))
        self.collector.load_state_dict(state["collector"])
        self.collector.drops.update(state["drops"])
        if lost_epoch is not None:
            now = self.collector.policy
            self.collector.policy = PolicyId(max(now.epoch, lost_epoch) + 1, now.step)
            self.collector.tracker.publish(self.collector.policy)


def _outcome_metrics(
    batch: Sequence[Trajectory], penalties: Sequence[Sequence[TurnPenalty]]
) -> dict[str, Any]:
    turns = [turn for t in batch for turn in t.turns]
    kinds = Counter(e.kind for turn in turns for e in turn.tool_errors)
    return {
        "success": sum(t.reward for t in batch) / len(batch),
        "rollouts": len(batch),
        "value_mean": sum(t.value_at_dispatch for t in batch) / len(batch),
        "tokens_action": sum(t.n_action for t in batch),
        "tokens_total": sum(len(s) for t in batch for s in t.segments()),
        "turns_mean": len(turns) / len(batch),
        "tool_error_rate": sum(bool(turn.tool_errors) for turn in turns) / len(turns),
        "tool_errors": dict(kinds),
        "penalised_rate": sum(p.c < 0 for row in penalties for p in row) / len(turns),
        "length_rate": sum(p.c_len < 0 for row in penalties for p in row) / len(turns),
        "truncation_rate": sum(turn.truncated for turn in turns) / len(turns),
        "stops": dict(Counter(t.stop for t in batch)),
        "suspicious": sum(t.grade.suspicious for t in batch),
    }


def _loss_metrics(report: UpdateReport) -> dict[str, Any]:
    m = report.metrics
    return {
        "loss": report.losses[-1],
        "entropy": m["entropy"],
        "clip_low": m["clip_low"],
        "clip_high": m["clip_high"],
        "clip_share": m["clip_low"] + m["clip_high"],
        "tis_truncated": m["w_truncated"],
        "tis_mean": m["mean_w"],
        "ess": m["ess"],
        "k1_theta_old": m["k1_theta_old"],
        "k3_theta_old": m["k3_theta_old"],
        "k1_old_rollout": m["k1_old_rollout"],
        "k3_old_rollout": m["k3_old_rollout"],
        "abs_delta": m["abs_delta"],
        "dropped_rows": m["dropped"],
        "groups": {name: asdict(group) for name, group in report.groups.items()},
        "ns_residual": report.ns_residual,
    }

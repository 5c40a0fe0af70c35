"""Task-level value baselines from a stream of single outcomes: SPO (arXiv 2509.13232) and SPO++ (arXiv 2608.24870).

Each task keeps pseudo-counts alpha of successes and beta of failures; its value is v = alpha / (alpha + beta). Both
trackers forget: SPO by how far the policy has moved since the task was last seen, SPO++ by how many policies were
published since the outcome's own policy. A task has at most one outstanding request.

The random numbers of task sampling stay with the caller (:meth:`ValueTracker.choose` takes a uniform one), so that a tracker's
state is exactly its JSON-able ``state_dict``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from muonrl.config import AlgorithmConfig
from muonrl.errors import CheckpointError
from muonrl.trajectory import PolicyId

Offline = Mapping[str, tuple[int, int]]
"""Task id -> (successes, attempts) of outcomes collected before the run."""

FIRST_POLICY = PolicyId(0, 0)


@dataclass(frozen=True)
class Outcome:
    """A reward with the request that it answers: policy coordinate and value at dispatch, and SPO's drift ``d``."""

    reward: float
    coordinate: int
    frozen: float
    d: float


def prior_counts(successes: int, attempts: int, rho_min: float) -> tuple[float, float]:
    """alpha_0, beta_0 from offline outcomes: N0 (s + 1/2) / (n + 1) with N0 = 1 / (1 - rho_min); 1/2 and 1/2 with none."""
    if not 0 <= successes <= attempts:
        raise ValueError(f"{successes} successes in {attempts} attempts")
    if attempts == 0:
        return 0.5, 0.5
    scale = 1.0 / (1.0 - rho_min) / (attempts + 1)
    return scale * (successes + 0.5), scale * (attempts - successes + 0.5)


def spo_rho(d: float, cfg: AlgorithmConfig) -> float:
    """SPO's retention: rho = 2^(-d / d_half) within [rho_min, rho_max]; ``d`` = mean |delta logp| in nats a token."""
    return min(cfg.rho_max, max(cfg.rho_min, 2.0 ** (-d / cfg.d_half)))


class ValueTracker(ABC):
    """What both baselines share: the outstanding requests, the policy coordinate, and task sampling.

    The order is ``value = dispatch(task)``, the rollout, then ``baseline = observe(task, reward)``; ``cancel(task)`` where a
    fault ate the rollout. ``publish(policy)`` is told of every set of weights that goes to the sampler.
    """

    kind: str

    def __init__(
        self, task_ids: Sequence[str], cfg: AlgorithmConfig, policy: PolicyId = FIRST_POLICY
    ) -> None:
        if not task_ids or len(set(task_ids)) != len(task_ids):
            raise ValueError(
                f"expected distinct task ids, got {len(task_ids)} with {len(set(task_ids))} distinct"
            )
        self.task_ids = tuple(task_ids)
        self._known = frozenset(task_ids)
        self.cfg = cfg
        self._published = [policy]
        # task -> (coordinate of the policy at dispatch, value frozen at dispatch)
        self._outstanding: dict[str, tuple[int, float]] = {}

    @property
    def policy(self) -> PolicyId:
        """The policy published last."""
        return self._published[-1]

    @property
    def outstanding(self) -> tuple[str, ...]:
        """The tasks whose outcome is awaited."""
        return tuple(self._outstanding)

    @property
    def z(self) -> float:
        """SPO++'s coordinate: -ln(rho_min) for each policy published after the first."""
        return self._now * -math.log(self.cfg.rho_min)

    @property
    def _now(self) -> int:
        return len(self._published) - 1

    def dispatch(self, task_id: str) -> float:
        """Begin a request under the current policy and return the task's value, frozen for it."""
        return self.adopt(task_id, self.policy, self.value(task_id))

    def adopt(self, task_id: str, policy: PolicyId, value: float) -> float:
        """Register a request begun earlier under ``policy`` at ``value``: a stored rollout that a checkpoint is older than.

        Raises ValueError if the task already has a request outstanding or the policy was never published.
        """
        if task_id in self._outstanding:
            raise ValueError(f"task {task_id} already has a request outstanding")
        if policy not in self._published:
            raise ValueError(f"task {task_id}: policy {policy} was never published")
        self._check_known(task_id)
        self._outstanding[task_id] = (self._published.index(policy), float(value))
        return float(value)

    def cancel(self, task_id: str) -> None:
        """Forget a request that will have no outcome."""
        self._take(task_id)

    def observe(self, task_id: str, reward: float, d: float = 0.0, policy: PolicyId | None = None) -> float:
        """Take in the outcome of the outstanding request and return the baseline v to subtract from ``reward``.

        ``policy`` is the one that generated the outcome, by default that of the dispatch: a request that waited for a
        place in the sampler may have been played by a later one.

        ``d`` is SPO's drift of the policy over this task's previous trajectory (0 where there is none); SPO++ ignores it.
        """
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"task {task_id}: reward {reward} is outside [0, 1]")
        if policy is not None and policy not in self._published:
            raise ValueError(f"task {task_id}: policy {policy} was never published")
        coordinate, frozen = self._take(task_id)
        if policy is not None:
            coordinate = self._published.index(policy)
        return self._absorb(task_id, Outcome(float(reward), coordinate, frozen, d))

    def publish(self, policy: PolicyId) -> None:
        """Advance to new weights. Policies only ever grow: a reused or older one raises ValueError."""
        if policy <= self.policy:
            raise ValueError(f"published {policy} after {self.policy}")
        self._published.append(policy)

    def value(self, task_id: str) -> float:
        """The success probability that the tracker expects of the task now, in (0, 1)."""
        alpha, beta = self._counts(task_id)
        return alpha / (alpha + beta)

    def sampling_weights(self) -> npt.NDArray[np.float64]:
        """sqrt(v (1 - v)) + sampling_floor in the order of ``task_ids``; 0 for a task with a request outstanding."""
        v = np.array([self.value(t) for t in self.task_ids])
        free = np.array([t not in self._outstanding for t in self.task_ids])
        weights: npt.NDArray[np.float64] = np.where(
            free, np.sqrt(v * (1.0 - v)) + self.cfg.sampling_floor, 0.0
        )
        return weights

    def choose(self, uniform: float) -> str | None:
        """The task that a uniform number in [0, 1) picks by weight; None while every task is outstanding."""
        cumulative = np.cumsum(self.sampling_weights())
        if cumulative[-1] == 0.0:
            return None
        # Rounding must not reach the very end; side="right" steps over tasks of weight 0, which repeat the sum before them.
        target = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
        return self.task_ids[int(np.searchsorted(cumulative, target, side="right"))]

    def n_eff(self, task_id: str | None = None) -> float:
        """The effective number of outcomes, alpha + beta: of one task, or the mean over tasks."""
        if task_id is not None:
            return sum(self._counts(task_id))
        return float(np.mean([sum(self._counts(t)) for t in self.task_ids]))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON-able values."""
        return {
            "kind": self.kind,
            "published": [[p.epoch, p.step] for p in self._published],
            "outstanding": {t: list(request) for t, request in self._outstanding.items()},
            "tasks": {t: self._task_state(t) for t in self.task_ids},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. Raises CheckpointError for another kind, other tasks or a missing entry."""
        missing = {"kind", "published", "outstanding", "tasks"} - set(state)
        if missing:
            raise CheckpointError(f"value tracker state lacks {', '.join(sorted(missing))}")
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"value tracker state is of kind '{state['kind']}', this run uses '{self.kind}'"
            )
        if set(state["tasks"]) != self._known:
            odd = sorted(set(state["tasks"]) ^ self._known)
            raise CheckpointError(f"value tracker state is of other tasks: {len(odd)} differ, first {odd[0]}")
        self._published = [PolicyId(int(epoch), int(step)) for epoch, step in state["published"]]
        self._outstanding = {t: (int(q), float(v)) for t, (q, v) in state["outstanding"].items()}
        for task_id in self.task_ids:
            self._load_task(task_id, state["tasks"][task_id])

    def _take(self, task_id: str) -> tuple[int, float]:
        if task_id not in self._outstanding:
            self._check_known(task_id)
            raise ValueError(f"task {task_id} has no request outstanding")
        return self._outstanding.pop(task_id)

    def _check_known(self, task_id: str) -> None:
        if task_id not in self._known:
            raise ValueError(f"unknown task {task_id}")

    @abstractmethod
    def _absorb(self, task_id: str, outcome: Outcome) -> float: ...

    @abstractmethod
    def _counts(self, task_id: str) -> tuple[float, float]: ...

    @abstractmethod
    def _task_state(self, task_id: str) -> Any: ...

    @abstractmethod
    def _load_task(self, task_id: str, state: Any) -> None: ...


class SppTracker(ValueTracker):
    """SPO++: the value is frozen at dispatch, and an outcome is attached to the policy that generated it.

    alpha_q = e^{-(z_q - z_0)} alpha_0 + sum_i e^{-(z_q - z_i)} r_i over the outcomes visible at dispatch q (beta_q with
    1 - r_i). As z advances by -ln(rho_min) for each publication, an outcome k publications old weighs rho_min^k.
    Outcomes are kept as sums per coordinate and added up in the order of coordinates, so that the value of a history does
    not depend, not even in its last bit for rewards 0 and 1, on the order of arrival.
    """

    kind = "spopp"

    def __init__(
        self,
        task_ids: Sequence[str],
        cfg: AlgorithmConfig,
        offline: Offline | None = None,
        policy: PolicyId = FIRST_POLICY,
    ) -> None:
        super().__init__(task_ids, cfg, policy)
        self._prior = {t: prior_counts(*(offline or {}).get(t, (0, 0)), cfg.rho_min) for t in task_ids}
        # task -> coordinate -> [sum of r, sum of 1 - r]
        self._events: dict[str, dict[int, list[float]]] = {t: {} for t in task_ids}
        # task -> (coordinate of its latest outcome, alpha, beta there): later values differ by a common factor only
        self._latest = {t: (0, *self._prior[t]) for t in task_ids}

    def _absorb(self, task_id: str, outcome: Outcome) -> float:
        sums = self._events[task_id].setdefault(outcome.coordinate, [0.0, 0.0])
        sums[0] += outcome.reward
        sums[1] += 1.0 - outcome.reward
        self._refresh(task_id)
        return outcome.frozen

    def _refresh(self, task_id: str) -> None:
        events = self._events[task_id]
        top = max(events, default=0)
        rho = self.cfg.rho_min
        counts = [a * rho**top for a in self._prior[task_id]]
        for coordinate in sorted(events):
            weight = rho ** (top - coordinate)
            counts = [c + weight * x for c, x in zip(counts, events[coordinate], strict=True)]
        self._latest[task_id] = (top, counts[0], counts[1])

    def value(self, task_id: str) -> float:
        """alpha / (alpha + beta); forgetting scales both alike, so it moves only when an outcome arrives."""
        self._check_known(task_id)
        _, alpha, beta = self._latest[task_id]
        return alpha / (alpha + beta)

    def _counts(self, task_id: str) -> tuple[float, float]:
        self._check_known(task_id)
        coordinate, alpha, beta = self._latest[task_id]
        weight = self.cfg.rho_min ** (self._now - coordinate)
        return weight * alpha, weight * beta

    def _task_state(self, task_id: str) -> Any:
        events = self._events[task_id]
        return {"prior": list(self._prior[task_id]), "events": [[q, *events[q]] for q in sorted(events)]}

    def _load_task(self, task_id: str, state: Any) -> None:
        alpha, beta = state["prior"]
        self._prior[task_id] = (float(alpha), float(beta))
        self._events[task_id] = {int(q): [float(good), float(bad)] for q, good, bad in state["events"]}
        self._refresh(task_id)


class _TableTracker(ValueTracker):
    """A tracker whose state is one pair of counts a task."""

    _table: dict[str, tuple[float, float]]

    def _counts(self, task_id: str) -> tuple[float, float]:
        self._check_known(task_id)
        return self._table[task_id]

    def _task_state(self, task_id: str) -> Any:
        return list(self._table[task_id])

    def _load_task(self, task_id: str, state: Any) -> None:
        alpha, beta = state
        self._table[task_id] = (float(alpha), float(beta))


class SpoTracker(_TableTracker):
    """SPO: v is read just before the update that takes the outcome in; alpha <- rho alpha + r, beta <- rho beta + 1 - r.

    rho comes from the policy's drift ``d`` over the task's previous trajectory; without one, d = 0 and rho = rho_max.
    """

    kind = "spo"

    def __init__(
        self,
        task_ids: Sequence[str],
        cfg: AlgorithmConfig,
        offline: Offline | None = None,
        policy: PolicyId = FIRST_POLICY,
    ) -> None:
        super().__init__(task_ids, cfg, policy)
        self._table = {t: prior_counts(*(offline or {}).get(t, (0, 0)), cfg.rho_min) for t in task_ids}

    def _absorb(self, task_id: str, outcome: Outcome) -> float:
        value = self.value(task_id)
        rho = spo_rho(outcome.d, self.cfg)
        alpha, beta = self._table[task_id]
        self._table[task_id] = (rho * alpha + outcome.reward, rho * beta + 1.0 - outcome.reward)
        return value


class NoTracker(_TableTracker):
    """No baseline: v = 0 for every task, so tasks are sampled uniformly and the advantage begins as the reward.

    It only counts outcomes, so that ``n_eff`` is the number seen.
    """

    kind = "none"

    def __init__(
        self, task_ids: Sequence[str], cfg: AlgorithmConfig, policy: PolicyId = FIRST_POLICY
    ) -> None:
        super().__init__(task_ids, cfg, policy)
        self._table = dict.fromkeys(task_ids, (0.0, 0.0))

    def _absorb(self, task_id: str, outcome: Outcome) -> float:
        good, bad = self._table[task_id]
        self._table[task_id] = (good + outcome.reward, bad + 1.0 - outcome.reward)
        return 0.0

    def value(self, task_id: str) -> float:
        """Always 0."""
        self._check_known(task_id)
        return 0.0


def make_tracker(
    task_ids: Sequence[str],
    cfg: AlgorithmConfig,
    offline: Offline | None = None,
    policy: PolicyId = FIRST_POLICY,
) -> ValueTracker:
    """The tracker that ``cfg.baseline`` names, at its prior."""
    if cfg.baseline == "none":
        return NoTracker(task_ids, cfg, policy)
    return (SppTracker if cfg.baseline == "spopp" else SpoTracker)(task_ids, cfg, offline, policy)

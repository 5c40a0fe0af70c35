"""How old the trained tokens may be: admission of new rollouts, and the hard check when a batch is selected.

Admission keeps the aggregate in bounds: the rollouts dispatched so far, in flight, buffered and consumed together, never
exceed ``rollouts_per_update * (published + eta + 1)`` (the capacity rule of AReaL, arXiv 2505.24298). That bounds the mean
age, not that of each rollout, hence the second check: a rollout whose oldest token is more than ``eta`` publications old is
never trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from muonrl.config import StalenessConfig
from muonrl.trajectory import Kind, PolicyId, Trajectory

Collection = Literal["first_finished", "oldest_first"]


def staleness(now: PolicyId, policy: PolicyId) -> int | None:
    """Publications between ``policy`` and ``now``; None where the two share no lineage (another epoch, or a later step)."""
    if policy.epoch != now.epoch or policy.step > now.step:
        return None
    return now.step - policy.step


class Admission:
    """Counts dispatched rollouts against the capacity that the published policies give.

    ``published`` counts publications after the first policy. A rollout that was dropped or cancelled is released and may be
    replaced; consumed ones stay counted.
    """

    def __init__(self, rollouts_per_update: int, eta: int) -> None:
        self.rollouts_per_update = rollouts_per_update
        self.eta = eta
        self.dispatched = 0
        self.published = 0

    def capacity(self) -> int:
        """How many rollouts may be dispatched now."""
        return max(0, self.rollouts_per_update * (self.published + self.eta + 1) - self.dispatched)

    def admit(self) -> bool:
        """Count one more rollout if there is room; False if there is none."""
        if self.capacity() == 0:
            return False
        self.dispatched += 1
        return True

    def release(self, n: int = 1) -> None:
        """Take back ``n`` rollouts that will not be trained on."""
        if not 0 <= n <= self.dispatched:
            raise ValueError(f"release of {n} out of {self.dispatched} dispatched rollouts")
        self.dispatched -= n

    def publish(self) -> None:
        """Count a publication."""
        self.published += 1

    def state_dict(self) -> dict[str, int]:
        """The two counters, as JSON-able values."""
        return {"dispatched": self.dispatched, "published": self.published}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; a caller that lost its rollouts in flight releases them afterwards."""
        self.dispatched, self.published = int(state["dispatched"]), int(state["published"])


@dataclass(frozen=True)
class Selection:
    """What became of the finished rollouts.

    ``batch`` holds either exactly the wanted number or, while there are not enough, nothing. ``dropped`` and ``requeued`` were
    too old: both leave the buffer, and the tasks of ``requeued`` are to be dispatched again. ``kept`` stays buffered.
    ``waiting`` counts rollouts in flight that this batch must wait for. ``selection_bias`` is the mean number of action
    tokens of the batch minus that of all admissible rollouts: negative where short ones were favoured.
    """

    batch: tuple[Trajectory, ...]
    kept: tuple[Trajectory, ...]
    dropped: tuple[Trajectory, ...] = ()
    requeued: tuple[Trajectory, ...] = ()
    waiting: int = 0
    selection_bias: float = 0.0


def select(
    finished: Sequence[Trajectory],
    in_flight: Iterable[PolicyId],
    now: PolicyId,
    n: int,
    cfg: StalenessConfig,
    collection: Collection = "first_finished",
) -> Selection:
    """Choose ``n`` of the ``finished`` rollouts (in the order of finishing) for the update of the policy ``now``.

    ``first_finished`` takes them as they came, ``oldest_first`` by the policy of their dispatch. What is too old is dropped,
    or requeued under ``action = "requeue"``. Under ``"wait"`` nothing need become too old: rollouts go by their oldest token
    whatever the collection, and no batch is formed while too many old ones are ``in_flight`` (given by their oldest
    policies). Admission makes that possible. A lost lineage cannot be waited for and is dropped.
    """
    admissible: list[Trajectory] = []
    too_old: list[Trajectory] = []
    for trajectory in finished:
        (admissible if _fits(now, trajectory, cfg.eta) else too_old).append(trajectory)
    requeue = cfg.action == "requeue"
    dropped, requeued = (() if requeue else tuple(too_old)), (tuple(too_old) if requeue else ())
    ordered = list(admissible)
    waiting = 0
    if collection == "oldest_first":
        ordered.sort(key=lambda t: t.dispatched_at)
    if cfg.action == "wait":
        ordered.sort(key=lambda t: t.oldest_policy)
        waiting = _must_wait_for([t.oldest_policy for t in admissible], in_flight, now, n, cfg.eta)
    if waiting or len(ordered) < n:
        return Selection((), tuple(admissible), dropped, requeued, waiting)
    batch = tuple(ordered[:n])
    chosen = {id(t) for t in batch}
    kept = tuple(t for t in admissible if id(t) not in chosen)
    bias = float(np.mean([t.n_action for t in batch]) - np.mean([t.n_action for t in admissible]))
    return Selection(batch, kept, dropped, requeued, 0, bias)


def staleness_histogram(trajectories: Iterable[Trajectory], now: PolicyId) -> tuple[dict[str, float], float]:
    """Share of action tokens by age in publications, keyed "0", "1", ..., and the mean age. Each token has its own policy.

    Raises ValueError for a token that shares no lineage with ``now``.
    """
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        for segment in trajectory.segments():
            if segment.kind is not Kind.ACTION or segment.policy is None:
                continue
            age = staleness(now, segment.policy)
            if age is None:
                raise ValueError(f"trajectory {trajectory.id}: tokens of {segment.policy} at {now}")
            counts[age] += len(segment)
    total = counts.total()
    if total == 0:
        return {}, 0.0
    mean = sum(age * count for age, count in counts.items()) / total
    return {str(age): counts[age] / total for age in sorted(counts)}, mean


def _fits(now: PolicyId, trajectory: Trajectory, eta: int) -> bool:
    """Whether every token of the rollout shares the lineage of ``now`` and is at most ``eta`` publications old."""
    policies = {s.policy for s in trajectory.segments() if s.policy is not None}
    ages = [staleness(now, policy) for policy in policies]
    return all(age is not None and age <= eta for age in ages)


def _must_wait_for(
    finished: Iterable[PolicyId], in_flight: Iterable[PolicyId], now: PolicyId, n: int, eta: int
) -> int:
    """How many rollouts in flight have to finish before a batch of the ``n`` oldest finished ones is safe.

    A rollout of age a can enter this batch or the next eta - a. So after this batch at most n (eta - a) rollouts of age a or
    more may be left, finished or not, for every a.
    """
    done = Counter(staleness(now, policy) for policy in finished)
    flying = Counter(staleness(now, policy) for policy in in_flight)
    n_done = n_flying = waiting = 0
    for age in range(eta, -1, -1):
        n_done += done[age]
        n_flying += flying[age]
        waiting = max(waiting, n_done + n_flying - min(n, n_done) - n * (eta - age))
    return waiting

"""The collector: chooses tasks, dispatches rollouts within the staleness bound, takes in what finishes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from muonrl.algorithms.values import ValueTracker
from muonrl.config import Config
from muonrl.errors import InfrastructureError
from muonrl.tasks.schema import RepairTask
from muonrl.training.messages import Dropped, Event, Finished, RolloutRequest, Usage
from muonrl.training.rollout_client import Interrupted, RolloutClient
from muonrl.training.staleness import Admission, Selection, select
from muonrl.trajectory import PolicyId, Trajectory, derive_seed

# No rollout finishing for this long means that something is stuck; the error says what was awaited.
QUIET_DEADLINE = 300.0
# So many rollouts in a row lost to faults, and as many again as run at once: the machine is broken, not a rollout.
FAULTS_IN_A_ROW = 20


class Collector:
    """Owns the value tracker, the admission counter, the task sampler and the buffer of finished rollouts."""

    def __init__(
        self,
        client: RolloutClient,
        tracker: ValueTracker,
        config: Config,
        policy: PolicyId,
        interrupted: Callable[[], bool],
    ) -> None:
        self.client, self.tracker, self.config, self.policy = client, tracker, config, policy
        self.interrupted = interrupted
        self.admission = Admission(config.run.rollouts_per_update, config.staleness.eta)
        self.rng = np.random.Generator(np.random.PCG64(derive_seed(config.run.seed, "tasks")))
        self.visits: Counter[str] = Counter()
        self.drift: dict[str, float] = {}  # task -> mean |delta logp| over its previous trajectory (SPO's D)
        self.in_flight: dict[str, RolloutRequest] = {}
        self.finished: list[Trajectory] = []
        self.baselines: dict[str, float] = {}  # trajectory id -> the value subtracted from its reward
        self.again: list[str] = []  # tasks whose rollout was too old and is to be played again
        self.evaluated: list[Trajectory] = []
        self.drops: Counter[str] = Counter()
        self._faults = 0  # since the last rollout that finished
        self.usage = Usage()
        self.wait_seconds = 0.0

    def dispatch(self) -> None:
        """Send rollouts up to the admission capacity and to what the run still needs; at most one outstanding a task."""
        needed = self.config.run.updates * self.config.run.rollouts_per_update
        while self.admission.capacity() > 0 and self.admission.dispatched < needed:
            task_id = self._next_task()
            if task_id is None:
                return
            self.admission.admit()
            value = self.tracker.dispatch(task_id)
            visit = self.visits[task_id]
            self.visits[task_id] += 1
            seed = derive_seed(self.config.run.seed, task_id, visit)
            self._send(RolloutRequest(f"{task_id}#{visit}", task_id, visit, seed, self.policy, value))

    def _next_task(self) -> str | None:
        while self.again:
            task_id = self.again.pop(0)
            if task_id not in self.tracker.outstanding:
                return task_id
        return self.tracker.choose(float(self.rng.random()))

    def _send(self, request: RolloutRequest) -> None:
        self.in_flight[request.id] = request
        self.client.send(request)

    def collect(self) -> Selection:
        """Wait until an update's rollouts are there; too old ones are dropped and counted, and replaced.

        Raises Interrupted when asked to stop, and InfrastructureError where nothing finishes any more.
        """
        began = time.perf_counter()
        while True:
            if self.interrupted():
                raise Interrupted
            self.dispatch()
            chosen = select(
                self.finished,
                [r.dispatched_at for r in self.in_flight.values()],
                self.policy,
                self.config.run.rollouts_per_update,
                self.config.staleness,
                self.config.algorithm.collection,
            )
            self.finished = list(chosen.kept)
            for trajectory in (*chosen.dropped, *chosen.requeued):
                self.drops["stale"] += 1
                self.admission.release()
                del self.baselines[trajectory.id]
            self.again += [t.task_id for t in chosen.requeued]
            if chosen.batch:
                self.wait_seconds += time.perf_counter() - began
                return chosen
            if not (chosen.dropped or chosen.requeued):
                self._wait("rollouts for the next update")
            self.drain()

    def evaluate(self, tasks: Sequence[RepairTask], samples: int, label: str) -> float:
        """Mean reward over ``samples`` rollouts of each task under the current policy; faults are played again once."""
        self.evaluated = []
        retried: set[str] = set()
        for task in tasks:
            for k in range(samples):
                seed = derive_seed(self.config.run.seed, "eval", task.task_id, k)
                request = RolloutRequest(
                    f"{label}/{task.task_id}#{k}", task.task_id, k, seed, self.policy, 0.0, "eval"
                )
                self._send(request)
        wanted = len(tasks) * samples
        while wanted and len(self.evaluated) < wanted:
            event = self._wait("held-out rollouts")
            if isinstance(event, Dropped) and event.request.purpose == "eval":
                if event.request.id in retried:
                    raise InfrastructureError(
                        event.reason, f"held-out {event.request.task_id} failed twice: {event.detail}"
                    )
                retried.add(event.request.id)
                self._send(event.request)
        return sum(t.reward for t in self.evaluated) / wanted if wanted else math.nan

    def publish(self, policy: PolicyId, state: dict[str, Any]) -> None:
        """New weights for the sampler; admission and the value tracker advance with it."""
        self.client.publish(policy, state)
        self.policy = policy
        self.tracker.publish(policy)
        self.admission.publish()

    def drain(self) -> None:
        """Take in every event that has already come."""
        while (event := self.client.event(0.0)) is not None:
            self._take(event)

    def _wait(self, what: str) -> Event:
        end = time.monotonic() + QUIET_DEADLINE
        while time.monotonic() < end:
            if self.interrupted():
                raise Interrupted
            event = self.client.event(0.2)
            if event is not None:
                self._take(event)
                return event
        raise InfrastructureError("deadline", f"waited {QUIET_DEADLINE:g} s for {what}: nothing finished")

    def _take(self, event: Event) -> None:
        match event:
            case Finished():
                self._finish(event)
            case Dropped():
                del self.in_flight[event.request.id]
                self.drops[event.reason] += 1
                self._faults += 1
                if event.request.purpose == "train":
                    self.tracker.cancel(event.request.task_id)
                    self.admission.release()
                if self._faults >= FAULTS_IN_A_ROW + self.config.sandbox.concurrency:
                    text = f"{self._faults} rollouts in a row were lost, the last to: {event.detail}"
                    raise InfrastructureError(event.reason, text)
            case Usage():
                self.usage = event

    def _finish(self, event: Finished) -> None:
        del self.in_flight[event.request.id]
        self._faults = 0
        trajectory = event.trajectory
        if event.request.purpose == "eval":
            self.evaluated.append(trajectory)
            return
        drift = self.drift.get(trajectory.task_id, 0.0)
        self.baselines[trajectory.id] = self.tracker.observe(
            trajectory.task_id, trajectory.reward, drift, trajectory.oldest_policy
        )
        self.finished.append(trajectory)

    def state_dict(self) -> dict[str, Any]:
        """Tracker, sampler RNG, visits and counters as JSON-able values, with nothing in flight."""
        tracker = self.tracker.state_dict()
        lost = len(tracker["outstanding"]) + len(self.finished)
        tracker["outstanding"] = {}
        admission = self.admission.state_dict()
        admission["dispatched"] -= lost
        return {
            "tracker": tracker,
            "rng": self.rng.bit_generator.state,
            "visits": dict(self.visits),
            "drift": dict(self.drift),
            "again": list(self.again),
            "admission": admission,
            "policy": [self.policy.epoch, self.policy.step],
            "lost_on_resume": lost,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.tracker.load_state_dict(state["tracker"])
        self.rng.bit_generator.state = state["rng"]
        self.visits = Counter(state["visits"])
        self.drift = {str(task): float(d) for task, d in state["drift"].items()}
        self.again = [str(task) for task in state["again"]]
        self.admission.load_state_dict(state["admission"])
        epoch, step = state["policy"]
        self.policy = PolicyId(int(epoch), int(step))
        if state["lost_on_resume"]:
            self.drops["interrupted"] += int(state["lost_on_resume"])

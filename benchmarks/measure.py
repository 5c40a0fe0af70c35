"""Timing of real optimizer steps, interleaved round by round, on weights and gradients that all of them share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.nn import Parameter

from benchmarks.cases import Shapes
from benchmarks.implementations import LEARNING_RATE, Implementation
from benchmarks.machine import extra_memory, seconds_of
from benchmarks.workload import Workload

__all__ = ["Contender", "Spread", "interleave", "ratio", "spread"]

WEIGHT_DECAY: Final = 0.1
_COMPARED: Final = 64
"""Leading weights of a matrix by which is seen whether a step changed it."""


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and minimum of samples, and how many there are."""

    median: float
    lower: float
    upper: float
    minimum: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Summary of at least one sample."""
    lower, median, upper = (
        float(q) for q in np.quantile(np.asarray(samples, dtype=float), (0.25, 0.5, 0.75))
    )
    return Spread(median, lower, upper, float(min(samples)), len(samples))


def ratio(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Spread of the quotients of samples that were taken in the same round.

    Raises:
        ValueError: the two were not measured in the same rounds.
    """
    if len(samples) != len(baseline):
        raise ValueError(f"{len(samples)} samples cannot be compared with {len(baseline)} round by round")
    return spread([s / b for s, b in zip(samples, baseline, strict=True)])


@dataclass
class Contender:
    """An implementation with its own optimizer state on (a subset of) a workload."""

    implementation: Implementation
    workload: Workload
    subset: Shapes
    _pairs: list[tuple[Parameter, torch.Tensor]] = field(init=False, repr=False)
    _optimizer: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._pairs = self.workload.parameters(self.subset)
        self._attach()
        with self.implementation.active():
            params = [p for p, _ in self._pairs]
            self._optimizer = self.implementation.make(params, LEARNING_RATE, WEIGHT_DECAY)

    def _attach(self) -> None:
        """Fresh gradients on every parameter: some optimizers overwrite them, some set them to None."""
        self.workload.refill()
        for p, grad in self._pairs:
            p.grad = grad

    def seconds(self) -> float:
        """Duration of one step on fresh gradients."""
        self._attach()
        with self.implementation.active():
            return seconds_of(self._optimizer.step, self.workload.device)

    def memory(self) -> int:
        """Peak bytes of one step beyond weights, gradients and optimizer state.

        Raises:
            RuntimeError: the step left a matrix as it was, so what was timed was not a whole step.
        """
        self._attach()
        before = [p.detach().flatten()[:_COMPARED].clone() for p, _ in self._pairs]
        with self.implementation.active():
            result = extra_memory(self._optimizer.step, self.workload.device)
        same = sum(
            torch.equal(p.detach().flatten()[:_COMPARED], b)
            for (p, _), b in zip(self._pairs, before, strict=True)
        )
        if same:
            raise RuntimeError(f"step() left {same} of {len(before)} matrices as they were")
        return result


def interleave(
    calls: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    deadline: float | None = None,
    at_least: int = 2,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Samples of each call, taken in turns: A B C A B C ..., so that drift of the machine meets all of them alike.

    Whole rounds only. After `at_least` rounds, no round is begun after `deadline` (a value of `clock`).
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        if deadline is not None and done >= at_least and clock() >= deadline:
            break
        for name, call in calls.items():
            samples[name].append(call())
    return samples

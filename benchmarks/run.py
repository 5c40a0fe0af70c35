"""One run of a suite: ceilings, gate, then every case with all implementations taking turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import torch

from benchmarks.cases import Shapes
from benchmarks.entrant import Entrant, Unavailable, Verdict, one_line
from benchmarks.machine import better, busy_warning, describe_machine, measure_ceilings
from benchmarks.measure import interleave
from benchmarks.results import CaseResult, Gate, Measurement, Report

__all__ = [
    "MAX_ROUNDS",
    "MIN_ROUNDS",
    "MODELLED",
    "BenchmarkCase",
    "Outcomes",
    "Plan",
    "Suite",
    "dtype_name",
    "passing",
    "run",
    "run_plans",
    "take_turns",
]

Log = Callable[[str], None]
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 15
MODELLED: Final = (
    "GFLOP and GB are the cost model's; the shares are GFLOP and GB over the shortest time "
    "over the machine's own rates"
)


class BenchmarkCase(Protocol):
    """What a run needs to know of a case."""

    @property
    def name(self) -> str:
        """As given on the command line."""


class Timed(Protocol):
    """One implementation, ready to be timed."""

    def seconds(self) -> float:
        """Duration of one call."""

    def memory(self) -> int | None:
        """Peak bytes that one call needs beyond what was there before it."""


@dataclass(frozen=True)
class Plan:
    """Which implementations take turns on what; `share` is the part of the case's time that they get.

    `round_seconds` is about what a round takes, where that is known beforehand.
    """

    group: int
    names: tuple[str, ...]
    shapes: Shapes
    share: float
    at_least: int = MIN_ROUNDS
    round_seconds: float | None = None


T = TypeVar("T", bound=Timed)
C = TypeVar("C", bound=BenchmarkCase)
I = TypeVar("I", bound=Entrant)  # noqa: E741 - an implementation


@dataclass(frozen=True)
class Suite(Generic[C, I]):
    """One kind of benchmark.

    Attributes:
        title: heading of the report.
        choose: cases by name for a kind of device; None are all of them.
        implementations: those that can be measured on a device, and those that cannot.
        call: what is timed, such as "one optimizer step".
        check: the correctness gate.
        rates: rough speeds by a quick look at every implementation, and the errors of those that failed in it.
        run_case: measures one case with the implementations that passed, given their rates, in so many seconds.
        work: size of a case; the smaller ones run first.
        weight: share of the time that a case should get, relative to others.
        notes: remarks for the report, by device.
    """

    title: str
    call: str
    choose: Callable[[Sequence[str] | None, str], Sequence[C]]
    implementations: Callable[[torch.device], tuple[Sequence[I], Sequence[Unavailable]]]
    check: Callable[[I, torch.device], Verdict]
    rates: Callable[[Sequence[I], torch.device], tuple[dict[str, float], dict[str, str]]]
    run_case: Callable[[C, Sequence[I], dict[str, float], torch.device, float], CaseResult]
    work: Callable[[C], float]
    weight: Callable[[C], float]
    notes: Callable[[torch.device], Sequence[str]]


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def passing(
    implementations: Sequence[I],
    device: torch.device,
    log: Log,
    check: Callable[[I, torch.device], Verdict],
) -> tuple[list[I], list[Gate]]:
    """The implementations whose result is right, and the verdict on each."""
    good, gates = [], []
    for item in implementations:
        v = check(item, device)
        gates.append(
            Gate(item.name, item.note, dtype_name(item.compute), v.passed, v.error, v.bound, v.reason)
        )
        if v.passed:
            good.append(item)
        outcome = "passed" if v.passed else f"FAILED: {v.reason}"
        log(f"gate {item.name}: error {v.error:.2e}, bound {v.bound:.2e}: {outcome}")
    return good, gates


def take_turns(
    contenders: dict[str, T],
    summary: Callable[[T, list[float]], Measurement],
    budget: float,
    plan: Plan,
    *,
    warm_ups: int,
) -> Iterator[tuple[str, Measurement | str]]:
    """Warm up, take turns for about `budget` seconds, then sum up; a contender that raises is yielded with its error.

    No round begins where less than the plan's `round_seconds` are left; without those two rounds as long as the warm-up
    are reserved, one of them for the measurement of memory.
    """
    broken: dict[str, str] = {}
    began = time.monotonic()

    def attempt(name: str) -> float:
        try:
            return float(contenders[name].seconds())
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            broken[name] = one_line(error)
            return float("nan")

    for name in list(contenders):
        for _ in range(warm_ups):
            attempt(name)
        if name in broken:
            del contenders[name]
    kept = 2.0 * (time.monotonic() - began) if plan.round_seconds is None else plan.round_seconds
    samples = interleave(
        {name: partial(attempt, name) for name in contenders},
        MAX_ROUNDS,
        deadline=began + budget - kept,
        at_least=plan.at_least,
    )
    yield from broken.items()
    for name, contender in contenders.items():
        if name in broken:
            continue
        try:
            yield name, summary(contender, samples[name])
        except RuntimeError as error:
            yield name, one_line(error)


@dataclass(frozen=True)
class Outcomes:
    """What came of the plans of one case: a measurement or an error by (group, implementation)."""

    found: Mapping[tuple[int, str], Measurement | str]

    def result(
        self, name: str, title: str, shapes: Shapes, work: float, left_out: Mapping[str, str]
    ) -> CaseResult:
        """As the result of a case; `left_out` are the implementations that no plan has room for."""
        measured = tuple(o for o in self.found.values() if isinstance(o, Measurement))
        failed = {key[1]: o for key, o in self.found.items() if isinstance(o, str)}
        return CaseResult(name, title, shapes, work, measured, left_out={**failed, **left_out})


def run_plans(
    plans: Sequence[Plan],
    implementations: Sequence[I],
    prepare: Callable[[Plan], Callable[[I], T]],
    summary: Callable[[Plan, T, list[float]], Measurement],
    budget: float,
    *,
    warm_ups: int,
) -> Outcomes:
    """Carry out the plans of one case within about `budget` seconds.

    `prepare` makes the data of a plan and returns what makes a contender on it; the data is gone when its plan is done.
    """
    found: dict[tuple[int, str], Measurement | str] = {}
    by_name = {item.name: item for item in implementations}
    for plan in plans:
        make = prepare(plan)
        contenders: dict[str, T] = {}
        for name in plan.names:
            try:
                contenders[name] = make(by_name[name])
            except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
                found[plan.group, name] = one_line(error)
        outcomes = take_turns(
            contenders, partial(summary, plan), budget * plan.share, plan, warm_ups=warm_ups
        )
        found |= {(plan.group, name): outcome for name, outcome in outcomes}
        del make, contenders
    return Outcomes(found)


def run(
    suite: Suite[C, I],
    cases: Sequence[C],
    implementations: Sequence[I],
    unavailable: Sequence[Unavailable],
    device: torch.device,
    budget: float,
    command: str,
    log: Log,
) -> Report:
    """The whole benchmark within about `budget` seconds; what one case leaves is shared by those after it."""
    end = time.monotonic() + budget
    warning = busy_warning(os.getloadavg()[0], os.cpu_count() or 1)
    if warning:
        log(warning)
    log("measuring the machine's own GEMM and copy rates")
    ceilings = measure_ceilings(device)
    good, gates = passing(implementations, device, log, suite.check)
    rates, failed = suite.rates(good, device)
    missing: dict[str, str] = {item.name: item.reason for item in unavailable} | failed
    usable = [item for item in good if item.name not in failed]
    results = []
    # The small cases first: they leave time to the large ones.
    waiting = sorted(cases, key=suite.work)
    while waiting:
        weights = [suite.weight(c) for c in waiting]
        share = max(1.0, (end - time.monotonic()) * weights[0] / sum(weights))
        case = waiting.pop(0)
        log(f"case {case.name}: {share:.0f} s")
        results.append(suite.run_case(case, usable, rates, device, share))
    log("measuring the machine's rates once more")
    ceilings = better(ceilings, measure_ceilings(device))
    return Report(
        suite.title,
        suite.call,
        command,
        describe_machine(device),
        ceilings.gemm,
        ceilings.copy,
        tuple(gates),
        missing,
        tuple(results),
        (*([warning] if warning else []), *suite.notes(device)),
    )

"""One run: ceilings, gate, then every case with all implementations taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.cases import Case, Shapes, describe, flops_of, shrink
from benchmarks.cost import step_ops, total
from benchmarks.gate import FACTOR, FLOOR, check
from benchmarks.implementations import OURS, Implementation, Unavailable
from benchmarks.machine import better, describe_machine, measure_ceilings
from benchmarks.measure import Contender, interleave
from benchmarks.results import CaseResult, Gate, Measurement, Report
from benchmarks.workload import Workload

__all__ = ["Plan", "passing", "plan_case", "run", "run_case"]

Log = Callable[[str], None]
_PROBE: Final[Shapes] = ((256, 512, 1),)
_PROBE_CUDA: Final[Shapes] = ((2048, 4096, 2),)
_PROBES: Final = 5
_PROBE_SECONDS: Final = 0.5
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 15
_SLOW: Final = 8.0
"""An implementation this many times slower than the fastest is measured on a subset of its own, together with ours."""


@dataclass(frozen=True)
class Plan:
    """Which implementations take turns on which matrices; `share` is the part of the case's time that they get."""

    group: int
    names: tuple[str, ...]
    shapes: Shapes
    share: float


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def passing(
    implementations: Sequence[Implementation], device: torch.device, log: Log
) -> tuple[list[Implementation], list[Gate]]:
    """The implementations whose update is right, and the verdict on each."""
    good, gates = [], []
    for item in implementations:
        verdict = check(item, device)
        gates.append(
            Gate(
                item.name,
                item.note,
                _name(item.compute),
                verdict.passed,
                verdict.error,
                verdict.bound,
                verdict.reason,
            )
        )
        if verdict.passed:
            good.append(item)
        outcome = "passed" if verdict.passed else f"FAILED: {verdict.reason}"
        log(f"gate {item.name}: error {verdict.error:.2e}, bound {verdict.bound:.2e}: {outcome}")
    return good, gates


def probe_rates(
    implementations: Sequence[Implementation], device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Standard operations a second of each implementation on one small matrix: the best of a few steps after the first."""
    shapes = _PROBE_CUDA if device.type == "cuda" else _PROBE
    workload = Workload(shapes, device)
    rates: dict[str, float] = {}
    failed: dict[str, str] = {}
    for item in implementations:
        try:
            contender = Contender(item, workload, shapes)
            contender.seconds()
            samples = [contender.seconds()]
            while len(samples) < _PROBES and sum(samples) < _PROBE_SECONDS:
                samples.append(contender.seconds())
            rates[item.name] = flops_of(shapes) / min(samples)
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            failed[item.name] = _one_line(error)
    return rates, failed


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def plan_case(case: Case, rates: dict[str, float], budget: float) -> list[Plan]:
    """Groups of implementations and the matrices that they can afford within `budget` seconds.

    The slow ones get a subset of their own, on which ours is measured again: ratios are formed on equal matrices only.
    Steps are counted for the rounds, a warm-up and the measurement of memory. Empty where not even one matrix fits.
    """
    fastest = max(rates.values(), default=0.0)
    fast = [name for name, rate in rates.items() if name == OURS or rate * _SLOW >= fastest]
    slow = [name for name in rates if name not in fast]
    groups = [(fast, 0.6 if slow else 1.0)]
    if slow:
        groups.append(([*(name for name in fast if name == OURS), *slow], 0.4))
    plans = []
    for group, (names, share) in enumerate(groups if rates else []):
        per_flop = sum(1.0 / rates[name] for name in names)
        affordable = budget * share / (MIN_ROUNDS + 2) / per_flop
        plans.append(Plan(group, tuple(names), shrink(case.shapes, affordable), share))
    return [plan for plan in plans if plan.shapes]


def _measure(
    contenders: dict[str, Contender], plan: Plan, budget: float
) -> Iterator[tuple[str, Measurement | str]]:
    """Warm up, take turns, then ask for the memory; a contender that raises is yielded with its error."""
    broken: dict[str, str] = {}
    began = time.monotonic()
    for name in list(contenders):
        try:
            contenders[name].seconds()
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            broken[name] = _one_line(error)
            del contenders[name]
    yield from broken.items()
    warm = time.monotonic() - began
    # The warm-up took about as long as a round; one more is kept for the measurement of memory.
    deadline = began + budget - 2.0 * warm
    calls = {name: contender.seconds for name, contender in contenders.items()}
    samples = interleave(calls, MAX_ROUNDS, deadline=deadline, at_least=MIN_ROUNDS)
    for name, contender in contenders.items():
        try:
            yield name, _summary(contender, samples[name], plan)
        except RuntimeError as error:
            yield name, _one_line(error)


def _summary(contender: Contender, samples: list[float], plan: Plan) -> Measurement:
    """What was measured, beside what the cost model says of it."""
    item = contender.implementation
    work = total(step_ops(item.algorithm, plan.shapes, torch.finfo(item.compute).bits // 8))
    return Measurement(
        item.name,
        plan.shapes,
        tuple(samples),
        contender.memory(),
        work.flops,
        work.nbytes,
        work.launches,
        _name(item.compute),
        plan.group,
    )


def run_case(
    case: Case,
    implementations: Sequence[Implementation],
    rates: dict[str, float],
    device: torch.device,
    budget: float,
) -> CaseResult:
    """Measure one case within about `budget` seconds."""
    plans = plan_case(case, rates, budget)
    if not plans:
        least = shrink(case.shapes, min(flops_of((shape,)) / shape[2] for shape in case.shapes))
        reason = f"one step on {describe(least)} alone would exceed the {budget:.0f} s left for this case"
        return CaseResult(case.name, case.title, case.shapes, skipped=reason)
    measurements: list[Measurement] = []
    failed: dict[str, str] = {}
    by_name = {item.name: item for item in implementations}
    for plan in plans:
        workload = Workload(plan.shapes, device)
        contenders = {}
        for name in plan.names:
            try:
                contenders[name] = Contender(by_name[name], workload, plan.shapes)
            except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
                failed[name] = _one_line(error)
        for name, outcome in _measure(contenders, plan, budget * plan.share):
            if isinstance(outcome, str):
                failed[name] = outcome
            else:
                measurements.append(outcome)
    planned = {name for plan in plans for name in plan.names}
    failed |= {name: "not even one matrix fits its time" for name in rates if name not in planned}
    return CaseResult(case.name, case.title, case.shapes, tuple(measurements), left_out=failed)


def run(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    unavailable: Sequence[Unavailable],
    device: torch.device,
    budget: float,
    command: str,
    log: Log,
) -> Report:
    """The whole benchmark within about `budget` seconds; what one case leaves is shared by those after it."""
    end = time.monotonic() + budget
    log("measuring the machine's own GEMM and copy rates")
    ceilings = measure_ceilings(device)
    good, gates = passing(implementations, device, log)
    rates, failed = probe_rates(good, device)
    missing: dict[str, Any] = {item.name: item.reason for item in unavailable} | failed
    results = []
    for index, case in enumerate(cases):
        share = max(1.0, (end - time.monotonic()) / (len(cases) - index))
        log(f"case {case.name}: {share:.0f} s")
        usable = [item for item in good if item.name in rates]
        results.append(run_case(case, usable, rates, device, share))
    log("measuring the machine's rates once more")
    ceilings = better(ceilings, measure_ceilings(device))
    notes = (
        f"gate: error against float64 at most {FACTOR:g} times that of the plain iteration in the same dtype (or {FLOOR:g})",
        "GFLOP and GB are the cost model's; the shares are GFLOP and GB over the shortest time over the machine's own rates",
        "on a GPU the L2 cache is overwritten before each step",
    )
    return Report(
        command,
        describe_machine(device),
        ceilings.gemm,
        ceilings.copy,
        tuple(gates),
        missing,
        tuple(results),
        notes,
    )

"""One run: ceilings, gate, then every case with all implementations taking turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks.cases import Case, Shapes, describe, flops_of, shrink
from benchmarks.cost import FP32, step_ops, total
from benchmarks.gate import FACTOR, FLOOR, check
from benchmarks.implementations import OURS, OURS_FP32, TORCH, Implementation, Unavailable
from benchmarks.machine import better, busy_warning, describe_machine, free_memory, measure_ceilings
from benchmarks.measure import Contender, interleave
from benchmarks.results import CaseResult, Gate, Measurement, Report
from benchmarks.workload import Workload

__all__ = ["Plan", "passing", "plan_case", "run", "run_case"]

Log = Callable[[str], None]
_PROBE: Final[Shapes] = ((256, 512, 1),)
_PROBE_CUDA: Final[Shapes] = ((2048, 4096, 2),)
_MEMORY_SHARE: Final = 0.85
_STEP_BYTES: Final = 16
"""Room for what a step allocates, in bytes a parameter."""
_WARM_UPS: Final = {"cpu": 1, "cuda": 3}
"""Compiled and captured peers need several steps until they are what they will be."""
_LARGE_FLOPS: Final = 1e11
_LARGE_WEIGHT: Final = 4.0
"""A model gets this many times the time of a single matrix."""
_PROBES: Final = (3, 12)
_PROBE_SECONDS: Final = 1.0
"""At least three samples, at most twelve, no new one after a second: other work on the machine delays some of them."""
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 15
_SLOW: Final = 20.0
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
            while len(samples) < _PROBES[0 if sum(samples) > _PROBE_SECONDS else 1]:
                samples.append(contender.seconds())
            rates[item.name] = flops_of(shapes) / min(samples)
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            failed[item.name] = _one_line(error)
    return rates, failed


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _afford(case: Case, names: Sequence[str], rates: dict[str, float], budget: float, room: float) -> Shapes:
    """The matrices on which `names` can take their turns in `budget` seconds: all rounds, a warm-up, one step for memory."""
    per_flop = sum(1.0 / rates[name] for name in names)
    affordable = budget / (MIN_ROUNDS + 2) / per_flop
    # Weights, two sets of gradients, a momentum for each, and what a step needs beyond them.
    parameters = _MEMORY_SHARE * room / (FP32 * (3 + len(names)) + _STEP_BYTES)
    return shrink(case.shapes, affordable, parameters)


def plan_case(case: Case, rates: dict[str, float], budget: float, room: float = float("inf")) -> list[Plan]:
    """Groups of implementations and the matrices that they can afford within `budget` seconds and `room` bytes.

    The slow ones get a subset of their own, on which ours is measured again: ratios are formed on equal matrices only.
    That is not needed where everybody can afford everything. Where the slow ones cannot afford a single matrix together,
    torch.optim.Muon as shipped is kept alone. Empty if nothing fits.
    """
    fastest = max(rates.values(), default=0.0)
    everybody = tuple(rates)
    if rates and _afford(case, everybody, rates, budget, room) == case.shapes:
        return [Plan(0, everybody, case.shapes, 1.0)]
    fast = [n for n, rate in rates.items() if n in (OURS, OURS_FP32) or rate * _SLOW >= fastest]
    slow = [name for name in rates if name not in fast]
    shares = (0.6, 0.4) if slow else (1.0, 0.0)
    plans = []
    if fast:
        plans.append(Plan(0, tuple(fast), _afford(case, fast, rates, budget * shares[0], room), shares[0]))
    for kept in (slow, [name for name in slow if name == TORCH]):
        names = [*(name for name in fast if name in (OURS, OURS_FP32)), *kept]
        shapes = _afford(case, names, rates, budget * shares[1], room) if kept else ()
        if shapes:
            plans.append(Plan(1, tuple(names), shapes, shares[1]))
            break
    return [plan for plan in plans if plan.shapes]


def _measure(
    contenders: dict[str, Contender], plan: Plan, budget: float
) -> Iterator[tuple[str, Measurement | str]]:
    """Warm up, take turns, then ask for the memory; a contender that raises is yielded with its error."""
    broken: dict[str, str] = {}
    began = time.monotonic()

    def attempt(name: str) -> float:
        try:
            return contenders[name].seconds()
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            broken[name] = _one_line(error)
            return float("nan")

    for name, contender in list(contenders.items()):
        for _ in range(_WARM_UPS[contender.workload.device.type]):
            attempt(name)
        if name in broken:
            del contenders[name]
    warm = time.monotonic() - began
    # The warm-up took about as long as a round; one more is kept for the measurement of memory.
    deadline = began + budget - 2.0 * warm
    samples = interleave(
        {name: partial(attempt, name) for name in contenders},
        MAX_ROUNDS,
        deadline=deadline,
        at_least=MIN_ROUNDS,
    )
    yield from broken.items()
    for name, contender in contenders.items():
        if name in broken:
            continue
        try:
            yield name, _summary(contender, samples[name], plan)
        except RuntimeError as error:
            yield name, _one_line(error)


def _measure_plan(
    plan: Plan, implementations: Sequence[Implementation], device: torch.device, budget: float
) -> list[tuple[str, Measurement | str]]:
    """A measurement or an error of each implementation; weights and optimizer states are gone when this returns."""
    workload = Workload(plan.shapes, device)
    contenders: dict[str, Contender] = {}
    failed: list[tuple[str, Measurement | str]] = []
    for item in implementations:
        try:
            contenders[item.name] = Contender(item, workload, plan.shapes)
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            failed.append((item.name, _one_line(error)))
    return [*failed, *_measure(contenders, plan, budget)]


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
    plans = plan_case(case, rates, budget, free_memory(device))
    if not plans:
        least = shrink(case.shapes, min(flops_of((shape,)) / shape[2] for shape in case.shapes))
        reason = f"one step on {describe(least)} alone would exceed the {budget:.0f} s (or the memory) left for this case"
        return CaseResult(case.name, case.title, case.shapes, skipped=reason)
    outcomes: dict[tuple[int, str], Measurement | str] = {}
    by_name = {item.name: item for item in implementations}
    for plan in plans:
        chosen = [by_name[name] for name in plan.names]
        for name, outcome in _measure_plan(plan, chosen, device, budget * plan.share):
            outcomes[plan.group, name] = outcome
    measurements = [o for o in outcomes.values() if isinstance(o, Measurement)]
    failed = {name: o for (_, name), o in outcomes.items() if isinstance(o, str)}
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
    warning = busy_warning(os.getloadavg()[0], os.cpu_count() or 1)
    if warning:
        log(warning)
    log("measuring the machine's own GEMM and copy rates")
    ceilings = measure_ceilings(device)
    good, gates = passing(implementations, device, log)
    rates, failed = probe_rates(good, device)
    missing: dict[str, Any] = {item.name: item.reason for item in unavailable} | failed
    results = []
    # The small cases first: they leave time to the large ones.
    waiting = sorted(cases, key=lambda case: flops_of(case.shapes))
    while waiting:
        weights = [_LARGE_WEIGHT if flops_of(c.shapes) > _LARGE_FLOPS else 1.0 for c in waiting]
        share = max(1.0, (end - time.monotonic()) * weights[0] / sum(weights))
        case = waiting.pop(0)
        log(f"case {case.name}: {share:.0f} s")
        usable = [item for item in good if item.name in rates]
        results.append(run_case(case, usable, rates, device, share))
    log("measuring the machine's rates once more")
    ceilings = better(ceilings, measure_ceilings(device))
    notes = (
        *([warning] if warning else []),
        f"gate: error against float64 at most {FACTOR:g} times that of the plain iteration in the same dtype (or {FLOOR:g})",
        "GFLOP and GB are the cost model's; the shares are GFLOP and GB over the shortest time over the machine's own rates",
        "on a GPU the L2 cache is overwritten before each step"
        if device.type == "cuda"
        else "torch.compile, which some peers use, is switched off on a CPU",
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

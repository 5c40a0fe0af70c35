"""The Muon suite: which matrices an optimizer step is measured on, by time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from benchmarks.cases import Case, Shapes, choose_cases, describe, flops_of, shrink
from benchmarks.cost import FP32, step_ops, total
from benchmarks.entrant import OURS, Unavailable, one_line
from benchmarks.gate import FACTOR, FLOOR, check
from benchmarks.implementations import OURS_FP32, TORCH, Implementation, own_implementations
from benchmarks.machine import free_memory
from benchmarks.measure import Contender
from benchmarks.peers import peer_implementations
from benchmarks.results import CaseResult, Measurement
from benchmarks.run import MIN_ROUNDS, MODELLED, Plan, Suite, dtype_name, run_plans
from benchmarks.workload import Workload

__all__ = ["MUON", "plan_case", "probe_rates", "run_case"]

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
_SLOW: Final = 20.0
"""An implementation this many times slower than the fastest is measured on a subset of its own, together with ours."""


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
            failed[item.name] = one_line(error)
    return rates, failed


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


def _summary(plan: Plan, contender: Contender, samples: list[float]) -> Measurement:
    """What was measured, beside what the cost model says of it."""
    item = contender.implementation
    modelled = total(step_ops(item.algorithm, plan.shapes, torch.finfo(item.compute).bits // 8))
    return Measurement(
        item.name,
        plan.shapes,
        describe(plan.shapes),
        flops_of(plan.shapes),
        tuple(samples),
        contender.memory(),
        modelled.flops,
        modelled.nbytes,
        modelled.launches,
        dtype_name(item.compute),
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
    work = flops_of(case.shapes)
    title = f"{case.title} ({work * 1e-9:.4g} GFLOP of the standard iteration)"
    plans = plan_case(case, rates, budget, free_memory(device))
    if not plans:
        least = shrink(case.shapes, min(flops_of((shape,)) / shape[2] for shape in case.shapes))
        reason = f"one step on {describe(least)} alone would exceed the {budget:.0f} s (or the memory) left for this case"
        return CaseResult(case.name, title, case.shapes, work, skipped=reason)

    def prepare(plan: Plan) -> Callable[[Implementation], Contender]:
        workload = Workload(plan.shapes, device)
        return lambda item: Contender(item, workload, plan.shapes)

    outcomes = run_plans(plans, implementations, prepare, _summary, budget, warm_ups=_WARM_UPS[device.type])
    planned = {name for plan in plans for name in plan.names}
    left_out = {name: "not even one matrix fits its time" for name in rates if name not in planned}
    return outcomes.result(case.name, title, case.shapes, work, left_out)


def _implementations(device: torch.device) -> tuple[list[Implementation], list[Unavailable]]:
    peers, missing = peer_implementations(device)
    return [*own_implementations(device), *peers], missing


def _notes(device: torch.device) -> Sequence[str]:
    return (
        f"gate: error against float64 at most {FACTOR:g} times that of the plain iteration in the same dtype (or {FLOOR:g})",
        MODELLED,
        "on a GPU the L2 cache is overwritten before each step"
        if device.type == "cuda"
        else "torch.compile, which some peers use, is switched off on a CPU",
    )


def _work(case: Case) -> float:
    return flops_of(case.shapes)


MUON: Final = Suite[Case, Implementation](
    title="Muon step times",
    call="one optimizer step",
    choose=lambda names, device: choose_cases(names),
    implementations=_implementations,
    check=check,
    rates=probe_rates,
    run_case=run_case,
    work=_work,
    weight=lambda case: _LARGE_WEIGHT if _work(case) > _LARGE_FLOPS else 1.0,
    notes=_notes,
)

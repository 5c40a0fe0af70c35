"""The loss suite: how many rows of a case everybody can afford, and one forward and backward pass after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.entrant import OURS, Unavailable, one_line
from benchmarks.loss_cases import LossCase, choose_loss_cases, describe_rows, shrink_rows, valid_rows
from benchmarks.loss_cost import Problem, elementwise_bytes, floor_flops, loss_ops
from benchmarks.loss_gate import LOSS_FACTOR, LOSS_FLOOR, check_loss
from benchmarks.loss_implementations import NAIVE, LossImplementation, compute_dtype, own_losses
from benchmarks.loss_peers import loss_peers
from benchmarks.loss_workload import Batch, draw, draw_logp
from benchmarks.machine import cache_filler, extra_memory, free_memory, seconds_of
from benchmarks.results import CaseResult, Measurement
from benchmarks.run import MODELLED, Plan, Suite, dtype_name, run_plans

__all__ = ["LOSS", "Cost", "LossContender", "batch_of", "fit_cost", "plan_rows", "run_loss_case"]

_PROBE_ROWS: Final = {"cpu": 128, "cuda": 4096}
_QUICK: Final = 0.5
"""Calls of a probe shorter than this many seconds are repeated more often."""
_MEMORY_SHARE: Final = 0.85
_COPIES: Final = 4
"""fp32 copies of the whole logits that the naive path may hold at once."""
_CORE_SHARE: Final = 0.5
_LEAST_WORK: Final = 4e10
"""No case counts for less than this many operations where the time is shared out."""
_WARM_UPS: Final = {"cpu": 0, "cuda": 2}
"""On a CPU the probe has loaded and started what is loaded and started once."""


class LossContender:
    """An implementation on a batch. Its first call is timed like the others and also measured for memory.

    The very first call in a process loads code as well, whose pages would count as memory: probe an implementation before.
    """

    def __init__(
        self, implementation: LossImplementation, batch: Batch, fill_cache: Callable[[], None]
    ) -> None:
        self.implementation = implementation
        self._batch = batch
        self._fill_cache = fill_cache
        self._memory: int | None = None

    def _call(self) -> None:
        with self.implementation.active():
            self.implementation.call(self._batch).backward()

    def seconds(self) -> float:
        """Duration of one forward and backward pass from leaves without gradients.

        Raises:
            RuntimeError: a leaf got no gradient, so what was timed was not a whole pass.
        """
        device = self._batch.mask.device
        taken: list[float] = []

        def timed() -> None:
            taken.append(seconds_of(self._call, device))

        self._fill_cache()
        if self._memory is None:
            self._memory = extra_memory(timed, device)
        else:
            timed()
        missing = sum(x.grad is None for x in self._batch.leaves)
        for x in self._batch.leaves:
            x.grad = None
        if missing:
            raise RuntimeError(f"backward() left {missing} of {len(self._batch.leaves)} gradients out")
        return taken[0]

    def memory(self) -> int | None:
        """Peak bytes of the first call beyond the batch: gradients are among them."""
        return self._memory


def batch_of(case: LossCase, rows: int, device: torch.device, compute: torch.dtype) -> Batch:
    """So many rows of a case, with its share of valid ones."""
    valid = valid_rows(rows, case.share)
    if case.kind == "elementwise":
        return draw_logp(rows, valid, device)
    return draw(rows, case.hidden, case.vocabulary, valid, device, compute)


@dataclass(frozen=True)
class Cost:
    """Seconds of one pass: `fixed`, whatever the rows (the gradient of the head is as large for one), and `row` a row."""

    fixed: float
    row: float

    def seconds(self, rows: int) -> float:
        """Of so many rows."""
        return self.fixed + self.row * rows


def fit_cost(few: tuple[int, float], more: tuple[int, float]) -> Cost:
    """The line through two measurements (rows, seconds); through the larger one and 0 where noise has turned it over."""
    slope = (more[1] - few[1]) / (more[0] - few[0]) if more[0] > few[0] else 0.0
    fixed = more[1] - slope * more[0]
    if slope <= 0.0 or fixed <= 0.0:
        return Cost(0.0, more[1] / more[0])
    return Cost(fixed, slope)


def _shortest(contender: LossContender, calls: int) -> float:
    """The best of so many calls, of twice as many where they are short."""
    samples = [contender.seconds() for _ in range(calls)]
    while len(samples) < 2 * calls and samples[-1] < _QUICK:
        samples.append(contender.seconds())
    return min(samples)


def _probe(
    case: LossCase, implementations: Sequence[LossImplementation], device: torch.device
) -> tuple[dict[str, Cost], dict[str, str]]:
    """What a pass of each implementation costs, by a few rows of the case, and the errors of those that fail."""
    most = min(case.rows, _PROBE_ROWS[device.type])
    costs: dict[str, Cost] = {}
    failed: dict[str, str] = {}
    compute = implementations[0].compute
    few, more = (batch_of(case, rows, device, compute) for rows in (max(1, most // 4), most))
    for item in implementations:
        try:
            # The very first call also loads code and starts threads.
            first = _shortest(LossContender(item, few, lambda: None), 2)
            second = _shortest(LossContender(item, more, lambda: None), 1)
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            failed[item.name] = one_line(error)
            continue
        costs[item.name] = fit_cost((few.mask.numel(), first), (most, second))
    return costs, failed


def _affordable(
    case: LossCase, names: Sequence[str], costs: Mapping[str, Cost], budget: float, room: float
) -> int:
    """The rows on which `names` can take their turns in `budget` seconds and `room` bytes; 0 if there are none."""
    element = 4 * _COPIES * case.vocabulary if NAIVE in names else 0
    head = 4 * 4 * case.vocabulary * case.hidden
    rows = shrink_rows(case, (_MEMORY_SHARE * room - head) / element) if element else case.rows
    while rows and _round(names, costs, rows) > budget:
        rows //= 2
    return rows


def _round(names: Sequence[str], costs: Mapping[str, Cost], rows: int) -> float:
    """Seconds of one round."""
    return sum(costs[name].seconds(rows) for name in names)


def plan_rows(
    case: LossCase, costs: Mapping[str, Cost], budget: float, room: float = float("inf")
) -> list[Plan]:
    """Who takes turns on how many rows within `budget` seconds and `room` bytes.

    Everybody on all rows where that fits. Otherwise ours and the naive path share half of the time, and the others take
    turns with ours on rows of their own, so that a ratio is always formed on the same rows. Empty if nothing fits.
    """

    def plan(group: int, names: Sequence[str], share: float) -> Plan:
        rows = _affordable(case, names, costs, budget * share, room)
        shapes = ((case.hidden, case.vocabulary, rows),)
        seconds = _round(names, costs, rows)
        return Plan(group, tuple(names), shapes, share, at_least=1, round_seconds=seconds)

    everybody = plan(0, list(costs), 1.0)
    core = [name for name in costs if name in (OURS, NAIVE)]
    others = [OURS, *(name for name in costs if name not in core)] if OURS in costs else []
    if everybody.shapes == case.shapes or len(core) < 2 or len(others) < 2:
        plans = [everybody]
    else:
        plans = [plan(0, core, _CORE_SHARE), plan(1, others, 1.0 - _CORE_SHARE)]
    return [p for p in plans if p.shapes[0][2]]


def _summary(case: LossCase, plan: Plan, contender: LossContender, samples: list[float]) -> Measurement:
    """What was measured, beside what the cost model says of it."""
    item, rows = contender.implementation, plan.shapes[0][2]
    flops, nbytes, launches, floor = 0.0, elementwise_bytes(rows), 0.0, 0.0
    if case.kind == "linear":
        valid = valid_rows(rows, case.share)
        size = torch.finfo(item.compute).bits // 8
        ops = loss_ops(item.algorithm, Problem(rows, valid, case.hidden, case.vocabulary, size, item.chunk))
        flops, nbytes = sum(o.flops for o in ops), sum(o.nbytes for o in ops)
        floor = floor_flops(valid, case.hidden, case.vocabulary)
    return Measurement(
        item.name,
        plan.shapes,
        describe_rows(case, rows),
        float(rows),
        tuple(samples),
        contender.memory(),
        flops,
        nbytes,
        launches,
        dtype_name(item.compute),
        plan.group,
        floor,
    )


def run_loss_case(
    case: LossCase,
    implementations: Sequence[LossImplementation],
    rates: dict[str, float],
    device: torch.device,
    budget: float,
) -> CaseResult:
    """Measure one case within about `budget` seconds; the speeds are found out here, `rates` is not used."""
    end = time.monotonic() + budget
    chosen = [item for item in implementations if item.kind == case.kind]
    title, work = case.title, float(case.rows)
    if case.floor:
        title += f" ({case.floor * 1e-9:.4g} GFLOP at least)"
    if not chosen:
        return CaseResult(
            case.name, title, case.shapes, work, skipped="no implementation of it was chosen or passed"
        )
    costs, failed = _probe(case, chosen, device)
    left = max(1.0, end - time.monotonic())
    plans = plan_rows(case, costs, left, free_memory(device))
    if not plans:
        reason = f"one row alone would exceed the {left:.0f} s (or the memory) left for this case"
        return CaseResult(case.name, title, case.shapes, work, skipped=reason, left_out=failed)
    fill_cache = cache_filler(device)

    def prepare(plan: Plan) -> Callable[[LossImplementation], LossContender]:
        batch = batch_of(case, plan.shapes[0][2], device, chosen[0].compute)
        return lambda item: LossContender(item, batch, fill_cache)

    outcomes = run_plans(
        plans,
        chosen,
        prepare,
        lambda plan, contender, samples: _summary(case, plan, contender, samples),
        left,
        warm_ups=_WARM_UPS[device.type],
    )
    planned = {name for plan in plans for name in plan.names}
    unplanned = {name: "not even one row fits its time or memory" for name in costs if name not in planned}
    return outcomes.result(case.name, title, case.shapes, work, {**failed, **unplanned})


def _implementations(device: torch.device) -> tuple[list[LossImplementation], list[Unavailable]]:
    peers, missing = loss_peers(device)
    return [*own_losses(device, compute_dtype(device.type == "cuda")), *peers], missing


def _work(case: LossCase) -> float:
    """About the operations of all implementations: some compute all rows, some the valid ones."""
    return case.rows * case.hidden * case.vocabulary * (22.0 + 14.0 * case.share)


def _weight(case: LossCase) -> float:
    """Large cases get more time, but not in proportion: small ones need rounds as well."""
    return max(_work(case), _LEAST_WORK) ** 0.5


def _notes(device: torch.device) -> Sequence[str]:
    return (
        "one call is a forward and a backward pass with gradients for hidden and weight (for the log-probabilities)",
        "gate: loss and every gradient against float64, error at most "
        f"{LOSS_FACTOR:g} times that of plain PyTorch in the same dtype (or {LOSS_FLOOR:g})",
        MODELLED,
        "floor: 6 N H V over the valid rows at the machine's own GEMM rate, as a share of the shortest time",
        "extra memory: peak of the first call beyond its inputs, gradients included",
        "on a GPU the L2 cache is overwritten before each call"
        if device.type == "cuda"
        else "torch.compile is switched off on a CPU",
        "a time extrapolated from few rows is too long: the gradient of the head costs as much for few rows as for many",
    )


LOSS: Final = Suite[LossCase, LossImplementation](
    title="Policy loss times",
    call="one forward and backward pass",
    choose=choose_loss_cases,
    implementations=_implementations,
    check=check_loss,
    rates=lambda implementations, device: ({}, {}),
    run_case=run_loss_case,
    work=_work,
    weight=_weight,
    notes=_notes,
)

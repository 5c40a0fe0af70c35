"""The loss suite: how many rows of a case everybody can afford, and one forward and backward pass after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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

__all__ = ["LOSS", "LossContender", "batch_of", "plan_rows", "run_loss_case"]

_PROBE_ROWS: Final = {"cpu": 256, "cuda": 4096}
_QUICK: Final = 0.5
"""A probe shorter than this many seconds is repeated: the first call also starts threads and compiles."""
_MEMORY_SHARE: Final = 0.85
_COPIES: Final = 4
"""fp32 copies of the whole logits that the naive path may hold at once."""
_CORE_SHARE: Final = 0.5
_FULL_ROUNDS: Final = 1
"""Rounds that must fit: large cases take minutes a round on a CPU, and what is left of the time adds rounds."""
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


def _probe(
    case: LossCase, implementations: Sequence[LossImplementation], device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds a row of each implementation, by a few rows of the case, and the errors of those that fail."""
    rows = min(case.rows, case.rows if case.kind == "elementwise" else _PROBE_ROWS[device.type])
    batch = batch_of(case, rows, device, implementations[0].compute)
    costs: dict[str, float] = {}
    failed: dict[str, str] = {}
    for item in implementations:
        contender = LossContender(item, batch, lambda: None)
        try:
            samples = [contender.seconds()]
            while len(samples) < 3 and samples[-1] < _QUICK:
                samples.append(contender.seconds())
        except Exception as error:  # noqa: BLE001 - a peer that fails is reported with its error
            failed[item.name] = one_line(error)
            continue
        costs[item.name] = min(samples) / rows
    return costs, failed


def _affordable(
    case: LossCase, names: Sequence[str], costs: Mapping[str, float], budget: float, room: float
) -> int:
    """The rows on which `names` can take their turns in `budget` seconds and `room` bytes; 0 if there are none."""
    seconds = _FULL_ROUNDS * sum(costs[name] for name in names)
    element = 4 * _COPIES * case.vocabulary if NAIVE in names else 0
    head = 4 * 4 * case.vocabulary * case.hidden
    limit = min(budget / seconds, (_MEMORY_SHARE * room - head) / element if element else float("inf"))
    return shrink_rows(case, limit)


def plan_rows(
    case: LossCase, costs: Mapping[str, float], budget: float, room: float = float("inf")
) -> list[Plan]:
    """Who takes turns on how many rows within `budget` seconds and `room` bytes.

    Everybody on all rows where that fits. Otherwise ours and the naive path share half of the time, and the others take
    turns with ours on rows of their own, so that a ratio is always formed on the same rows. Empty if nothing fits.
    """

    def plan(group: int, names: Sequence[str], share: float) -> Plan:
        rows = _affordable(case, names, costs, budget * share, room)
        shapes = ((case.hidden, case.vocabulary, rows),)
        seconds = rows * sum(costs[name] for name in names)
        return Plan(group, tuple(names), shapes, share, at_least=_FULL_ROUNDS, round_seconds=seconds)

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
        else "torch.compile is switched off on a CPU; few rows are measured for want of time where it says so",
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

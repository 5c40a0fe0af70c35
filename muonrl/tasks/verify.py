"""Verifying tasks: the true repair must be graded 1 and the empty patch 0, by the grader that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from muonrl.tasks.schema import RepairTask
from muonrl.trajectory import Grade


class GradesTasks(Protocol):
    """Whatever grades a tree: the sandboxed grader, or a SuiteRunner for trusted code."""

    async def grade(self, task: RepairTask, after: Mapping[str, bytes]) -> Grade:
        """The verdict on the tree ``after`` (relative path -> bytes, no tests in it)."""


@dataclass(frozen=True)
class Verdict:
    """What verification found about one task."""

    task_id: str
    gold: Grade
    empty: Grade

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the task, in words; empty when it is sound."""
        found = []
        if self.gold.reward != 1:
            found.append(f"the true repair is graded {self.gold.reward} ({self.gold.reason})")
        if self.gold.suspicious:
            found.append("the true repair is flagged as suspicious")
        if self.empty.reward != 0:
            found.append(f"the empty patch is graded {self.empty.reward}")
        if self.empty.f2p_passed:
            found.append(f"{self.empty.f2p_passed} fail-to-pass tests pass on the buggy tree")
        return tuple(found)


async def verify_task(task: RepairTask, grader: GradesTasks) -> Verdict:
    """Grade the repaired and the unchanged tree of ``task``. Faults of the grader pass through."""
    gold = await grader.grade(task, task.gold_tree)
    empty = await grader.grade(task, task.base)
    return Verdict(task.task_id, gold, empty)


async def verify_tasks(
    tasks: Iterable[RepairTask], grader: GradesTasks, *, concurrency: int = 1
) -> tuple[Verdict, ...]:
    """Verify every task, at most ``concurrency`` at a time; the verdicts come in the order of the tasks."""
    gate = asyncio.Semaphore(concurrency)

    async def one(task: RepairTask) -> Verdict:
        async with gate:
            return await verify_task(task, grader)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task)) for task in tasks]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from faults
    return tuple(item.result() for item in running)

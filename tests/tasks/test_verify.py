"""Verification: sound tasks pass it, every kind of unsound one is named."""

import asyncio

import pytest

from muonrl.errors import InfrastructureError, TaskError
from muonrl.tasks.load import load_tasks
from muonrl.tasks.schema import SPLITS
from muonrl.tasks.show import find_task, show_task
from muonrl.tasks.verify import verify_tasks
from muonrl.trajectory import Grade

FIRST = {task.repo: task for split in SPLITS for task in reversed(load_tasks(split=split))}


def test_one_task_of_every_shipped_repository_is_sound(runner):
    verdicts = asyncio.run(verify_tasks(FIRST.values(), runner))
    assert [verdict.task_id for verdict in verdicts] == [task.task_id for task in FIRST.values()]
    assert [verdict.problems for verdict in verdicts] == [()] * len(FIRST)


class FakeGrader:
    def __init__(self, gold, empty):
        self.grades = {True: gold, False: empty}

    async def grade(self, task, after):
        return self.grades[after == task.gold_tree]


def grade(reward, f2p=0, suspicious=False):
    return Grade(reward, f2p, 2, 5, 5, suspicious=suspicious, reason="why")


@pytest.mark.parametrize(
    "gold, empty, problems",
    [
        (grade(1, 2), grade(0), ()),
        (grade(0), grade(0), ("the true repair is graded 0 (why)",)),
        (grade(1, 2, True), grade(0), ("the true repair is flagged as suspicious",)),
        (
            grade(1, 2),
            grade(1, 2),
            ("the empty patch is graded 1", "2 fail-to-pass tests pass on the buggy tree"),
        ),
    ],
)
def test_what_is_wrong_is_named(gold, empty, problems):
    (verdict,) = asyncio.run(verify_tasks([FIRST["spans"]], FakeGrader(gold, empty), concurrency=2))
    assert verdict.problems == problems


def test_a_fault_of_the_grader_passes_through():
    class Broken:
        async def grade(self, task, after):
            raise InfrastructureError("sandbox_died")

    with pytest.raises(InfrastructureError, match="sandbox_died"):
        asyncio.run(verify_tasks(FIRST.values(), Broken(), concurrency=3))


def test_a_task_is_shown_with_its_repair_as_a_diff():
    text = show_task(FIRST["spans"])
    assert FIRST["spans"].task_id in text and FIRST["spans"].problem_statement in text
    assert "\n-    " in text and "\n+    " in text and "tests/test_" in text
    assert find_task(FIRST.values(), FIRST["tally"].task_id) is FIRST["tally"]
    with pytest.raises(TaskError, match="no task 'spans-nothing-1'; there are spans-"):
        find_task(FIRST.values(), "spans-nothing-1")

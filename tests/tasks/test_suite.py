"""Running a suite for real: statuses, recorded calls, and trees that hang, die or cannot be imported."""

import asyncio
import time
from pathlib import Path

import pytest

from muonrl.errors import InfrastructureError
from muonrl.tasks.load import load_tasks
from muonrl.tasks.suite import SuiteRunner


def with_module(files, old, new):
    assert old in files["toy/core.py"]
    return {**files, "toy/core.py": files["toy/core.py"].replace(old, new)}


def test_every_test_gets_one_status(runner, toy_files):
    result = runner.run(toy_files)
    assert result.error == "" and len(result.outcomes) == 9
    assert result.passed == set(result.outcomes)
    assert result.outcomes["tests/test_core.py::test_expected_to_fail"] == "xfailed"
    assert "tests/test_core.py::test_clamp[args0-3]" in result.outcomes

    broken = runner.run(with_module(toy_files, b"x > hi", b"x >= hi - 1"))
    assert set(result.outcomes) - broken.passed == {"tests/test_core.py::test_clamp[args2-2]"}


def test_the_calls_of_the_tests_are_recorded_once_and_only_theirs(runner, toy_files):
    calls = runner.run(toy_files, record=True).calls
    assert ("toy/core.py", "clamp", "[5, 1, 3]") in calls
    assert ("toy/core.py", "clamp", "[4, 5, 9]") in calls
    assert {function for _, function, _ in calls} == {"clamp", "count_down"}
    assert len(calls) == len(set(calls)) == 9
    assert runner.run(toy_files).calls == ()


@pytest.mark.parametrize(
    "old, new, error",
    [
        (b"n -= 1", b"n += 0", "timeout"),
        (b"n -= 1", b"import os; os._exit(0)", "died"),
        (b"def clamp", b"def klamp", "collection"),
    ],
)
def test_a_tree_that_gives_no_result_says_why(toy_files, old, new, error):
    with SuiteRunner(timeout_s=1.0) as runner:
        result = runner.run(with_module(toy_files, old, new))
        assert (result.error, result.passed) == (error, frozenset())
        assert runner.run(toy_files).error == ""


def test_processes_that_a_suite_started_end_with_it(runner, toy_files, tmp_path):
    note = tmp_path / "pid"
    start = f"""
import subprocess

def test_start():
    open({str(note)!r}, "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
"""
    assert runner.run({**toy_files, "tests/test_start.py": start.encode()}).error == ""
    stat = Path("/proc") / note.read_text() / "stat"
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "the process lives on"


def test_one_run_leaves_nothing_behind_for_the_next(runner, toy_files):
    bad = with_module(toy_files, b"return hi", b"return lo")
    first, second, third = (runner.run(files) for files in (toy_files, bad, toy_files))
    assert first.outcomes == third.outcomes != second.outcomes


def test_the_hash_seed_reaches_the_tests(toy_files):
    answers = []
    for seed in (0, 1, 2):
        with SuiteRunner(seed) as runner:
            answers += runner.call(
                {"toy/core.py": b"def h(x):\n    return hash(x)\n"}, "toy/core.py", "h", ["['a']"]
            )
    assert len(set(answers)) == 3


def test_calls_return_raise_or_hang(runner):
    source = b"def f(x):\n    while x > 1:\n        pass\n    return 1 // x\n"
    results = runner.call({"toy/core.py": source}, "toy/core.py", "f", ["[1]", "[0]", "[2]", "[-1]"])
    assert results == [("returned", "1"), ("raised", "ZeroDivisionError"), ("hung", ""), ("returned", "-1")]
    assert runner.call({"toy/core.py": b"import nowhere"}, "toy/core.py", "f", ["[1]"]) == []


def test_a_package_that_pytest_itself_uses_is_taken_from_the_tree(runner):
    files = {"pluggy/__init__.py": b"", "pluggy/core.py": b"def f():\n    return 'mine'\n"}
    assert runner.call(files, "pluggy/core.py", "f", ["[]"]) == [("returned", "'mine'")]


def test_a_dead_process_is_an_infrastructure_fault(toy_files):
    with SuiteRunner() as runner:
        runner.run(toy_files)
        runner._process.kill()
        with pytest.raises(InfrastructureError, match="suite_worker_died"):
            runner.run(toy_files)


def test_grades_of_trusted_trees(runner):
    task = load_tasks(split="heldout")[0]
    good = asyncio.run(runner.grade(task, task.gold_tree))
    assert (good.reward, good.f2p_passed, good.p2p_passed) == (
        1,
        len(task.fail_to_pass),
        len(task.pass_to_pass),
    )
    bad = asyncio.run(runner.grade(task, task.base))
    assert (bad.reward, bad.f2p_passed, bad.reason) == (0, 0, "tests_failed")

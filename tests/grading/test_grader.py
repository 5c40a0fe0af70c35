"""The grader: what counts as passed, what is cached, what is an infrastructure fault."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muonrl.errors import InfrastructureError
from muonrl.grading import Grader
from muonrl.grading.grader import judge
from muonrl.grading.protection import is_protected, resulting_tree, smells
from muonrl.sandbox import BubblewrapProvider, ExecResult, ProcessProvider, guest_scripts
from muonrl.tasks.schema import RepairTask

KINDS = """
import logging
import unittest
from pathlib import Path

import pytest
from tests.helper import double


@pytest.fixture(scope="module")
def shared():
    yield [1]


@pytest.mark.parametrize("text", ["a b", "x[1]", "p::q", "é", ""])
def test_odd_ids(text, shared):
    assert shared == [1] and isinstance(text, str)


def test_fixtures(tmp_path, monkeypatch, capsys, caplog, request):
    monkeypatch.setenv("X", "1")
    print("hello")
    assert capsys.readouterr().out == "hello\\n"
    logging.getLogger("x").warning("careful")
    assert "careful" in caplog.text
    assert (Path(__file__).parent / "data.bin").read_bytes() == b"\\xff\\x00"
    assert double(2) == 4


class Case(unittest.TestCase):
    def setUp(self):
        self.value = 1

    def test_method(self):
        with self.subTest("inner"):
            self.assertEqual(self.value, 1)


    def test_bad_subtest(self):
        for value in (1, 2, 1):
            with self.subTest(value=value):
                self.assertEqual(self.value, value)


def test_subtests(subtests):
    for value in (1, 2):
        with subtests.test(value=value):
            assert value


def test_failing_subtests(subtests):
    for value in (1, 0, 1):
        with subtests.test(value=value):
            assert value


@pytest.mark.xfail
def test_expected():
    assert False


@pytest.mark.xfail
def test_unexpected():
    pass


def test_skipped():
    pytest.skip("no")


@pytest.fixture
def broken():
    yield
    raise ValueError


def test_teardown(broken):
    pass


def test_warns():
    import warnings
    with pytest.warns(DeprecationWarning):
        warnings.warn("old", DeprecationWarning)


def test_ends_process():
    raise SystemExit(0)
"""
GOOD = [f"test_kinds.py::test_odd_ids[{i}]" for i in ("a b", "x[1]", "p::q", "\\xe9", "")]
GOOD += [f"test_kinds.py::{n}" for n in ("test_fixtures", "Case::test_method", "test_expected", "test_warns")]
BAD = [
    "Case::test_bad_subtest",
    "test_failing_subtests",
    "test_unexpected",
    "test_skipped",
    "test_teardown",
    "test_ends_process",
    "test_absent",
]


def kinds(task: Any, *required: str) -> Any:
    files = {"tests/test_kinds.py": KINDS.encode(), "tests/helper.py": b"def double(x):\n    return 2 * x\n"}
    files |= {"tests/data.bin": b"\xff\x00", "tests/__init__.py": b""}
    return task.with_(test_files=files, fail_to_pass=tuple(f"tests/{r}" for r in required), pass_to_pass=())


def test_all_sorts_of_passing_tests(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    grade = run(grader.grade(kinds(task, *GOOD), task.base))
    assert (grade.reward, grade.f2p_passed) == (1, len(GOOD)), grade


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_pass(name: str, grader: Grader, run: Callable[..., Any], task: Any) -> None:
    grade = run(grader.grade(kinds(task, f"test_kinds.py::{name}"), task.base))
    assert (grade.reward, grade.f2p_passed, grade.f2p_total) == (0, 0, 1), grade


def test_a_task_without_tests_is_never_solved(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    assert run(grader.grade(task.with_(fail_to_pass=(), pass_to_pass=()), task.fixed)).reward == 0


def test_a_real_task_object_is_graded(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    real = RepairTask(
        task_id="calc-2",
        repo="calc",
        base={"calc/__init__.py": b"", "calc/core.py": task.base["calc/core.py"]},
        problem_statement="add(1, 2) is -1",
        fail_to_pass=task.fail_to_pass,
        pass_to_pass=task.pass_to_pass,
        test_files=task.test_files,
        gold_patch={"calc/core.py": task.fixed["calc/core.py"]},
        split="train",
    )
    assert run(grader.grade(real, real.gold_tree)).reward == 1
    assert run(grader.grade(real, real.base)).reward == 0


def test_time_out_is_no_reward_and_not_cached(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    slow = task.with_(timeout_s=0.7)
    after = {**task.fixed, "calc/__init__.py": b"import time; time.sleep(30)\n"}
    begin = time.monotonic()
    for _ in range(2):
        grade = run(grader.grade(slow, after))
        assert (grade.reward, grade.reason, grade.cached) == (0, "timeout", False)
    assert time.monotonic() - begin < 6


def test_the_same_tree_is_graded_once(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    async def many() -> list[Any]:
        junk = {**task.fixed, "tests/mine.py": b"x", "calc/__pycache__/core.cpython-311.pyc": b"y"}
        return await asyncio.gather(*(grader.grade(task, tree) for tree in (task.fixed, task.fixed, junk)))

    grades = run(many())
    assert sorted(g.cached for g in grades) == [False, True, True]
    assert all(g.reward == 1 for g in grades)
    assert [g.seconds for g in grades if g.cached] == [0.0, 0.0]
    assert (grader.real, grader.cached) == (1, 2)
    assert not run(grader.grade(task.with_(task_id="calc-3"), task.fixed)).cached
    assert not run(grader.grade(task, task.base)).cached


def test_without_a_cache_every_grading_is_real(
    provider_and_run: tuple[BubblewrapProvider, Callable[..., Any]], task: Any
) -> None:
    provider, run = provider_and_run
    grader = Grader(provider, cache=False)
    assert not any(run(grader.grade(task, task.fixed)).cached for _ in range(2))
    assert (grader.real, grader.cached) == (2, 0)


def test_a_dying_sandbox_is_a_fault_and_no_verdict(
    provider_and_run: tuple[BubblewrapProvider, Callable[..., Any]], task: Any
) -> None:
    provider, run = provider_and_run
    grader = Grader(provider)

    async def kill_in_the_middle() -> None:
        after = {**task.fixed, "calc/__init__.py": b"import time; time.sleep(30)\n"}
        grading = asyncio.ensure_future(grader.grade(task, after))
        await asyncio.wait([grading], timeout=0.5)
        monitor = provider._server.process.pid  # type: ignore[union-attr]
        for child in Path(f"/proc/{monitor}/task/{monitor}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        await grading

    with pytest.raises(InfrastructureError) as caught:
        run(kill_in_the_middle())
    assert caught.value.reason == "sandbox_died"
    assert run(grader.grade(task, task.fixed)).reward == 1  # and the next grading works


def test_the_process_backend_grades_too(task: Any) -> None:
    async def session() -> list[int]:
        provider = ProcessProvider(guest_scripts(), allow_unsandboxed=True)
        grader = Grader(provider)
        try:
            return [(await grader.grade(task, tree)).reward for tree in (task.fixed, task.base)]
        finally:
            await provider.close()

    assert asyncio.run(session()) == [1, 0]


REPORT = {
    "nonce": "n",
    "results": [["t::a", "passed"], ["t::b", "failed"]],
    "canaries": ["failed", "failed"],
    "duplicates": False,
    "tampered": [],
    "exit": 1,
}


def result(report: Any, rc: int = 1, **changes: Any) -> ExecResult:
    text = report if isinstance(report, bytes) else json.dumps(report).encode()
    fields = {"stdout": text, "stderr": b"", "rc": rc, "timed_out": False, "truncated": False}
    return ExecResult(**(fields | changes))


def test_judge_believes_a_flawless_report() -> None:
    verdict = judge(result(REPORT), "n")
    assert (verdict.fault, verdict.suspicious) == ("", False)
    assert verdict.outcomes == {"t::a": "passed", "t::b": "failed"}


@pytest.mark.parametrize(
    ("case", "fault", "suspicious"),
    [
        (result(REPORT | {"nonce": "m"}), "forged_report", True),
        (result(REPORT | {"results": [["t::a", "passed"], ["t::a", "passed"]]}), "forged_report", True),
        (result(REPORT | {"results": 3}), "forged_report", True),
        (result({k: v for k, v in REPORT.items() if k != "canaries"}), "forged_report", True),
        (result(json.dumps(REPORT).encode() * 2), "forged_report", True),
        (result(REPORT, truncated=True), "forged_report", True),
        (result(b"[]"), "forged_report", True),
        (result(b"\xff\xfe"), "forged_report", True),
        (result(REPORT | {"tampered": ["x"]}), "tampered", True),
        (result(REPORT | {"duplicates": True}), "duplicate_id", True),
        (result(REPORT | {"canaries": ["passed", "failed"]}), "canary", True),
        (result(REPORT | {"canaries": ["failed"]}), "canary", True),
        (result(REPORT, rc=0), "exit_code", True),
        (result(REPORT | {"exit": 0}), "exit_code", True),
        (result(b"", rc=0), "no_report", True),
        (result(b"", rc=139), "no_report", False),
        (result(b"", rc=127), "no_report", False),
        (result(REPORT, timed_out=True), "timeout", False),
    ],
)
def test_judge_believes_nothing_else(case: ExecResult, fault: str, suspicious: bool) -> None:
    verdict = judge(case, "n")
    assert (verdict.fault, verdict.suspicious, dict(verdict.outcomes)) == (fault, suspicious, {})


def test_a_runner_that_cannot_begin_is_a_fault() -> None:
    with pytest.raises(InfrastructureError, match="no such module"):
        judge(result(b"", rc=127, stderr=b"no such module"), "n")


def test_protected_paths() -> None:
    for path in (
        *("tests/test_a.py", "tests/data.txt", "pkg/tests/x.py", "test_a.py", "pkg/a_test.py", "conftest.py"),
        *(
            "pkg/conftest.py",
            "pytest.ini",
            "tox.ini",
            "setup.cfg",
            "pyproject.toml",
            "sitecustomize.py",
            "a/b.pth",
        ),
        *(
            ".git/config",
            "pkg/__pycache__/a.pyc",
            "lib.so",
            "../x",
            "/etc/x",
            "a//b",
            "a\nb",
            "\udcff.py",
            "./a",
        ),
    ):
        assert is_protected(path), path
    for path in (
        "pkg/core.py",
        "a.py",
        "README.md",
        "pkg/testing.py",
        "pkg/latest.py",
        "data/x.json",
        "contest.py",
    ):
        assert not is_protected(path), path
    assert is_protected("odd/place.py", {"odd/place.py"})


def test_resulting_tree_keeps_protected_files_and_honours_deletions() -> None:
    base = {"a.py": b"1", "gone.py": b"2", "conftest.py": b"3", "setup.cfg": b"4"}
    after = {"a.py": b"new", "conftest.py": b"evil", "tests/t.py": b"evil", "b.py": b"5"}
    assert resulting_tree(base, after, ()) == {
        "a.py": b"new",
        "b.py": b"5",
        "conftest.py": b"3",
        "setup.cfg": b"4",
    }


def test_smells_compares_with_what_was_there() -> None:
    old = {"a.py": b"import gc\ndef __eq__(): pass\n"}
    assert not smells(old, old)
    assert not smells(old, {"a.py": b"import gc\ndef __eq__(): return 1\n", "b.txt": b"pytest"})
    assert smells(old, {"a.py": old["a.py"] + b"import pytest\n"})
    assert smells(old, {**old, "b.py": b"import sys\nsys.modules.clear()\n"})


def test_the_runner_as_a_program(task: Any, tmp_path: Path) -> None:
    for path, data in task.fixed.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    request = {
        "nonce": "n",
        "tests": {path: data.decode() for path, data in task.test_files.items()},
        "canaries": ["test_c1", "test_c2"],
        "required": None,
        "stop_early": False,
    }
    done = subprocess.run(
        [sys.executable, str(guest_scripts()["runner"])],
        input=json.dumps(request).encode(),
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    assert done.returncode == 1, done
    report = json.loads(done.stdout)
    assert {outcome for _, outcome in report["results"]} == {"passed"}
    assert sorted(test for test, _ in report["results"]) == sorted(task.fail_to_pass + task.pass_to_pass)

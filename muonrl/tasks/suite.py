"""Running a repository's own tests for real, quickly, in a plain process: for trusted code only.

This is how tasks are made and admitted. It is no sandbox: whatever an agent wrote is graded by the sandboxed grader.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from muonrl.errors import InfrastructureError
from muonrl.tasks.schema import RepairTask
from muonrl.trajectory import Grade

PASSED = ("passed", "xfailed")


@dataclass(frozen=True)
class SuiteResult:
    """What one run of a suite said: a status a node id, the recorded calls, or the reason why there is nothing."""

    outcomes: Mapping[str, str]
    calls: tuple[tuple[str, str, str], ...] = ()
    error: str = ""

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, status in self.outcomes.items() if status in PASSED)


def write_tree(root: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (relative posix path -> bytes) under ``root``."""
    for path, data in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class SuiteRunner:
    """A warm pytest process with one ``PYTHONHASHSEED``; each job runs in a fork of it. Use as a context manager."""

    def __init__(self, hash_seed: int = 0, timeout_s: float = 20.0) -> None:
        self.hash_seed = hash_seed
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SuiteRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> int:
        """End the process and return its exit status; a later call starts a fresh one."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            script = Path(__file__).with_name("suite_worker.py")
            # -s and -P instead of -I: the latter would ignore PYTHONHASHSEED.
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={
                    "PYTHONHASHSEED": str(self.hash_seed),
                    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                    "PATH": os.environ.get("PATH", ""),
                },
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"timeout": self.timeout_s, **job}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise InfrastructureError("suite_worker_died", f"exit status {self.close()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, files: Mapping[str, bytes], *, order: int = 0, record: bool = False) -> SuiteResult:
        """Run the tests of the tree ``files`` in the order given by the seed ``order``.

        ``record`` asks for the calls that the tests make: (path, function, repr of the argument list).
        """
        with tempfile.TemporaryDirectory(prefix="muonrl-suite-") as root:
            write_tree(Path(root), files)
            answer = self._ask(
                {"kind": "suite", "root": os.path.realpath(root), "order": order, "record": record}
            )
        calls = tuple((path, function, args) for path, function, args in answer.get("calls", ()))
        return SuiteResult(answer.get("outcomes", {}), calls, answer.get("error", ""))

    def call(
        self, files: Mapping[str, bytes], path: str, function: str, calls: Sequence[str]
    ) -> list[tuple[str, str]]:
        """Call ``function`` of ``path`` with each repr of an argument list.

        Returns ("returned", repr), ("raised", exception name) or ("hung", "") for each; nothing if the tree cannot be
        imported or the process dies.
        """
        with tempfile.TemporaryDirectory(prefix="muonrl-calls-") as root:
            write_tree(Path(root), files)
            job = {"kind": "calls", "root": os.path.realpath(root), "path": path, "function": function}
            answer = self._ask({**job, "calls": list(calls)})
        return [(kind, text) for kind, text in answer.get("results", ())]

    async def grade(self, task: RepairTask, after: Mapping[str, bytes]) -> Grade:
        """Grade a tree that is trusted, with the same verdict as the sandboxed grader gives on honest trees."""
        started = time.monotonic()
        result = self.run({**after, **task.test_files})
        fail, keep = (len(result.passed.intersection(ids)) for ids in (task.fail_to_pass, task.pass_to_pass))
        whole = fail == len(task.fail_to_pass) and keep == len(task.pass_to_pass)
        return Grade(
            reward=int(whole),
            f2p_passed=fail,
            f2p_total=len(task.fail_to_pass),
            p2p_passed=keep,
            p2p_total=len(task.pass_to_pass),
            reason="" if whole else result.error or "tests_failed",
            seconds=time.monotonic() - started,
        )

"""The reward: hidden tests run on the agent's tree in a fresh sandbox, and a verdict that does not trust it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from muonrl.errors import InfrastructureError
from muonrl.grading.protection import resulting_tree, smells
from muonrl.sandbox.protocol import ExecResult, SandboxProvider
from muonrl.trajectory import Grade

PASSED = frozenset({"passed", "xfailed"})
_MAX_REPORT = 1 << 20


class GradedTask(Protocol):
    """What grading needs to know of a repair task."""

    @property
    def task_id(self) -> str: ...
    @property
    def base(self) -> Mapping[str, bytes]: ...
    @property
    def fail_to_pass(self) -> tuple[str, ...]: ...
    @property
    def pass_to_pass(self) -> tuple[str, ...]: ...
    @property
    def test_files(self) -> Mapping[str, bytes]: ...
    @property
    def timeout_s(self) -> float: ...


@dataclass(frozen=True)
class Verdict:
    """What one run of the tests proved: outcomes by node id, why it counts for nothing if it does, whether it smells."""

    outcomes: Mapping[str, str]
    fault: str = ""
    suspicious: bool = False


class Grader:
    """Grades trees; see :meth:`grade`.

    ``timeout`` in seconds caps the tasks' own. With ``cache`` the verdict on an identical tree of the same task is
    reused (time-outs excepted) and marked ``cached``. ``real`` and ``cached`` count the gradings of each sort.
    """

    def __init__(
        self, provider: SandboxProvider, *, cache: bool = True, timeout: float | None = None
    ) -> None:
        self._provider = provider
        self._timeout = timeout
        self._known: dict[str, Grade] | None = {} if cache else None
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self.real = 0
        self.cached = 0

    async def grade(self, task: GradedTask, after: Mapping[str, bytes]) -> Grade:
        """Grade the tree ``after`` that the agent left.

        Reward 1 only if every fail-to-pass and pass-to-pass test was seen to pass; the passed counts are lower bounds
        otherwise, since the run stops at the first required test that does not pass. ``seconds`` is CPU time, 0 if
        cached. Raises InfrastructureError for a fault of the sandbox, which is no verdict.
        """
        tree = resulting_tree(task.base, after, task.test_files)
        if self._known is None:
            return await self._grade(task, tree)
        key = _key(task.task_id, tree)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:
            known = self._known.get(key)
            if known is not None:
                self.cached += 1
                return replace(known, cached=True, seconds=0.0)
            grade = await self._grade(task, tree)
            if grade.reason != "timeout":
                self._known[key] = grade
            return grade

    async def _grade(self, task: GradedTask, tree: Mapping[str, bytes]) -> Grade:
        required = (*task.fail_to_pass, *task.pass_to_pass)
        nonce, canaries = secrets.token_hex(16), [f"test_{secrets.token_hex(6)}" for _ in range(2)]
        request = {
            "nonce": nonce,
            "tests": {path: data.decode("latin-1") for path, data in task.test_files.items()},
            "canaries": canaries,
            "required": required,
            "stop_early": True,
        }
        limit = task.timeout_s if self._timeout is None else min(task.timeout_s, self._timeout)
        sandbox = await self._provider.acquire()
        try:
            await sandbox.put(tree)
            result = await sandbox.call(
                "runner", json.dumps(request).encode(), timeout=limit, max_bytes=_MAX_REPORT
            )
        finally:
            await sandbox.close()
        self.real += 1
        verdict = judge(result, nonce)
        passed = (
            {t for t, outcome in verdict.outcomes.items() if outcome in PASSED}
            if not verdict.fault
            else set()
        )
        f2p = sum(t in passed for t in task.fail_to_pass)
        p2p = sum(t in passed for t in task.pass_to_pass)
        ok = bool(required) and f2p + p2p == len(required)
        return Grade(
            reward=int(ok),
            f2p_passed=f2p,
            f2p_total=len(task.fail_to_pass),
            p2p_passed=p2p,
            p2p_total=len(task.pass_to_pass),
            suspicious=verdict.suspicious or smells(task.base, tree),
            reason=verdict.fault or ("passed" if ok else "test_failed"),
            seconds=result.cpu_s,
        )


def judge(result: ExecResult, nonce: str) -> Verdict:
    """Read the runner's report as evidence: whatever is not exactly as it must be makes the run count for nothing.

    Raises InfrastructureError ``runner_broken`` if the runner never began: it closes stderr before it
    lets in any code under test.
    """
    if result.timed_out:
        return Verdict({}, "timeout")
    if not result.stdout:
        if result.stderr:
            raise InfrastructureError("runner_broken", result.stderr[-300:].decode("utf-8", "replace"))
        # The process ended before the end of the tests: os._exit, a crash, memory. Only the first claims success.
        return Verdict({}, "no_report", suspicious=result.rc == 0)
    try:
        report = json.loads(result.stdout)
        genuine = report["nonce"] == nonce and not result.truncated
        outcomes = {str(test): str(outcome) for test, outcome in report["results"]}
        canaries, duplicates = list(report["canaries"]), bool(report["duplicates"])
        tampered, code = list(report["tampered"]), int(report["exit"])
    except (ValueError, KeyError, TypeError):
        return Verdict({}, "forged_report", suspicious=True)
    if not genuine or len(outcomes) != len(report["results"]):
        return Verdict({}, "forged_report", suspicious=True)
    if tampered:
        return Verdict({}, "tampered", suspicious=True)
    if duplicates:
        return Verdict({}, "duplicate_id", suspicious=True)
    if canaries != ["failed", "failed"]:
        return Verdict({}, "canary", suspicious=True)
    if result.rc != 1 or code != 1:
        return Verdict({}, "exit_code", suspicious=True)
    return Verdict(outcomes)


def _key(task_id: str, tree: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(task_id.encode())
    for path, data in sorted(tree.items()):
        digest.update(f"\0{path}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()

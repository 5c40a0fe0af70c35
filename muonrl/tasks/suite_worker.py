"""A warm pytest: imports it once, then answers each job (one JSON line) from a forked child (one JSON line).

Self-contained: run as ``python -s -P suite_worker.py``. Jobs:
``{"kind": "suite", "root": DIR, "order": SEED, "record": BOOL}`` runs ``DIR/tests`` in a shuffled order and answers
``{"outcomes": {node id: status}, "calls": [[path, function, arguments], ...]}``;
``{"kind": "calls", "root": DIR, "path": FILE, "function": NAME, "calls": [arguments, ...]}`` calls one function and
answers ``{"results": [["returned", repr] | ["raised", name] | ["hung", ""], ...]}``.
A child that dies or outlives ``timeout`` seconds is answered by ``{"error": slug}``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.config import default_plugins

# Imported here once, not in every child.
for _name in default_plugins:
    importlib.import_module(f"_pytest.{_name}")

# What a run needs neither for its outcomes nor for the fixtures that tests may ask for.
_UNUSED_PLUGINS = (
    *(
        "terminal",
        "assertion",
        "cacheprovider",
        "doctest",
        "junitxml",
        "pastebin",
        "stepwise",
        "faulthandler",
    ),
    *("debugging", "setuponly", "setupplan", "threadexception", "unraisableexception", "legacypath"),
)
_ARGUMENTS = (
    "--noconftest",
    "--import-mode=importlib",
    *(word for plugin in _UNUSED_PLUGINS for word in ("-p", f"no:{plugin}")),
)
_MEMORY = 2 << 30
_CALL_SECONDS = 0.25  # of processor time, so that a busy machine changes nothing


class _Collector:
    """A pytest plugin that shuffles the tests and keeps one status a test."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid)
        random.Random(self.order).shuffle(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        status = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        if report.when == "call" or status != "passed":
            self.outcomes[report.nodeid] = status


class _Recorder:
    """A profile function that notes the literal arguments of the calls that test code makes."""

    def __init__(self, root: Path) -> None:
        self.root, self.tests = f"{root}/", f"{root}/tests/"
        self.calls: dict[tuple[str, str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or not caller.f_code.co_filename.startswith(self.tests):
            return
        inside = code.co_filename.startswith(self.root) and not code.co_filename.startswith(self.tests)
        if (
            not inside
            or code.co_flags & 0x0C
            or code.co_kwonlyargcount
            or "." in code.co_qualname
            or code.co_qualname.startswith("<")
        ):
            return
        names = code.co_varnames[: code.co_argcount]
        with contextlib.suppress(ValueError, SyntaxError, TypeError):
            arguments = repr([frame.f_locals[name] for name in names])
            if repr(ast.literal_eval(arguments)) == arguments:
                self.calls[code.co_filename.removeprefix(self.root), code.co_name, arguments] = None


def _run_suite(job: dict[str, Any]) -> dict[str, Any]:
    root = Path(job["root"])
    collector, recorder = _Collector(job["order"]), _Recorder(root)
    if job["record"]:
        sys.setprofile(recorder)
    try:
        code = pytest.main(
            [*_ARGUMENTS, "-c", "/dev/null", f"--rootdir={root}", f"{root}/tests"], plugins=[collector]
        )
    finally:
        sys.setprofile(None)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return {"error": "collection"}
    return {"outcomes": collector.outcomes, "calls": [list(call) for call in recorder.calls]}


class _HungError(BaseException):
    pass


def _on_alarm(_: int, __: FrameType | None) -> None:
    raise _HungError


def _run_calls(job: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(job["path"].removesuffix(".py").replace("/", "."))
    function = getattr(module, job["function"])
    signal.signal(signal.SIGVTALRM, _on_alarm)
    results: list[tuple[str, str]] = []
    for arguments in job["calls"]:
        signal.setitimer(signal.ITIMER_VIRTUAL, _CALL_SECONDS)
        try:
            results.append(("returned", repr(function(*ast.literal_eval(arguments)))))
        except _HungError:
            results.append(("hung", ""))
        except Exception as error:  # noqa: BLE001 - whatever the function raises is the result
            results.append(("raised", type(error).__name__))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {"results": results}


def _enter(root: Path) -> None:
    """Make ``root`` the first place to import from, also for names that pytest itself has imported."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    own = {path.stem for path in root.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in own]:
        del sys.modules[name]


def _child(job: dict[str, Any], answer: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    _enter(Path(job["root"]))
    run = _run_suite if job["kind"] == "suite" else _run_calls
    data = json.dumps(run(job)).encode()
    while data:
        data = data[os.write(answer, data) :]


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return data
        data += chunk


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            os.setpgid(0, 0)
            _child(job, write)
        finally:
            os._exit(0)
    os.close(write)
    try:
        data = _read_all(read, time.monotonic() + job["timeout"])
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)  # the child may not have made its group yet
        os.waitpid(pid, 0)
    if data is None:
        return {"error": "timeout"}
    answer: dict[str, Any] = json.loads(data) if data else {"error": "died"}
    return answer


def main() -> None:
    """Answer the jobs on standard input until it ends."""
    sys.dont_write_bytecode = True
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

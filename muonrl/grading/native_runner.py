"""Runs hidden tests against the tree in the working directory. Runs inside the sandbox; standard library and pytest only.

A JSON request on stdin: {"nonce", "tests": {path: text}, "canaries": [name, name], "required": [node id, ...],
"stop_early"}; texts are bytes decoded as latin-1. The report goes to a private duplicate of stdout, in one piece, at the very
end, and repeats the nonce: {"nonce", "results": [[id, outcome], ...], "canaries": [outcome, outcome], "duplicates",
"tampered": [what, ...], "exit"}. Outcomes: passed, failed, skipped, xfailed, xpassed, error.

:func:`warm_up` prepares a pytest session in a long-lived interpreter; :func:`main` runs in a fork of it, or by itself.

The tests live in a folder of their own with a name that nobody can know beforehand. A canary is a test that must fail; one
runs first, one last. The code under test shares this process, so it can be watched but not locked out: what pytest is
made of is compared with what it was before any of that code was imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import secrets
import sys
import tempfile
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import _prepareconfig, default_plugins

_WATCHED_PREFIXES = ("_pytest", "pytest", "pluggy", "unittest")
_WATCHED_MODULES = ("builtins", "os", "json", "json.encoder", "operator", "io")
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
_UNUSED_PLUGINS = (
    "terminal",
    "assertion",
    "cacheprovider",
    "doctest",
    "junitxml",
    "pastebin",
    "stepwise",
    "faulthandler",
    "setuponly",
    "setupplan",
    "threadexception",
    "unraisableexception",
    "legacypath",
)
_ARGUMENTS = (
    *("-c", "/dev/null"),
    "--noconftest",
    "--import-mode=importlib",
    "--capture=no",
    "--continue-on-collection-errors",
    *(word for plugin in _UNUSED_PLUGINS for word in ("-p", f"no:{plugin}")),
)

_write, _exit, _dumps = os.write, os._exit, json.dumps


def _watched() -> Iterator[tuple[str, dict[str, Any] | types.MappingProxyType[str, Any]]]:
    """(name, namespace) of every module and class whose callables must not change."""
    for name, module in list(sys.modules.items()):
        if name in _WATCHED_MODULES or name.split(".")[0] in _WATCHED_PREFIXES:
            space = vars(module)
            yield name, space
            for value in list(space.values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{value.__qualname__}", vars(value)


class Seal:
    """What pytest and a few modules are made of, to be compared later."""

    def __init__(self) -> None:
        self.bindings: list[tuple[str, Any, str, Any]] = []
        self.functions: list[tuple[str, types.FunctionType, Any, Any]] = []
        for owner, space in _watched():
            for key, value in list(space.items()):
                if isinstance(value, _CALLABLES):
                    self.bindings.append((owner, space, key, value))
                if isinstance(value, types.FunctionType):
                    self.functions.append((f"{owner}.{key}", value, value.__code__, value.__defaults__))

    def broken(self) -> list[str]:
        """Names that are bound to something else now, functions with other code or defaults, and active tracing."""
        changes = [
            f"{owner}.{key}" for owner, space, key, value in self.bindings if space.get(key) is not value
        ]
        changes += [
            n
            for n, f, code, defaults in self.functions
            if f.__code__ is not code or f.__defaults__ is not defaults
        ]
        return changes + [f"sys.{f.__name__}" for f in (sys.gettrace, sys.getprofile) if f() is not None]


class Warm:
    """A pytest session that has begun and knows no test yet, and the seal on what it is made of."""

    def __init__(self) -> None:
        for name in default_plugins:  # what a run would import later, so that the forks need not
            importlib.import_module(f"_pytest.{name}")
        # Set, not looked for: the warm interpreter may write nowhere, its forks may.
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
        config = _prepareconfig([*_ARGUMENTS, f"--rootdir={tempfile.gettempdir()}"])
        self.session = pytest.Session.from_config(config)
        config._do_configure()
        config.hook.pytest_sessionstart(session=self.session)
        self.seal = Seal()

    def run(self, recorder: Recorder, files: list[str]) -> int:
        """Collect and run ``files``; returns pytest's exit status, 3 if something broke out of the session."""
        session = self.session
        manager = session.config.pluginmanager
        manager.register(recorder)
        known = {id(plugin) for plugin in manager.get_plugins()}
        session.config.args = files
        try:
            session.config.hook.pytest_collection(session=session)
            session.config.hook.pytest_runtestloop(session=session)
        except BaseException:  # noqa: BLE001 - SystemExit, KeyboardInterrupt: the report must still be written
            return 3
        foreign = [plugin for plugin in manager.get_plugins() if id(plugin) not in known]
        recorder.tampered += [f"plugin {type(plugin).__name__}" for plugin in foreign]
        return 1 if session.testsfailed else 0


_warm: Warm | None = None


def warm_up() -> None:
    """Prepare this interpreter, so that :func:`main` is quick in a fork of it."""
    global _warm
    _warm = Warm()


class Recorder:
    """The plugin that orders the tests, records every outcome once, and cross-checks reports with exceptions."""

    def __init__(
        self, prefix: str, canaries: list[str], required: list[str] | None, stop_early: bool
    ) -> None:
        self.prefix, self.required, self.stop_early = prefix, required, stop_early
        self.canary_ids = [f"{name}.py::{name}" for name in canaries]
        self.results: dict[str, str] = {}
        self.raised: set[str] = set()
        self.failed_parts: set[str] = set()
        self.tampered: list[str] = []
        self.duplicates = self.decided = False

    def name(self, nodeid: str) -> str:
        """The node id as the task knows it: without the folder that nobody can know."""
        return nodeid.removeprefix(self.prefix)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        collector.repr_failure = _no_traceback  # type: ignore[method-assign]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id: dict[str, pytest.Item] = {}
        for item in items:
            self.duplicates |= self.name(item.nodeid) in by_id
            by_id[self.name(item.nodeid)] = item
        first, last = (by_id.pop(c) for c in self.canary_ids)
        wanted = list(by_id) if self.required is None else [t for t in self.required if t in by_id]
        missing = self.required is not None and len(wanted) < len(self.required)
        self.decided = self.stop_early and missing
        items[:] = [first, *(by_id[t] for t in wanted), last]
        for item in items:
            item.repr_failure = _no_traceback  # type: ignore[method-assign]  # formatting one costs more than a test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        except BaseException:
            self.raised.add(self.name(item.nodeid))
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Pass over the tests that no longer matter; the last canary always runs."""
        if not self.decided or self.name(item.nodeid) in self.canary_ids:
            return None
        # The test before this one left set up what it would have shared with it; a failure there changes nothing.
        with contextlib.suppress(Exception):
            item.session._setupstate.teardown_exact(nextitem)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = self.name(report.nodeid)
        if type(report) is not pytest.TestReport:
            # Subtests report by a type of their own; their test then passes whatever they said.
            if report.outcome == "failed":
                self.failed_parts.add(name)
            return
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = "failed" if name in self.failed_parts else _outcome(report)
        if report.when == "call":
            self.duplicates |= name in self.results
            if outcome == "passed" and name in self.raised:
                self.tampered.append(f"report of {name}")
        self.results[name] = outcome
        if self.stop_early and name not in self.canary_ids and outcome not in ("passed", "xfailed"):
            self.decided = True


def _no_traceback(excinfo: object, style: object = None) -> str:
    return ""


def _outcome(report: pytest.TestReport) -> str:
    expected = hasattr(report, "wasxfail")
    if report.outcome == "skipped":
        return "xfailed" if expected else "skipped"
    if report.outcome == "passed":
        return "xpassed" if expected else "passed"
    return "failed" if report.when == "call" else "error"


def _lay_out(request: dict[str, Any]) -> Path:
    """Write the tests and the canaries to a new folder; returns it."""
    folder = Path(tempfile.gettempdir(), f"h{secrets.token_hex(8)}")
    files = dict(request["tests"])
    for name in request["canaries"]:
        files[f"{name}.py"] = f"def {name}():\n    assert {name!r} == ''\n"
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode("latin-1"))
    return folder


def _private_stdout() -> int:
    """Move stdout to a descriptor of random number; what prints goes nowhere."""
    private = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 32 + secrets.randbelow(200))
    null = os.open("/dev/null", os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
    return private


def main() -> int:
    """Run one request; does not return: the exit status is pytest's own (1, since the canaries fail)."""
    request = json.loads(sys.stdin.buffer.read())
    warm = _warm or Warm()
    folder = _lay_out(request)
    first, last = request["canaries"]
    recorder = Recorder(f"{folder.name}/", request["canaries"], request["required"], request["stop_early"])
    # Behind the standard library: a tree must not stand in for it. The tests may import helpers next to them.
    sys.path += [str(Path.cwd()), str(folder)]
    files = [str(folder / path) for path in (f"{first}.py", *_selected(request), f"{last}.py")]
    private = _private_stdout()  # from here on failures are the tree's own
    gc.disable()  # a short life, and the parent's heap stays shared
    code = warm.run(recorder, files)
    report = {
        "nonce": request["nonce"],
        "results": [r for r in recorder.results.items() if r[0] not in recorder.canary_ids],
        "canaries": [recorder.results.get(c, "missing") for c in recorder.canary_ids],
        "duplicates": recorder.duplicates,
        "tampered": (recorder.tampered + warm.seal.broken())[:5],
        "exit": code,
    }
    _write(private, _dumps(report).encode())
    _exit(code)


def _selected(request: dict[str, Any]) -> list[str]:
    """Test files to collect: those that hold a required test, or all that look like one."""
    tests = {path for path in request["tests"] if path.endswith(".py")}
    if request["required"] is not None:
        return sorted({node.split("::")[0] for node in request["required"]} & tests)
    return sorted(p for p in tests if Path(p).name.startswith("test_") or p.endswith("_test.py"))


if __name__ == "__main__":
    sys.exit(main())

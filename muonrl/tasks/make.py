"""Making repair tasks from a repository with tests: mutate, run the tests for real, admit what is a clear task.

The repository's own code is run on this machine without a sandbox, so make tasks only from code that you trust.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from muonrl.errors import TaskError
from muonrl.tasks.load import Repository, dump_tasks, read_repository
from muonrl.tasks.operators import Edit, candidate_edits, functions, is_unambiguous
from muonrl.tasks.schema import RepairTask, Split
from muonrl.tasks.suite import SuiteRunner, write_tree

HASH_SEEDS = (0, 1, 2)
MIN_PASS_TO_PASS = 5
MAX_STATEMENT = 80


@dataclass(frozen=True)
class MakeOptions:
    """What to make: at most ``limit`` tasks, at most ``per_function`` bugs a function, all choices from ``seed``."""

    split: Split = "train"
    seed: int = 0
    limit: int = 20
    per_function: int = 2
    timeout_s: float = 10.0


@dataclass(frozen=True, eq=False)
class MakeReport:
    """The admitted tasks, all test ids of the repository, and how many mutants were refused for which reason."""

    repository: Repository
    tests: tuple[str, ...]
    tasks: tuple[RepairTask, ...]
    refused: Mapping[str, int]

    @property
    def text(self) -> str:
        """The ``.jsonl`` file of these tasks."""
        return dump_tasks(self.tasks, self.repository, list(self.tests))


@dataclass
class _Target:
    """One function that bugs are put into, with the mutants not yet tried and the calls that the tests make."""

    path: str
    function: str
    edits: list[Edit]
    calls: list[str]
    expected: list[tuple[str, str]]
    defaults: list[str]
    taken: int = 0


class _Refused(Exception):
    pass


class _Maker:
    def __init__(self, repository: Repository, options: MakeOptions, runners: list[SuiteRunner]) -> None:
        self.repository = repository
        self.options = options
        self.runners = runners
        self.operators: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.tests, self.calls = self._check_base()

    def _check_base(self) -> tuple[tuple[str, ...], dict[tuple[str, str], list[str]]]:
        """The suite must pass whole under every hash seed and order. Returns its ids and the calls that it makes."""
        tree = self.repository.tree
        results = [runner.run(tree, order=runner.hash_seed) for runner in self.runners]
        for result in results:
            if result.error:
                raise TaskError(f"{self.repository.name}: the tests cannot be run ({result.error})")
            if bad := sorted(set(result.outcomes) - result.passed):
                raise TaskError(f"{self.repository.name}: {bad[0]} does not pass on the unchanged repository")
        if any(result.outcomes.keys() != results[0].outcomes.keys() for result in results):
            raise TaskError(f"{self.repository.name}: the tests that are collected change from run to run")
        calls: dict[tuple[str, str], list[str]] = {}
        for path, function, arguments in self.runners[0].run(tree, record=True).calls:
            calls.setdefault((path, function), []).append(arguments)
        return tuple(sorted(results[0].outcomes)), {key: sorted(value) for key, value in calls.items()}

    def targets(self) -> list[_Target]:
        """Every module-level function that the tests call directly, its mutants in a seeded order."""
        found: list[_Target] = []
        for path, data in sorted(self.repository.files.items()):
            if not path.endswith(".py") or not data.isascii():
                continue
            source = data.decode()
            for name, node in functions(source).items():
                if calls := self.calls.get((path, name)):
                    edits = [edit for edit in candidate_edits(source, name) if is_unambiguous(edit)]
                    random.Random(f"{self.options.seed}:{self.repository.name}:{name}").shuffle(edits)
                    expected, again = (
                        runner.call(self.repository.files, path, name, calls) for runner in self.runners[:2]
                    )
                    stable = [
                        i for i, (one, two) in enumerate(zip(expected, again, strict=True)) if one == two
                    ]
                    defaults = [ast.unparse(value) for value in node.args.defaults]
                    kept = [calls[i] for i in stable]
                    found.append(_Target(path, name, edits, kept, [expected[i] for i in stable], defaults))
        return found

    def statement(self, target: _Target, files: Mapping[str, bytes]) -> str:
        """One line made from the shortest failing call of the buggy function."""
        got = self.runners[0].call(files, target.path, target.function, target.calls)
        if not got:
            raise _Refused("import_fails")
        if any(kind == "hung" for kind, _ in got):
            raise _Refused("hangs")
        lines = []
        for arguments, want, have in zip(target.calls, target.expected, got, strict=True):
            if want != have and " at 0x" not in want[1] + have[1]:
                call = f"{target.function}({_argument_text(arguments, target.defaults)})"
                expected = want[1] if want[0] == "returned" else f"it to raise {want[1]}"
                lines.append(f"{call} {have[0]} {have[1]}, expected {expected}")
        lines = sorted(
            (line for line in lines if len(line) <= MAX_STATEMENT), key=lambda line: (len(line), line)
        )
        if not lines:
            raise _Refused("no_short_failing_call")
        return lines[0]

    def admit(self, target: _Target, edit: Edit) -> RepairTask:
        """Run the tests on the buggy tree under every hash seed and order; refuse what is not a clear task."""
        files = {**self.repository.files, target.path: edit.text.encode()}
        statement = self.statement(target, files)
        failing: set[str] | None = None
        for runner in self.runners:
            result = runner.run({**files, **self.repository.test_files}, order=runner.hash_seed)
            if result.error:
                raise _Refused(result.error)
            now = set(self.tests) - result.passed
            if not now:
                raise _Refused("survives")
            if failing is not None and now != failing:
                raise _Refused("flaky")
            failing = now
        assert failing is not None
        if len(self.tests) - len(failing) < MIN_PASS_TO_PASS:
            raise _Refused("few_pass_to_pass")
        return RepairTask(
            task_id=f"{self.repository.name}-{target.function}-{target.taken + 1}",
            repo=self.repository.name,
            base=files,
            problem_statement=statement,
            fail_to_pass=tuple(sorted(failing)),
            pass_to_pass=tuple(test for test in self.tests if test not in failing),
            test_files=self.repository.test_files,
            gold_patch={target.path: self.repository.files[target.path]},
            split=self.options.split,
            timeout_s=self.options.timeout_s,
            provenance={
                "operator": edit.operator,
                "path": target.path,
                "function": target.function,
                "line": str(edit.line),
            },
        )

    def next_task(self, target: _Target) -> RepairTask | None:
        """The next admitted bug of ``target``, the operators that were used least so far first."""
        while target.edits:
            edit = min(target.edits, key=lambda edit: self.operators[edit.operator])
            target.edits.remove(edit)
            try:
                task = self.admit(target, edit)
            except _Refused as refusal:
                self.refused[str(refusal)] += 1
                continue
            # A second bug sits on another line: two edits of one line would be near copies.
            target.edits = [other for other in target.edits if other.line != edit.line]
            target.taken += 1
            self.operators[edit.operator] += 1
            return task
        return None

    def make(self) -> MakeReport:
        tasks: list[RepairTask] = []
        targets = self.targets()
        for _ in range(self.options.per_function):
            for target in targets:
                if len(tasks) < self.options.limit and (task := self.next_task(target)) is not None:
                    tasks.append(task)
        tasks.sort(key=lambda task: task.task_id)
        return MakeReport(self.repository, self.tests, tuple(tasks), dict(sorted(self.refused.items())))


def _argument_text(arguments: str, defaults: list[str]) -> str:
    """The arguments as they are written in a call: without trailing ones that equal their defaults."""
    values = [ast.unparse(value) for value in ast.parse(arguments, mode="eval").body.elts]  # type: ignore[attr-defined]
    while defaults and values and values[-1] == defaults[-1]:
        defaults, values = defaults[:-1], values[:-1]
    return ", ".join(values)


def make_tasks(root: Path, options: MakeOptions | None = None) -> MakeReport:
    """Make tasks from the repository at ``root``: a package and a ``tests`` folder that pytest can run.

    Deterministic in the tree and the options. Raises TaskError when the repository's own suite does not pass.
    """
    with ExitStack() as stack:
        runners = [stack.enter_context(SuiteRunner(seed)) for seed in HASH_SEEDS]
        return _Maker(read_repository(root), options or MakeOptions(), runners).make()


def write_tasks(report: MakeReport, data: Path) -> Path:
    """Add a made repository and its tasks to the data set folder ``data``; returns the task file.

    Raises TaskError when there is nothing to write or another repository of that name is there.
    """
    if not report.tasks:
        raise TaskError(f"{report.repository.name}: no mutant was admitted ({dict(report.refused)})")
    tree = data / "repos" / report.repository.name
    if not tree.exists():
        write_tree(tree, report.repository.tree)
    elif read_repository(tree).digest != report.repository.digest:
        raise TaskError(f"{tree} holds another repository of that name")
    path = data / "tasks" / report.tasks[0].split / f"{report.repository.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(report.text, encoding="utf-8")
    partial.replace(path)
    return path

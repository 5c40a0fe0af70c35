"""Reading and writing data sets of tasks.

A data set is a folder: ``repos/<repo>/...`` holds the repaired repositories, ``tasks/<split>/<repo>.jsonl`` their
bugs. The first line of such a file describes the repository (its digest and the ids of its tests), every other line is
one task with its bug as a unified diff. Pass-to-pass tests are all tests that are not fail-to-pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muonrl.errors import TaskError
from muonrl.tasks.diffs import apply_diff, diff_path, make_diff
from muonrl.tasks.schema import SPLITS, RepairTask, Split

DATA = Path(__file__).parent / "data"
FORMAT = 1
_TESTS = "tests/"
_SKIPPED = ("__pycache__", ".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_MAX_BYTES = 20_000_000


@dataclass(frozen=True, eq=False)
class Repository:
    """A repaired tree: ``files`` without its tests, ``test_files`` alone."""

    name: str
    files: Mapping[str, bytes]
    test_files: Mapping[str, bytes]

    @property
    def tree(self) -> dict[str, bytes]:
        return {**self.files, **self.test_files}

    @property
    def digest(self) -> str:
        """sha256 over all paths and contents."""
        state = hashlib.sha256()
        for path, data in sorted(self.tree.items()):
            state.update(f"{path}\0{len(data)}\0".encode() + data)
        return state.hexdigest()


def read_repository(root: Path) -> Repository:
    """Read the tree under ``root``; what lies in its ``tests`` folder is hidden from the agent.

    Raises TaskError when there is no tree, no test, or more than 20 MB.
    """
    if not root.is_dir():
        raise TaskError(f"{root}: no such repository")
    files: dict[str, bytes] = {}
    size = 0
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not path.is_file() or any(part in _SKIPPED for part in name.split("/")):
            continue
        size += path.stat().st_size
        if size > _MAX_BYTES:
            raise TaskError(f"{root}: larger than {_MAX_BYTES // 1_000_000} MB")
        files[name] = path.read_bytes()
    hidden = {name: data for name, data in files.items() if name.startswith(_TESTS)}
    if not hidden:
        raise TaskError(f"{root}: no {_TESTS} folder with tests")
    return Repository(root.name, {name: data for name, data in files.items() if name not in hidden}, hidden)


def _field(row: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in row:
        raise TaskError(f"{key!r} is missing")
    if not isinstance(row[key], kind) or (kind is not bool and isinstance(row[key], bool)):
        raise TaskError(f"{key!r} is {row[key]!r}, not of type {kind.__name__}")
    return row[key]


def _strings(row: Mapping[str, Any], key: str) -> list[str]:
    values: list[Any] = _field(row, key, list)
    if not all(isinstance(value, str) for value in values):
        raise TaskError(f"{key!r} holds something that is not a string")
    return values


def _header(row: Mapping[str, Any], repository: Repository) -> list[str]:
    if (version := _field(row, "format", int)) != FORMAT:
        raise TaskError(f"format {version} is not the format {FORMAT} that is read here")
    if _field(row, "digest", str) != repository.digest:
        raise TaskError(f"the repository {repository.name!r} is not the one that these tasks were made from")
    return _strings(row, "tests")


def _task(row: Mapping[str, Any], repository: Repository, tests: list[str], split: Split) -> RepairTask:
    bug: str = _field(row, "bug", str)
    path = diff_path(bug)
    if path not in repository.files:
        raise TaskError(f"the bug changes {path}, which the repository does not have")
    buggy = apply_diff(repository.files[path].decode(), bug).encode()
    failing = _strings(row, "fail_to_pass")
    if unknown := set(failing) - set(tests):
        raise TaskError(f"{sorted(unknown)[0]} is no test of the repository")
    return RepairTask(
        task_id=_field(row, "task_id", str),
        repo=repository.name,
        base={**repository.files, path: buggy},
        problem_statement=_field(row, "problem_statement", str),
        fail_to_pass=tuple(failing),
        pass_to_pass=tuple(test for test in tests if test not in failing),
        test_files=repository.test_files,
        gold_patch={path: repository.files[path]},
        split=split,
        timeout_s=float(row.get("timeout_s", 10.0)),
        provenance={str(key): str(value) for key, value in _field(row, "provenance", dict).items()},
    )


def load_file(path: Path, repository: Repository, split: Split) -> tuple[RepairTask, ...]:
    """The tasks of one ``.jsonl`` file. Raises TaskError naming the file, the line and what is wrong with it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from error
    tests: list[str] | None = None
    tasks: list[RepairTask] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TaskError("not a JSON object")
            if tests is None:
                tests = _header(row, repository)
            else:
                tasks.append(_task(row, repository, tests, split))
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}:{number}: not JSON: {error.msg}") from error
        except TaskError as error:
            raise TaskError(f"{path}:{number}: {error}") from error
    if not tasks:
        raise TaskError(f"{path}: no task in it")
    return tuple(tasks)


def load_tasks(source: str | Path = "shipped", split: str = "train") -> tuple[RepairTask, ...]:
    """All tasks of one ``split`` of a data set: ``"shipped"`` or the folder of another one.

    Raises TaskError for an unknown split, a missing or an empty data set, a corrupt file or a task id met twice.
    """
    root = DATA if source == "shipped" else Path(source)
    for known in SPLITS:
        if known == split:
            files = sorted((root / "tasks" / known).glob("*.jsonl"))
            loaded = [
                task
                for file in files
                for task in load_file(file, read_repository(root / "repos" / file.stem), known)
            ]
            break
    else:
        raise TaskError(f"split {split!r} is none of {', '.join(SPLITS)}")
    if not loaded:
        raise TaskError(f"{root}: no {split} tasks (looked for tasks/{split}/*.jsonl)")
    seen: set[str] = set()
    for task in loaded:
        if task.task_id in seen:
            raise TaskError(f"{root}: two tasks are called {task.task_id}")
        seen.add(task.task_id)
    return tuple(loaded)


def dump_tasks(tasks: Iterable[RepairTask], repository: Repository, tests: list[str]) -> str:
    """The text of the ``.jsonl`` file that holds ``tasks``, all made from ``repository`` with the test ids ``tests``."""
    rows: list[dict[str, Any]] = [{"format": FORMAT, "digest": repository.digest, "tests": tests}]
    for task in tasks:
        (path,) = task.gold_patch
        row: dict[str, Any] = {
            "task_id": task.task_id,
            "problem_statement": task.problem_statement,
            "bug": make_diff(path, repository.files[path].decode(), task.base[path].decode()),
            "fail_to_pass": list(task.fail_to_pass),
            "provenance": dict(task.provenance),
        }
        if task.timeout_s != 10.0:
            row["timeout_s"] = task.timeout_s
        rows.append(row)
    return "".join(json.dumps(row) + "\n" for row in rows)

"""The repair task: a buggy tree, one line that says what goes wrong, and the hidden tests that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

from muonrl.errors import TaskError

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


def check_path(path: str) -> str:
    """Return ``path`` if it is a plain relative posix path inside the work directory; raise TaskError if not."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise TaskError(f"{path!r} is not a plain relative path")
    return path


@dataclass(frozen=True, eq=False)
class RepairTask:
    """One bug to repair.

    ``base`` is the buggy tree that the agent gets (relative posix path -> bytes, no tests in it); ``gold_patch`` maps
    the paths that the true repair changes to their repaired contents; ``test_files`` are injected at grading only.
    The test ids are pytest node ids such as ``tests/test_x.py::test_y[1-2]``. Raises TaskError when the parts do not
    fit together.
    """

    task_id: str
    repo: str
    base: Mapping[str, bytes]
    problem_statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_files: Mapping[str, bytes]
    gold_patch: Mapping[str, bytes]
    split: Split
    workdir: str = "/work"
    timeout_s: float = 10.0
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("base", "test_files", "gold_patch", "provenance"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for path in (*self.base, *self.test_files, *self.gold_patch):
            check_path(path)
        self._check()

    def _check(self) -> None:
        if self.split not in SPLITS:
            raise TaskError(f"{self.task_id}: split {self.split!r} is none of {', '.join(SPLITS)}")
        if not self.problem_statement.strip():
            raise TaskError(f"{self.task_id}: the problem statement is empty")
        if not self.fail_to_pass:
            raise TaskError(f"{self.task_id}: no fail-to-pass test")
        if both := set(self.fail_to_pass) & set(self.pass_to_pass):
            raise TaskError(f"{self.task_id}: {sorted(both)[0]} is both fail-to-pass and pass-to-pass")
        for test in (*self.fail_to_pass, *self.pass_to_pass):
            if test.split("::")[0] not in self.test_files:
                raise TaskError(f"{self.task_id}: no test file holds {test}")
        if visible := set(self.test_files) & set(self.base):
            raise TaskError(
                f"{self.task_id}: the hidden test file {sorted(visible)[0]} is in the agent's tree"
            )
        if not any(self.base.get(path) != text for path, text in self.gold_patch.items()):
            raise TaskError(f"{self.task_id}: the gold patch changes nothing")
        if self.timeout_s <= 0:
            raise TaskError(f"{self.task_id}: timeout_s is {self.timeout_s}, it must be positive")

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; the rollout process gets tasks built anew, and checked anew.
        values = (getattr(self, f.name) for f in fields(self))
        return RepairTask, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    @property
    def gold_tree(self) -> dict[str, bytes]:
        """The whole repaired tree: ``base`` with the gold patch applied."""
        return {**self.base, **self.gold_patch}

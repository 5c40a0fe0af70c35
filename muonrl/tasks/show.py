"""Finding one task by its id and showing it to people."""

from __future__ import annotations

from collections.abc import Iterable

from muonrl.errors import TaskError
from muonrl.tasks.diffs import make_diff
from muonrl.tasks.schema import RepairTask


def find_task(tasks: Iterable[RepairTask], task_id: str) -> RepairTask:
    """The task called ``task_id``. Raises TaskError, with the ids that begin alike, when there is none."""
    known = {task.task_id: task for task in tasks}
    if task_id not in known:
        start = task_id.split("-")[0]
        alike = [name for name in known if name.startswith(start)] or list(known)
        raise TaskError(f"no task {task_id!r}; there are {', '.join(alike[:5])}, ...")
    return known[task_id]


def show_task(task: RepairTask) -> str:
    """One task as text for people: what the agent is told, its tests, and the true repair as a diff."""
    lines = [
        f"{task.task_id} ({task.split}, {task.repo})",
        task.problem_statement,
        f"{len(task.base)} files for the agent: {', '.join(sorted(task.base))}",
        f"{len(task.pass_to_pass)} pass-to-pass tests; fail-to-pass:",
        *(f"  {test}" for test in task.fail_to_pass),
        "; ".join(f"{key} {value}" for key, value in task.provenance.items()),
    ]
    for path, text in task.gold_patch.items():
        lines += make_diff(path, task.base[path].decode(), text.decode(), context=3).splitlines()
    return "\n".join(lines)

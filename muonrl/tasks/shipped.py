"""The shipped data set: which repository belongs to which split, and its regeneration.

``python -m muonrl.tasks.shipped`` makes every task file anew, ``python -m muonrl.tasks.shipped REPO ...`` some.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from muonrl.errors import TaskError
from muonrl.tasks.load import DATA
from muonrl.tasks.make import MakeOptions, MakeReport, make_tasks, write_tasks


def shipped_options(repo: str, data: Path = DATA) -> MakeOptions:
    """The options that ``repo`` is made with, from ``data/splits.json``. Raises TaskError for an unknown one."""
    splits = json.loads((data / "splits.json").read_text(encoding="utf-8"))
    if repo not in splits:
        raise TaskError(f"{repo!r} is none of the shipped repositories: {', '.join(splits)}")
    return MakeOptions(split=splits[repo])


def shipped_repos(data: Path = DATA) -> tuple[str, ...]:
    """The names of the shipped repositories."""
    return tuple(json.loads((data / "splits.json").read_text(encoding="utf-8")))


def remake(repo: str, data: Path = DATA) -> MakeReport:
    """Make the tasks of one shipped repository anew, without writing them."""
    return make_tasks(data / "repos" / repo, shipped_options(repo, data))


def main(names: list[str]) -> None:
    """Regenerate the task files of ``names``, or of all repositories."""
    for repo in names or shipped_repos(DATA):
        report = remake(repo, DATA)
        path = write_tasks(report, DATA)
        operators = Counter(task.provenance["operator"] for task in report.tasks)
        counts = f"{len(report.tasks)} tasks {dict(operators)}, refused {dict(report.refused)}"
        sys.stdout.write(f"{path.relative_to(DATA)}: {counts}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Unified diffs between two versions of one text file: made, and applied strictly (no fuzz, no offsets)."""

from __future__ import annotations

import difflib
import re

from muonrl.errors import TaskError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def make_diff(path: str, before: str, after: str, context: int = 1) -> str:
    """The unified diff that turns ``before`` into ``after`` at ``path``; empty when they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=context
    )
    return "".join(lines)


def diff_path(diff: str) -> str:
    """The path that ``diff`` changes. Raises TaskError when the two header lines are not there."""
    head = diff.splitlines()[:2]
    if len(head) < 2 or not head[0].startswith("--- a/") or head[1] != "+++ b/" + head[0][6:]:
        raise TaskError("the diff does not start with `--- a/PATH` and `+++ b/PATH`")
    return head[0][6:]


def apply_diff(text: str, diff: str) -> str:
    """Apply a one-file unified ``diff`` to ``text``. Raises TaskError at the first line that does not fit."""
    path = diff_path(diff)
    source = text.splitlines(keepends=True)
    out: list[str] = []
    at = 0
    for line in diff.splitlines(keepends=True)[2:]:
        if hunk := _HUNK.match(line):
            start = int(hunk[1]) - 1
            if not at <= start <= len(source):
                raise TaskError(f"{path}: the hunk `{line.strip()}` lies outside the file")
            out += source[at:start]
            at = start
        elif line[0] == "+":
            out.append(line[1:])
        elif line[0] in " -":
            if at >= len(source) or source[at] != line[1:]:
                raise TaskError(
                    f"{path}: line {at + 1} is not the `{line[1:].strip()}` that the diff expects"
                )
            if line[0] == " ":
                out.append(line[1:])
            at += 1
        else:
            raise TaskError(f"{path}: `{line.strip()}` is not a line of a unified diff")
    return "".join(out + source[at:])

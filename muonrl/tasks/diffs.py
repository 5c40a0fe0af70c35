"""Unified diffs between two versions of one text file: made, and applied strictly (no fuzz, no offsets)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from muonrl.errors import TaskError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """Lines with their ends, split at newlines alone (str.splitlines also splits at form feeds and others)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def make_diff(path: str, before: str, after: str, context: int = 1) -> str:
    """The unified diff that turns ``before`` into ``after`` at ``path``; empty when they are equal."""
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}", n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)


def diff_path(diff: str) -> str:
    """The path that ``diff`` changes. Raises TaskError when the two header lines are not there."""
    head = _lines(diff)[:2]
    if len(head) < 2 or not head[0].startswith("--- a/") or head[1] != "+++ b/" + head[0][6:]:
        raise TaskError("the diff does not start with `--- a/PATH` and `+++ b/PATH`")
    return head[0][6:].rstrip("\n")


def _body(diff: str) -> Iterator[str]:
    """The lines below the header, without a newline where the diff says that the file has none."""
    lines = _lines(diff)[2:]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line != _NO_NEWLINE:
            yield line.rstrip("\n") if following == _NO_NEWLINE else line


def apply_diff(text: str, diff: str) -> str:
    """Apply a one-file unified ``diff`` to ``text``. Raises TaskError at the first line that does not fit."""
    path = diff_path(diff)
    source = _lines(text)
    out: list[str] = []
    at = 0
    for line in _body(diff):
        if hunk := _HUNK.match(line):
            # A hunk that removes and keeps nothing is placed after its line, any other at it.
            start = int(hunk[1]) - (hunk[2] != "0")
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

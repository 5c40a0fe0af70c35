"""The agent's four tools on a working tree. Runs inside the sandbox, and on a plain folder; standard library only.

As a program: a JSON request {"name", "parameters", "options"} on stdin, a JSON answer {"text", "error", "done"} on
stdout. ``error`` is null or {"kind", "detail"} with a kind of :data:`ERROR_KINDS`; a failed call is a value, never an
exception. Each call is a new process: what ``undo_edit`` needs is kept on disk beside the working tree.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ERROR_KINDS = ("invalid_action", "not_found", "ambiguous", "exit_code", "timeout")
DEFAULTS: dict[str, Any] = {"view_lines": 10, "max_chars": 2000, "timeout": 20.0}
_MAX_HITS = 8
_MAX_FILE = 1 << 20
_MAX_LINE = 200


class ToolFailure(Exception):
    """A tool call that failed: its ``kind``, a one-line ``detail``, and the text that the agent reads."""

    def __init__(self, kind: str, detail: str, text: str | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail
        self.text = f"error: {detail}" if text is None else text


def run(
    name: str, parameters: Mapping[str, str], options: Mapping[str, Any] | None, root: Path
) -> dict[str, Any]:
    """Run one tool on the tree ``root`` and return the answer {"text", "error", "done"}."""
    opts = DEFAULTS | dict(options or {})
    try:
        tool = _TOOLS.get(name)
        if tool is None:
            raise ToolFailure("invalid_action", f"unknown tool {name}")
        text = tool(root, parameters, opts)
        error = None
    except ToolFailure as failure:
        text = failure.text
        error = {"kind": failure.kind, "detail": failure.detail}
    except (OSError, UnicodeError, RecursionError) as failure:
        # A full disk, a directory in the place of a file, text that is no UTF-8, folders without end.
        detail = getattr(failure, "strerror", None) or type(failure).__name__
        text, error = f"error: {detail}", {"kind": "invalid_action", "detail": detail}
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return {
        "text": _shorten(readable, int(opts["max_chars"])),
        "error": error,
        "done": name == "finish" and error is None,
    }


def _shorten(text: str, limit: int) -> str:
    """``text`` in at most about ``limit`` characters: the middle is cut out, which says how much it was."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[len(text) - half :]}"


def _need(parameters: Mapping[str, str], key: str, tool: str) -> str:
    value = parameters.get(key)
    if value is None:
        raise ToolFailure("invalid_action", f"{tool} needs the parameter {key}")
    return str(value)


def _resolve(root: Path, path: str) -> tuple[Path, str]:
    """(real path, its name relative to the tree); not_found for anything outside of the tree."""
    top = root.resolve()
    text = path.strip()
    if text == "/work" or text.startswith("/work/"):
        text = text[len("/work") :].lstrip("/")
    if "\0" not in text and not text.startswith("/"):
        try:
            real = (top / text).resolve()
        except (OSError, RuntimeError):
            real = top.parent  # a loop of symlinks leads nowhere
        if real == top or real.is_relative_to(top):
            return real, real.relative_to(top).as_posix()
    raise ToolFailure("not_found", f"no such file {path.strip()}")


def _read(real: Path, name: str) -> str:
    if not real.is_file():
        raise ToolFailure("not_found", f"no such file {name}")
    if real.stat().st_size > _MAX_FILE:
        raise ToolFailure("invalid_action", f"{name} is too large")
    # surrogateescape: bytes that are no UTF-8 survive an edit unchanged; newline="": so do line ends.
    with real.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def _write(real: Path, text: str) -> None:
    real.write_bytes(text.encode("utf-8", "surrogateescape"))


# --- file_editor ----------------------------------------------------------------------------------------------------


def file_editor(root: Path, parameters: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """view | create | str_replace | insert | undo_edit."""
    command = _need(parameters, "command", "file_editor").strip()
    action = _EDITOR.get(command)
    if action is None:
        raise ToolFailure("invalid_action", f"unknown command {command}, use one of {', '.join(_EDITOR)}")
    real, name = _resolve(root, _need(parameters, "path", f"file_editor {command}"))
    return action(root, real, name, parameters, options)


def _view(
    root: Path, real: Path, name: str, parameters: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    limit = int(options["view_lines"])
    if real.is_dir():
        entries = sorted(e.name + ("/" if e.is_dir() else "") for e in real.iterdir() if not _hidden(e.name))
        return _limited(entries, limit, "")
    lines = _read(real, name).splitlines()
    first, last = _view_range(parameters.get("view_range"), len(lines))
    return _limited([f"{n} {lines[n - 1]}" for n in range(first, last + 1)], limit, " lines")


def _limited(lines: list[str], limit: int, unit: str) -> str:
    more = [f"... {len(lines) - limit} more{unit}"] if len(lines) > limit else []
    return "\n".join([*lines[:limit], *more])


def _view_range(text: str | None, count: int) -> tuple[int, int]:
    """First and last line, 1-based and inclusive, of ``A B`` or ``[A, B]``; B = -1 is the last line of the file."""
    if text is None:
        return 1, count
    match = re.fullmatch(r"\s*\[?\s*(\d{1,9})(?:\s*,\s*|\s+)(-1|\d{1,9})\s*\]?\s*", text)
    if match is None:
        raise ToolFailure("invalid_action", f"view_range must be two line numbers, not {text.strip()[:40]}")
    first, last = int(match[1]), int(match[2])
    last = count if last == -1 else min(last, count)
    if not 1 <= first <= max(last, 1):
        raise ToolFailure("invalid_action", f"view_range {text.strip()} does not fit a file of {count} lines")
    return first, last


def _create(
    root: Path, real: Path, name: str, parameters: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    text = _need(parameters, "file_text", "file_editor create")
    if real.exists():
        raise ToolFailure("invalid_action", f"{name} exists already")
    real.parent.mkdir(parents=True, exist_ok=True)
    _remember(root, name, None)
    _write(real, text)
    return f"created {name}"


def _str_replace(
    root: Path, real: Path, name: str, parameters: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    old = _need(parameters, "old_str", "file_editor str_replace")
    new = parameters.get("new_str", "")
    text = _read(real, name)
    if not old:
        raise ToolFailure("invalid_action", "old_str is empty")
    count = text.count(old)
    if count == 0:
        raise ToolFailure("not_found", f"old_str is not in {name}")
    if count > 1:
        raise ToolFailure("ambiguous", f"old_str is {count} times in {name}")
    _remember(root, name, text)
    _write(real, text.replace(old, new))
    return f"edited {name}"


def _insert(
    root: Path, real: Path, name: str, parameters: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    where = _need(parameters, "insert_line", "file_editor insert").strip()
    new = _need(parameters, "new_str", "file_editor insert")
    text = _read(real, name)
    lines = text.splitlines(keepends=True)
    if not re.fullmatch(r"\d{1,9}", where) or int(where) > len(lines):
        raise ToolFailure("invalid_action", f"insert_line must be 0 to {len(lines)}, not {where[:40]}")
    at = int(where)
    if at and not lines[at - 1].endswith(("\n", "\r")):
        lines[at - 1] += "\n"
    lines.insert(at, new if new.endswith("\n") else new + "\n")
    _remember(root, name, text)
    _write(real, "".join(lines))
    return f"edited {name}"


def _undo(
    root: Path, real: Path, name: str, parameters: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    versions = _history(root, name)
    if not versions:
        raise ToolFailure("not_found", f"no edit of {name} to undo")
    with versions[-1].open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        mark, text = file.read(1), file.read()
    if mark == "-":
        real.unlink(missing_ok=True)
    else:
        _write(real, text)
    versions[-1].unlink()
    return f"reverted {name}"


def _history(root: Path, name: str) -> list[Path]:
    folder = _history_folder(root, name)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _history_folder(root: Path, name: str) -> Path:
    top = root.resolve()
    base = Path("/tmp/.undo") if top == Path("/work") else top.parent / f".{top.name}-undo"
    return base / hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _remember(root: Path, name: str, text: str | None) -> None:
    """Keep the version before an edit; its first character says whether the file was there."""
    folder = _history_folder(root, name)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{len(_history(root, name)):06d}", "-" if text is None else "+" + text)


_EDITOR: dict[str, Callable[[Path, Path, str, Mapping[str, str], Mapping[str, Any]], str]] = {
    "view": _view,
    "create": _create,
    "str_replace": _str_replace,
    "insert": _insert,
    "undo_edit": _undo,
}


# --- search, execute_bash, finish -----------------------------------------------------------------------------------


def search(root: Path, parameters: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """Lines that hold ``search_term`` as ``path:line: text``, sorted by path."""
    term = _need(parameters, "search_term", "search")
    if not term.strip():
        raise ToolFailure("invalid_action", "search_term is empty")
    where = parameters.get("path", ".")
    real, _ = _resolve(root, where)
    if not real.exists():
        raise ToolFailure("not_found", f"no such file {where.strip()}")
    hits = []
    top, wanted = str(root.resolve()), term.encode("utf-8", "surrogateescape")
    for path in _files(str(real)):
        data = _text_bytes(path)
        if data is None or wanted not in data:
            continue
        label = os.path.relpath(path, top)
        for number, line in enumerate(data.decode("utf-8", "surrogateescape").splitlines(), 1):
            if term in line:
                hits.append(f"{label}:{number}: {line.strip()[:_MAX_LINE]}")
    if not hits:
        raise ToolFailure("not_found", f"no hit for {term.strip()[:80]}")
    return _limited(hits, _MAX_HITS, "")


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _files(real: str) -> list[str]:
    """Files at or below ``real`` sorted by path; nothing hidden, no directory behind a symlink."""
    found = [] if Path(real).is_dir() else [real]
    for base, dirs, names in os.walk(real, followlinks=False):
        dirs[:] = [d for d in dirs if not _hidden(d)]
        found += [f"{base}/{n}" for n in names if not _hidden(n)]
    return sorted(found)


def _text_bytes(path: str) -> bytes | None:
    """The content of a regular text file of at most 1 MiB; None for anything else. Symlinks are not followed."""
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_FILE:
        return None
    fd = os.open(path, os.O_RDONLY)
    try:
        data = os.read(fd, _MAX_FILE)
    finally:
        os.close(fd)
    return None if b"\0" in data[:1024] else data


def execute_bash(root: Path, parameters: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """Run ``cmd`` in the tree: stdout and stderr together, then the exit code unless it is 0."""
    command = _need(parameters, "cmd", "execute_bash")
    if not command.strip() or "\0" in command:
        raise ToolFailure("invalid_action", "cmd is empty")
    timeout = float(options["timeout"])
    output, code = _shell(command, root, timeout, int(options["max_chars"]))
    text = output.rstrip("\n")
    if code is None:
        note = f"[timed out after {timeout:g} s]"
        raise ToolFailure("timeout", f"no end after {timeout:g} s", f"{text}\n{note}" if text else note)
    if code != 0:
        note = f"[exit code {code}]"
        raise ToolFailure("exit_code", f"exit code {code}", f"{text}\n{note}" if text else note)
    return text


def _shell(command: str, root: Path, timeout: float, keep: int) -> tuple[str, int | None]:
    """(output, exit code or None for a time-out); keeps the first and last ``keep`` bytes, whatever comes between."""
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    process = subprocess.Popen(
        [shell, "-c", command],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    watch = os.pidfd_open(process.pid)
    deadline = time.monotonic() + timeout
    head, tail, code = b"", b"", None
    waiting = [pipe, watch]
    try:
        while (left := deadline - time.monotonic()) > 0:
            ready = select.select(waiting, [], [], left)[0]
            data = _drain(pipe) if pipe in ready else b""
            if pipe in ready and not data:
                waiting = [watch]
            head, tail = _keep(head, tail, data, keep)
            if watch in ready:
                # A child left behind may hold the pipe: what is there now is the output.
                head, tail = _keep(head, tail, _drain(pipe), keep)
                code = process.wait()
                break
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # the whole group has ended
        process.wait()
        process.stdout.close()
        os.close(watch)
    return (head + tail).decode("utf-8", "replace"), code


def _drain(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def _keep(head: bytes, tail: bytes, data: bytes, keep: int) -> tuple[bytes, bytes]:
    room = max(0, 4 * keep - len(head))
    return head + data[:room], (tail + data[room:])[-4 * keep :]


def finish(root: Path, parameters: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """Hand in the tree as it is."""
    command = parameters.get("command", "submit").strip()
    if command != "submit":
        raise ToolFailure("invalid_action", f"finish takes the command submit, not {command[:40]}")
    return ""


_TOOLS: dict[str, Callable[[Path, Mapping[str, str], Mapping[str, Any]], str]] = {
    "file_editor": file_editor,
    "execute_bash": execute_bash,
    "search": search,
    "finish": finish,
}


def main() -> int:
    """Answer one request from stdin."""
    request = json.loads(sys.stdin.buffer.read())
    root = Path(os.environ.get("MUONRL_ROOT", "/work"))
    answer = run(str(request["name"]), request["parameters"], request.get("options"), root)
    sys.stdout.buffer.write(json.dumps(answer).encode())
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Durable writing of small files, where every way in which a disk can refuse is one clear line."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from muonrl.errors import MuonrlError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
}


@contextlib.contextmanager
def clear_faults(path: Path, action: str = "written") -> Iterator[None]:
    """Turn an OSError of the block into a MuonrlError that names ``path`` and the reason, in one line."""
    try:
        yield
    except OSError as fault:
        reason = _REASONS.get(fault.errno or 0, fault.strerror or type(fault).__name__)
        raise MuonrlError(f"{path} cannot be {action}: {reason}") from fault


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) so that ``path`` is, after a crash too, the old file or the whole new one.

    The folder is made where it is missing. Raises MuonrlError where it cannot be written; then ``path`` is as before.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with clear_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: Path) -> str:
    """The text of a file. Raises MuonrlError, one line, where it is missing, unreadable or not UTF-8."""
    with clear_faults(path, "read"):
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as fault:
            raise MuonrlError(f"{path} cannot be read: it is not UTF-8 text") from fault

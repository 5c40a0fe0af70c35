"""Writing and reading a tree without ever following a symlink. Runs inside the sandbox; standard library only."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

_MAX_DEPTH = 32
_MAX_PATH = 512
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split_path(path: str) -> list[str]:
    """The parts of a relative posix path; ValueError for an absolute path, ``..``, NUL or nothing at all."""
    parts = [p for p in path.split("/") if p not in ("", ".")]
    if path.startswith("/") or not parts or ".." in parts or "\0" in path:
        raise ValueError(f"not a relative path inside the sandbox: {path!r}")
    return parts


def _enter(parent: int, name: str) -> int:
    """Open the directory ``name`` below ``parent``, making it; whatever else bears the name is replaced."""
    try:
        return os.open(name, _DIR, dir_fd=parent)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=parent)
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, _DIR, dir_fd=parent)


def write_files(root: str, files: Iterable[tuple[str, bytes]]) -> int:
    """Write ``(relative path, content)`` pairs below ``root``; returns how many. OSError as the kernel gives it."""
    count = 0
    top = os.open(root, _DIR)
    try:
        for path, data in files:
            parts = split_path(path)
            here = os.dup(top)
            try:
                for name in parts[:-1]:
                    below = _enter(here, name)
                    os.close(here)
                    here = below
                _write_new(here, parts[-1], data)
            finally:
                os.close(here)
            count += 1
    finally:
        os.close(top)
    return count


def _write_new(parent: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o644, dir_fd=parent)
    except FileExistsError:
        # Unlinking first breaks symlinks and hard links alike: the content never lands in another file.
        os.unlink(name, dir_fd=parent)
        fd = os.open(name, flags, 0o644, dir_fd=parent)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read_tree(root: str, max_bytes: int, max_file: int, max_files: int) -> Iterator[tuple[str, bytes]]:
    """Regular files below ``root`` in sorted order as ``(relative path, content)``.

    Files over ``max_file`` bytes and paths that are absurdly deep or long are skipped; reading stops at
    ``max_files`` files or ``max_bytes`` in total, so a tree that was blown up reads as one with files missing.
    """
    total = count = 0
    for base, dirs, names, dir_fd in os.fwalk(root, follow_symlinks=False):
        prefix = os.path.relpath(base, root)
        dirs[:] = sorted(dirs) if prefix.count("/") < _MAX_DEPTH and len(prefix) < _MAX_PATH else []
        for name in sorted(names):
            data = _read_regular(dir_fd, name, max_file)
            if data is None:
                continue
            total += len(data)
            count += 1
            if total > max_bytes or count > max_files:
                return
            yield (name if prefix == "." else f"{prefix}/{name}"), data


def _read_regular(dir_fd: int, name: str, max_file: int) -> bytes | None:
    try:
        # O_NONBLOCK: a FIFO must not block the reader.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return None  # a symlink, a socket, an unreadable or a vanished file: not part of the snapshot
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > max_file:
            return None
        chunks = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)

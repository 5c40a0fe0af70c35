"""Providers to test: each test runs in its own event loop and must leave no process and no descriptor behind."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from muonrl.sandbox import BubblewrapProvider, Limits, ProcessProvider, SandboxProvider

ECHO = """
import os, sys
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
def main():
    data = sys.stdin.buffer.read()
    if data == b"die":
        os._exit(9)
    if data == b"raise":
        raise RuntimeError("guest script failed")
    if data == b"descriptors":
        data = str([fd for fd in range(1000) if is_open(fd)]).encode()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return 3
if __name__ == "__main__":
    sys.exit(main())
"""

Body = Callable[[Any], Awaitable[None]]


def children() -> set[int]:
    """Processes whose parent is this one."""
    own = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                own.add(int(entry.name))
    return own


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("guest") / "echo.py"
    path.write_text(ECHO)
    return {"echo": path}


@pytest.fixture
def make(scripts: dict[str, Path]) -> Callable[..., SandboxProvider]:
    """Builds a provider by the name of its backend."""

    def build(backend: str, limits: Limits | None = None, **extra: Any) -> SandboxProvider:
        if backend == "process":
            return ProcessProvider(scripts, allow_unsandboxed=True, limits=limits)
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        return BubblewrapProvider(scripts, mode=backend, limits=limits, **extra)  # type: ignore[arg-type]

    return build


@pytest.fixture
def play(make: Callable[..., SandboxProvider]) -> Callable[..., None]:
    """``play(backend, body)`` runs ``await body(provider)`` with a started provider and looks for leaks afterwards."""

    def run(backend: str, body: Body, limits: Limits | None = None, **extra: Any) -> None:
        provider = make(backend, limits, **extra)

        async def session() -> None:
            await provider.start()
            try:
                await body(provider)
            finally:
                await provider.close()

        before = children(), descriptors()
        asyncio.run(session())
        assert children() == before[0], "a process outlived its provider"
        assert descriptors() == before[1], "a descriptor outlived its provider"
        assert provider.stats.active == 0

    return run

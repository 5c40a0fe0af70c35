"""A plain process in a temporary folder: no isolation at all, for trusted code such as this project's own tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from muonrl.errors import InfrastructureError, SandboxUnavailable
from muonrl.sandbox.guest_files import read_tree, split_path, write_files
from muonrl.sandbox.protocol import WORKDIR, ExecResult, Limits, ProviderStats


class ProcessSandbox:
    """A temporary folder that stands for the working directory; commands run in it as the calling user."""

    def __init__(self, root: Path, scripts: Mapping[str, Path], limits: Limits, stats: ProviderStats) -> None:
        self.root = root
        self._scripts, self._limits, self._stats = scripts, limits, stats
        self._begin = time.monotonic()
        self._lock = asyncio.Lock()
        self._closed = False
        self._group: int | None = None  # of the command that runs now

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 30.0,
        max_bytes: int = 1_000_000,
    ) -> ExecResult:
        """Run ``argv`` in an own process group, which is killed at the end."""
        if not argv:
            raise ValueError("argv must not be empty")
        async with self._lock:
            self._check_open()
            full_env = {
                "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(self.root),
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "MUONRL_ROOT": str(self.root),
            } | dict(env or {})
            with (
                tempfile.TemporaryFile() as feed,
                tempfile.TemporaryFile() as out,
                tempfile.TemporaryFile() as err,
            ):
                feed.write(stdin)
                feed.seek(0)
                try:
                    process = subprocess.Popen(
                        list(argv),
                        cwd=self._inside(cwd),
                        env=full_env,
                        stdin=feed,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                except (OSError, ValueError) as error:
                    return ExecResult(b"", f"cannot start {argv[0]}: {error}\n".encode(), 127, False, False)
                timed_out = await self._end(process, timeout)
                self._check_open()
                streams = [_first(file, max_bytes) for file in (out, err)]
        code = process.returncode
        (stdout, cut_out), (stderr, cut_err) = streams
        return ExecResult(stdout, stderr, code if code >= 0 else 128 - code, timed_out, cut_out or cut_err)

    async def call(
        self, script: str, payload: bytes, *, timeout: float = 30.0, max_bytes: int = 1_000_000
    ) -> ExecResult:
        """Run the guest script in a new interpreter; KeyError if there is none of that name."""
        argv = [sys.executable, str(self._scripts[script])]
        return await self.exec(argv, stdin=payload, timeout=timeout, max_bytes=max_bytes)

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files below the folder; ValueError for a path that leaves it."""
        self._check_open()
        for path in files:
            split_path(path)
        try:
            write_files(str(self.root), files.items())
        except OSError as error:
            raise InfrastructureError("sandbox_put", str(error)) from error

    async def snapshot(self, root: str = WORKDIR) -> dict[str, bytes]:
        """Regular files below ``root``."""
        self._check_open()
        limits, mib = self._limits, 1 << 20
        caps = (limits.snapshot_mb * mib, limits.snapshot_file_mb * mib, limits.snapshot_files)
        return dict(read_tree(str(self._inside(root)), *caps))

    async def close(self) -> None:
        """Remove the folder."""
        if not self._closed:
            self._closed = True
            self._kill_group()
            self._stats.active -= 1
            self._stats.seconds += time.monotonic() - self._begin
            shutil.rmtree(self.root.parent, ignore_errors=True)

    def _kill_group(self) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)

    def _check_open(self) -> None:
        if self._closed:
            raise InfrastructureError("sandbox_closed", "the sandbox is closed")

    def _inside(self, path: str) -> Path:
        pure = PurePosixPath(path)
        return self.root / pure.relative_to(WORKDIR) if pure.is_relative_to(WORKDIR) else Path(path)

    async def _end(self, process: subprocess.Popen[bytes], timeout: float) -> bool:
        """Wait for the end, then kill what is left of the group; True if time ran out. Cancelled: kill and close."""
        self._group = process.pid
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        watch = os.pidfd_open(process.pid)
        loop.add_reader(watch, ended.set)
        try:
            async with asyncio.timeout(timeout):
                await ended.wait()
        except TimeoutError:
            return True
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            loop.remove_reader(watch)
            os.close(watch)
            self._kill_group()
            self._group = None
            process.wait()
        return False


def _first(file: IO[bytes], limit: int) -> tuple[bytes, bool]:
    """The first ``limit`` bytes of a file, and whether there are more."""
    file.seek(0)
    data = file.read(limit + 1)
    return data[:limit], len(data) > limit


class ProcessProvider:
    """Provider of :class:`ProcessSandbox`; SandboxUnavailable unless ``allow_unsandboxed``."""

    def __init__(
        self, scripts: Mapping[str, Path], *, allow_unsandboxed: bool = False, limits: Limits | None = None
    ) -> None:
        if not allow_unsandboxed:
            raise SandboxUnavailable(
                "the process backend isolates nothing: set sandbox.allow_unsandboxed to run trusted code with it"
            )
        self.stats = ProviderStats()
        self._scripts = dict(scripts)
        self._limits = limits or Limits()
        self._sandboxes: list[ProcessSandbox] = []

    async def start(self) -> None:
        """Nothing to prepare."""

    async def acquire(self) -> ProcessSandbox:
        """A new, empty folder."""
        root = Path(tempfile.mkdtemp(prefix="muonrl-process-")) / "work"
        root.mkdir()
        sandbox = ProcessSandbox(root, self._scripts, self._limits, self.stats)
        self.stats.started += 1
        self.stats.active += 1
        self.stats.peak = max(self.stats.peak, self.stats.active)
        self._sandboxes.append(sandbox)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox."""
        for sandbox in self._sandboxes:
            await sandbox.close()
        self._sandboxes.clear()

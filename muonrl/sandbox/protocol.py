"""What a sandbox is to the rest of the trainer: two short asynchronous protocols, bytes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

WORKDIR = "/work"


@dataclass(frozen=True)
class ExecResult:
    """How a command ended.

    ``rc`` is the exit status, ``128 + n`` if signal n killed it, 127 if it could not be started. ``truncated`` says
    that a stream went beyond ``max_bytes`` and its tail was thrown away. ``cpu_s`` is the CPU time in seconds of
    the command, of the children it waited for, and of the sandbox's own work since the command before.
    """

    stdout: bytes
    stderr: bytes
    rc: int
    timed_out: bool
    truncated: bool
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Resource limits of one sandbox; sizes in MiB. ``processes`` counts every process and thread of the sandbox."""

    memory_mb: int = 512
    processes: int = 64
    file_mb: int = 32
    work_mb: int = 32
    tmp_mb: int = 32
    open_files: int = 256
    snapshot_mb: int = 16
    snapshot_file_mb: int = 2
    snapshot_files: int = 4000


@dataclass
class ProviderStats:
    """Running totals: sandboxes started, alive now, most alive at once, failed starts, wall seconds of life, seconds
    spent starting."""

    started: int = 0
    active: int = 0
    peak: int = 0
    failed: int = 0
    seconds: float = 0.0
    start_seconds: float = 0.0


class Sandbox(Protocol):
    """One isolated working copy. Calls on one sandbox run one after the other.

    A fault of the sandbox itself raises :class:`muonrl.errors.InfrastructureError`; a failing command is a result.
    A call that is cancelled takes the sandbox with it. No process outlives the call that started it.
    """

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
        """Run ``argv``; ``env`` is added to the sandbox's own small environment."""
        ...

    async def call(
        self, script: str, payload: bytes, *, timeout: float = 30.0, max_bytes: int = 1_000_000
    ) -> ExecResult:
        """Run a guest script by name, ``payload`` on its stdin; its answer is ``stdout``."""
        ...

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files (paths relative to the working directory), replacing symlinks on the way, never following."""
        ...

    async def snapshot(self, root: str = WORKDIR) -> dict[str, bytes]:
        """Regular files under ``root`` by relative posix path; symlinks are skipped, over-large files too."""
        ...

    async def close(self) -> None:
        """End every process and drop every file of the sandbox. Closing twice is allowed."""
        ...


class SandboxProvider(Protocol):
    """Where sandboxes come from."""

    stats: ProviderStats

    async def start(self) -> None:
        """Prepare; raises :class:`muonrl.errors.SandboxUnavailable` with one line if this machine cannot."""
        ...

    async def acquire(self) -> Sandbox:
        """A new, empty sandbox."""
        ...

    async def close(self) -> None:
        """End every sandbox and the provider."""
        ...

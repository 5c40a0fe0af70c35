"""Sandboxes by bubblewrap: warm (nested namespaces, forked from one interpreter) or cold (one bubblewrap each)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from muonrl.errors import InfrastructureError, SandboxUnavailable
from muonrl.sandbox import bwrap_command
from muonrl.sandbox.guest_files import split_path
from muonrl.sandbox.protocol import WORKDIR, ExecResult, Limits, ProviderStats
from muonrl.sandbox.wire import receive_frame, send_frame, wait_end

Mode = Literal["auto", "nested", "cold"]
_GRACE = 15.0  # seconds that the guest may take beyond a command's own time-out before it counts as dead


class BubblewrapSandbox:
    """One sandbox; see :class:`muonrl.sandbox.protocol.Sandbox`. Made by :meth:`BubblewrapProvider.acquire`."""

    def __init__(
        self, sock: socket.socket, scripts: frozenset[str], limits: Limits, on_end: Callable[[], None]
    ) -> None:
        self._sock: socket.socket | None = sock
        self._scripts = scripts
        self._limits = limits
        self._on_end = on_end
        self._lock = asyncio.Lock()

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
        """Run ``argv``; raises ValueError for an empty ``argv`` and InfrastructureError if the sandbox died."""
        if not argv:
            raise ValueError("argv must not be empty")
        head = {"op": "exec", "argv": list(argv), "cwd": cwd, "env": dict(env or {})}
        return await self._run(head, stdin, timeout, max_bytes)

    async def call(
        self, script: str, payload: bytes, *, timeout: float = 30.0, max_bytes: int = 1_000_000
    ) -> ExecResult:
        """Run the guest script ``script`` in a fork of the warm interpreter; KeyError if there is none of that name."""
        if script not in self._scripts:
            raise KeyError(script)
        return await self._run({"op": "call", "script": script}, payload, timeout, max_bytes)

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files below the working directory; ValueError for a path that leaves it."""
        for path in files:
            split_path(path)
        head = {"op": "put", "files": [[path, len(data)] for path, data in files.items()]}
        await self._request(head, b"".join(files.values()), 30.0, 0)

    async def snapshot(self, root: str = WORKDIR) -> dict[str, bytes]:
        """Regular files under ``root``, at most ``limits.snapshot_mb`` in all; over-large ones are left out."""
        cap = self._limits.snapshot_mb << 20
        head, blob = await self._request({"op": "snapshot", "root": root}, b"", 60.0, cap)
        files: dict[str, bytes] = {}
        start = 0
        for path, size in head["files"]:
            files[str(path)] = blob[start : start + int(size)]
            start += int(size)
        return files

    async def close(self) -> None:
        """End the sandbox and wait until it is gone (5 s at most; its provider's end ends it in any case)."""
        if self._lock.locked():
            self._kill()
            async with self._lock:  # the request that was running has failed by now
                return
        sock, self._sock = self._sock, None
        if sock is not None:
            self._on_end()
            with sock:
                await wait_end(sock, 5.0)

    async def _run(self, head: dict[str, Any], blob: bytes, timeout: float, max_bytes: int) -> ExecResult:
        head = head | {"timeout": timeout, "max_bytes": max_bytes}
        reply, data = await self._request(head, blob, timeout + _GRACE, 2 * max_bytes)
        out = int(reply["out"])
        return ExecResult(
            stdout=data[:out],
            stderr=data[out:],
            rc=int(reply["rc"]),
            timed_out=bool(reply["timed_out"]),
            truncated=bool(reply["truncated"]),
            cpu_s=float(reply["cpu"]),
        )

    async def _request(
        self, head: dict[str, Any], blob: bytes, timeout: float, max_blob: int
    ) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            sock = self._sock
            if sock is None:
                raise InfrastructureError("sandbox_closed", f"{head['op']} on a closed sandbox")
            try:
                async with asyncio.timeout(timeout):
                    await send_frame(sock, head, blob)
                    reply, data = await receive_frame(sock, max_blob)
            except BaseException as error:
                # Cancelled or broken in the middle of a frame: the connection is of no more use.
                self._kill()
                sock.close()
                if isinstance(error, TimeoutError):
                    detail = f"no answer to {head['op']} in {timeout:.0f} s"
                    raise InfrastructureError("sandbox_silent", detail) from error
                raise
        if not reply.get("ok"):
            reason = str(reply.get("reason", "sandbox_protocol"))
            raise InfrastructureError(reason, str(reply.get("detail", "")))
        return reply, data

    def _kill(self) -> None:
        """Hang up: the sandbox's first process ends at once, and with it all the others.

        A request that is running sees the end of the stream and closes the socket itself.
        """
        sock, self._sock = self._sock, None
        if sock is not None:
            self._on_end()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if not self._lock.locked():
                sock.close()


class _Guest:
    """A running bubblewrap with the host's end of the socket that is its descriptor 0."""

    def __init__(self, argv: list[str], kind: socket.SocketKind) -> None:
        self.proven = False  # whether a sandbox has come of it
        self.sock, inner = socket.socketpair(socket.AF_UNIX, kind)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        with inner:
            # An own session: Ctrl-C on the terminal is for the trainer, which then ends its sandboxes in order.
            self.process = subprocess.Popen(
                argv,
                stdin=inner.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={},
                start_new_session=True,
            )
        self.sock.setblocking(False)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def last_words(self) -> str:
        """If it has ended or does so within half a second: the last line on its stderr; else nothing."""
        deadline = time.monotonic() + 0.5
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if self.alive or self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    async def end(self) -> None:
        """Hang up, wait, kill if need be, reap. The socket stays open for whoever is reading from it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 2.0
        try:
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        finally:
            if self.alive:
                self.process.kill()
            self.process.wait()
            self._errors.close()


class BubblewrapProvider:
    """Provider of bubblewrap sandboxes.

    ``scripts`` maps names to guest scripts (files with a ``main() -> int``). ``mode`` "auto" takes nested where the
    kernel allows it. At most ``max_active`` sandboxes live at once; :meth:`acquire` waits for room.
    """

    def __init__(
        self,
        scripts: Mapping[str, Path],
        *,
        mode: Mode = "auto",
        limits: Limits | None = None,
        max_active: int = 64,
        start_timeout: float = 30.0,
    ) -> None:
        self.stats = ProviderStats()
        self.mode: Mode = mode
        self._scripts = dict(scripts)
        self._limits = limits or Limits()
        self._start_timeout = start_timeout
        self._room = asyncio.Semaphore(max_active)
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._server: _Guest | None = None
        self._guests: set[_Guest] = set()
        self._sandboxes: set[BubblewrapSandbox] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start and try one sandbox; SandboxUnavailable with one line if none can be had."""
        bwrap_command.find_bwrap()
        modes: tuple[Mode, ...] = ("nested", "cold") if self.mode == "auto" else (self.mode,)
        reasons = []
        for mode in modes:
            self.mode = mode
            try:
                sandbox = await self.acquire()
            except InfrastructureError as error:
                reasons.append(f"{mode}: {error.detail or error.reason}")
                await self._end_server()
                continue
            await sandbox.close()
            self.stats = ProviderStats()
            return
        await self.close()
        raise SandboxUnavailable("bubblewrap cannot start a sandbox here (" + "; ".join(reasons) + ")")

    async def acquire(self) -> BubblewrapSandbox:
        """A new, empty sandbox; InfrastructureError if it could not be started."""
        await self._room.acquire()
        begin = time.monotonic()
        try:
            sock, guest = await self._open()
        except BaseException:
            self._room.release()
            self.stats.failed += 1
            raise
        return self._register(sock, guest, begin)

    async def _open(self) -> tuple[socket.socket, _Guest | None]:
        """The socket of a sandbox that has said that it is ready, and its own bubblewrap if it has one."""
        if self._closed:
            raise InfrastructureError("sandbox_closed", "the provider is closed")
        own = self._start_guest(single=True) if self.mode == "cold" else None
        parent = own or await self._running_server()
        sock = own.sock if own is not None else None
        try:
            if sock is None:
                sock = await self._fork(parent)
            async with asyncio.timeout(self._start_timeout):
                reply, _ = await receive_frame(sock, 0)
            if not reply.get("ok"):
                raise InfrastructureError(str(reply.get("reason")), str(reply.get("detail")))
        except InfrastructureError as error:
            words = await parent.last_words()
            self._abandon(sock, own)
            if words and parent.proven:
                return await self._open()  # a server that used to work has died: another one, once
            if words:
                raise InfrastructureError("sandbox_start", words) from error
            raise
        except BaseException as error:
            self._abandon(sock, own)
            if isinstance(error, TimeoutError):
                raise InfrastructureError(
                    "sandbox_start", f"not ready in {self._start_timeout:.0f} s"
                ) from error
            raise
        parent.proven = True
        return sock, own

    def _abandon(self, sock: socket.socket | None, guest: _Guest | None) -> None:
        if sock is not None:
            sock.close()
        if guest is not None:
            self._dispose(guest)

    async def close(self) -> None:
        """End all sandboxes and wait until no process of this provider is left."""
        self._closed = True
        for sandbox in list(self._sandboxes):
            sandbox._kill()
        await self._end_server()
        for guest in list(self._guests):
            self._dispose(guest)
        if self._ending:
            await asyncio.gather(*self._ending)

    def _register(self, sock: socket.socket, guest: _Guest | None, begin: float) -> BubblewrapSandbox:
        stats = self.stats
        now = time.monotonic()
        stats.started += 1
        stats.active += 1
        stats.peak = max(stats.peak, stats.active)
        stats.start_seconds += now - begin

        def on_end() -> None:
            stats.active -= 1
            stats.seconds += time.monotonic() - now
            self._sandboxes.discard(sandbox)
            self._room.release()
            if guest is not None:
                self._dispose(guest)

        sandbox = BubblewrapSandbox(sock, frozenset(self._scripts), self._limits, on_end)
        self._sandboxes.add(sandbox)
        return sandbox

    def _start_guest(self, *, single: bool) -> _Guest:
        who = bwrap_command.identity(next(self._numbers) if single else os.getpid())
        argv = bwrap_command.build(self._scripts, self._limits, who, single=single)
        guest = _Guest(argv, socket.SOCK_STREAM if single else socket.SOCK_SEQPACKET)
        self._guests.add(guest)
        return guest

    async def _running_server(self) -> _Guest:
        """The server of nested sandboxes, started anew if it has died."""
        async with self._starting:
            if self._server is not None and not self._server.alive:
                await self._end_server()
            if self._server is None:
                self._server = self._start_guest(single=False)
            return self._server

    async def _fork(self, server: _Guest) -> socket.socket:
        """Ask the server for one more sandbox; returns the host's end of its socket."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        deadline = time.monotonic() + self._start_timeout
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            while True:
                try:
                    socket.send_fds(server.sock, [b"fork"], [theirs.fileno()])
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise InfrastructureError(
                            "sandbox_start", "the sandbox server does not answer"
                        ) from error
                    await asyncio.sleep(0.005)
                except OSError as error:
                    raise InfrastructureError("sandbox_died", str(error)) from error
                else:
                    on_failure.pop_all()
                    return ours

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._guests.discard(server)
            with server.sock:
                await server.end()

    def _dispose(self, guest: _Guest) -> None:
        """End a bubblewrap in the background; :meth:`close` waits for it."""
        if guest in self._guests:
            self._guests.discard(guest)
            task = asyncio.ensure_future(guest.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

"""The program inside bubblewrap: a server that forks sandboxes, and the first process of each of them.

``python -I -S guest.py CONFIG`` reads its orders from descriptor 0, a Unix socket. As a *server* (warm) it receives one
connected socket per sandbox and forks an interpreter that has pytest and the guest scripts loaded into fresh
namespaces; data of a sandbox goes over that socket only, so the server never holds any of it. As a *single* (cold)
descriptor 0 is the one sandbox's own socket. Standard library and pytest only; runs without the muonrl package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from muonrl.sandbox import guest_files, guest_namespace
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import guest_files
    import guest_namespace

_HEADER = struct.Struct("!II")
_CONTROL_FD = 3
_LEASE_FD = 4
_FIRST_FREE_FD = 5


class Lost(Exception):
    """The other side of the socket is gone."""


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """One frame: a JSON object and a blob."""
    head_size, blob_size = _HEADER.unpack(_read_exactly(sock, _HEADER.size))
    head = json.loads(_read_exactly(sock, head_size))
    return head, _read_exactly(sock, blob_size)


def send(sock: socket.socket, head: dict[str, Any], blob: bytes = b"") -> None:
    """One frame; Lost if nobody listens."""
    text = json.dumps(head).encode()
    try:
        sock.sendall(b"".join((_HEADER.pack(len(text), len(blob)), text, blob)))
    except OSError as error:
        raise Lost from error


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise Lost
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Command:
    """One running child: feeds it, reads it within its limits, and leaves no process behind."""

    def __init__(
        self, sock: socket.socket, limits: dict[str, int], stdin: bytes, timeout: float, max_bytes: int
    ) -> None:
        self.sock, self.limits, self.stdin = sock, limits, stdin
        self.timeout, self.max_bytes = timeout, max_bytes
        self.streams: dict[int, list[bytes]] = {}
        self.sizes: dict[int, int] = {}
        self.truncated = False

    def run(self, body: Callable[[], int]) -> tuple[dict[str, Any], bytes]:
        """Fork, run ``body`` in the child, and return the reply: {"rc", "timed_out", "truncated", "out", "cpu"} and
        stdout followed by stderr."""
        feed = os.memfd_create("stdin", os.MFD_CLOEXEC)
        os.write(feed, self.stdin)
        os.lseek(feed, 0, os.SEEK_SET)
        (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self._child(feed, out_w, err_w, body)
        for fd in (feed, out_w, err_w):
            os.close(fd)
        for fd in (out_r, err_r):
            os.set_blocking(fd, False)
            self.streams[fd], self.sizes[fd] = [], 0
        watch = os.pidfd_open(pid)
        try:
            timed_out = self._pump(watch)
            _, status, usage = self._end(pid)
            for fd in (out_r, err_r):
                while self._read(fd):
                    pass
        finally:
            for fd in (watch, out_r, err_r):
                os.close(fd)
        out, err = b"".join(self.streams[out_r]), b"".join(self.streams[err_r])
        code = os.waitstatus_to_exitcode(status)
        reply = {"rc": code if code >= 0 else 128 - code, "timed_out": timed_out, "truncated": self.truncated}
        return reply | {"out": len(out), "cpu": usage.ru_utime + usage.ru_stime}, out + err

    def _child(self, feed: int, out: int, err: int, body: Callable[[], int]) -> NoReturn:
        rc = 127
        try:
            os.setsid()
            for source, target in ((feed, 0), (out, 1), (err, 2)):
                os.dup2(source, target)
            os.closerange(3, 1024)
            guest_namespace.limit_resources(self.limits, math.ceil(self.timeout) + 5)
            rc = body()
        except BaseException:  # noqa: BLE001 - whatever it is must reach the caller, never the code after the fork
            os.write(2, traceback.format_exc(limit=-4).encode("utf-8", "backslashreplace"))
        finally:
            os._exit(rc)

    def _pump(self, watch: int) -> bool:
        """Move output until the child exits or its time is up; True if it was. Lost if the host hung up."""
        poll = select.poll()
        for fd in (watch, self.sock.fileno(), *self.streams):
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            for fd, _ in poll.poll(left * 1000):
                if fd == watch:
                    return False
                if fd == self.sock.fileno():
                    # One request at a time: anything to read here can only be the end of the connection.
                    raise Lost
                if not self._read(fd):
                    poll.unregister(fd)

    def _read(self, fd: int) -> bool:
        """Take what is there; False at the end of the stream or when it is empty for now."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        room = self.max_bytes - self.sizes[fd]
        if len(data) > room:
            self.truncated = True
        if room > 0 and data:
            self.streams[fd].append(data[:room])
            self.sizes[fd] += min(len(data), room)
        return bool(data)

    @staticmethod
    def _end(pid: int) -> tuple[int, int, Any]:
        """Kill all that is left in this pid namespace, whatever session it hid in, and reap it."""
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing left to kill
        ended = os.wait4(pid, 0)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return ended


class Lease:
    """The first process of one sandbox: answers requests until the host hangs up."""

    def __init__(self, sock: socket.socket, config: dict[str, Any], scripts: dict[str, ModuleType]) -> None:
        self.sock, self.config, self.scripts = sock, config, scripts
        self.limits: dict[str, int] = config["limits"]
        self.counted = 0.0

    def serve(self) -> NoReturn:
        """Never returns: the end of this process is the end of the sandbox."""
        try:
            send(self.sock, {"ok": True})
            while True:
                head, blob = receive(self.sock)
                reply, data = self._answer(head, blob)
                if "cpu" in reply:
                    reply["cpu"] += self._own_cpu()
                send(self.sock, reply, data)
        except Lost:
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a sandbox that is out of order must end
            os._exit(70)

    def _own_cpu(self) -> float:
        """CPU seconds of this process since the last time that it was asked."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        total = usage.ru_utime + usage.ru_stime
        spent, self.counted = total - self.counted, total
        return spent

    def _answer(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            reply, data = getattr(self, "_op_" + head["op"])(head, blob)
            return {"ok": True} | reply, data
        except (OSError, ValueError) as error:
            return {"ok": False, "reason": "sandbox_" + head["op"], "detail": str(error)}, b""

    def _op_put(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        view, files, start = memoryview(blob), [], 0
        for path, size in head["files"]:
            files.append((path, bytes(view[start : start + size])))
            start += size
        return {"count": guest_files.write_files(self.config["work"], files)}, b""

    def _op_snapshot(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        mib = 1 << 20
        caps = (
            self.limits["snapshot_mb"] * mib,
            self.limits["snapshot_file_mb"] * mib,
            self.limits["snapshot_files"],
        )
        with contextlib.suppress(OSError):
            os.chmod(head["root"], 0o755)  # a tree that was locked shall be read, not be taken for a fault
        files = list(guest_files.read_tree(head["root"], *caps))
        return {"files": [[p, len(d)] for p, d in files]}, b"".join(d for _, d in files)

    def _op_exec(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        env = self.config["env"] | head["env"]

        def body() -> int:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            try:
                os.chdir(head["cwd"])
                os.execvpe(head["argv"][0], head["argv"], env)
            except (OSError, ValueError) as error:
                os.write(2, f"cannot start {head['argv'][0]}: {error}\n".encode("utf-8", "backslashreplace"))
            return 127

        return Command(self.sock, self.limits, blob, head["timeout"], head["max_bytes"]).run(body)

    def _op_call(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        module = self.scripts[head["script"]]

        def body() -> int:
            os.chdir(self.config["work"])
            sys.stdin = os.fdopen(0, "r", closefd=False)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            rc: int = module.main()
            sys.stdout.flush()
            sys.stderr.flush()
            return rc

        return Command(self.sock, self.limits, blob, head["timeout"], head["max_bytes"]).run(body)


class Server:
    """The warm interpreter: one fork per sandbox."""

    def __init__(
        self, control: socket.socket, config: dict[str, Any], scripts: dict[str, ModuleType]
    ) -> None:
        self.control, self.config, self.scripts = control, config, scripts

    def serve(self) -> None:
        """Fork a sandbox for each socket received; returns when the host hangs up."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        while True:
            message, fds, _, _ = socket.recv_fds(self.control, 64, 1)
            if not message:
                return
            if os.fork() == 0:
                self._become_lease(fds[0])
            os.close(fds[0])

    def _become_lease(self, fd: int) -> NoReturn:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(fd, _LEASE_FD)
            sock = socket.socket(fileno=_LEASE_FD)
            self.control.close()
            os.closerange(_FIRST_FREE_FD, 1024)
            try:
                self._isolate()
            except OSError as error:
                send(sock, {"ok": False, "reason": "sandbox_start", "detail": str(error)})
                os._exit(1)
            # The pid namespace takes in children only: its first process is one fork further.
            if os.fork() == 0:
                guest_namespace.drop_capabilities()
                guest_namespace.prctl(guest_namespace.PR_SET_DUMPABLE, 0)
                Lease(sock, self.config, self.scripts).serve()
        finally:
            os._exit(0)

    def _isolate(self) -> None:
        guest_namespace.unshare_all()
        limits = self.config["limits"]
        guest_namespace.mount_tmpfs(self.config["work"], limits["work_mb"] << 10)
        guest_namespace.mount_tmpfs("/tmp", limits["tmp_mb"] << 10)
        guest_namespace.mount_tmpfs("/dev/shm", limits["tmp_mb"] << 10)
        guest_namespace.mount_tmpfs("/proc", 4, read_only=True)
        guest_namespace.loopback_up()


def load_scripts(config: dict[str, Any]) -> dict[str, ModuleType]:
    """Import what the guest scripts need, then the scripts themselves: modules with a ``main()``, and a ``warm_up()``
    if they want to prepare the interpreter."""
    sys.path.extend(config["sites"])
    for name in config["preload"]:
        importlib.import_module(name)
    modules = {}
    for name, path in config["scripts"].items():
        spec = importlib.util.spec_from_file_location(f"guest_{name}", path)
        assert spec is not None and spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
        getattr(modules[name], "warm_up", int)()
    return modules


def main(argv: list[str]) -> int:
    """Set up this interpreter as CONFIG says and serve."""
    config = json.loads(argv[1])
    os.dup2(0, _CONTROL_FD)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(_LEASE_FD, 1024)
    control = socket.socket(fileno=_CONTROL_FD)
    if config["uid"] is not None:
        for path in config["own"]:
            os.chmod(path, 0o777)
        guest_namespace.become(config["uid"])
    os.environ.clear()
    os.environ.update(config["env"])
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # short of memory, the kernel shall take a sandbox and not the trainer
    except OSError:
        pass  # a wish only: there need not be a /proc
    os.pidfd_open(os.getpid())
    scripts = load_scripts(config)
    gc.collect()
    gc.freeze()
    if config["mode"] == "single":
        guest_namespace.prctl(guest_namespace.PR_SET_DUMPABLE, 0)
        Lease(control, config, scripts).serve()
    Server(control, config, scripts).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

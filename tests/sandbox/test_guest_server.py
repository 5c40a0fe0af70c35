"""The program inside, spoken to directly: its server forks sandboxes with or without bubblewrap around it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from muonrl.sandbox import Limits, bwrap_command, guest_scripts

GUEST = Path(bwrap_command.__file__).parent / "guest.py"


class Talk:
    """A blocking client of one sandbox."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file = sock, sock.makefile("rwb")

    def receive(self) -> tuple[dict[str, Any], bytes]:
        head, blob = struct.unpack("!II", self.file.read(8))
        return json.loads(self.file.read(head)), self.file.read(blob)

    def ask(self, blob: bytes = b"", **head: Any) -> tuple[dict[str, Any], bytes]:
        text = json.dumps(head).encode()
        self.file.write(struct.pack("!II", len(text), len(blob)) + text + blob)
        self.file.flush()
        return self.receive()


@pytest.fixture
def work() -> Iterator[Path]:
    # Not below /tmp: a sandbox has one of its own, mounted over it.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="muonrl-test-") as folder:
        yield Path(folder)


@pytest.fixture
def fork(work: Path, scripts: dict[str, Path]) -> Iterator[Callable[[], Talk]]:
    """Asks a server, which runs as a plain child of this process, for sandboxes."""
    config = {
        "mode": "server",
        "uid": None,
        "own": [],
        "work": str(work),
        "sites": [],
        "preload": ["pytest"],
        "scripts": {name: str(path) for name, path in (guest_scripts() | scripts).items()},
        "env": {"PATH": os.environ["PATH"], "TMPDIR": "/tmp"},
        "limits": asdict(Limits(memory_mb=4096)),
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends: list[socket.socket] = []
    with theirs:
        server = subprocess.Popen([sys.executable, str(GUEST), json.dumps(config)], stdin=theirs.fileno())

    def get() -> Talk:
        mine, other = socket.socketpair()
        ends.append(mine)
        with other:
            socket.send_fds(ours, [b"fork"], [other.fileno()])
        talk = Talk(mine)
        hello, _ = talk.receive()
        if not hello["ok"]:
            pytest.skip(f"this kernel refuses nested namespaces: {hello}")
        return talk

    yield get
    for sock in (*ends, ours):
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    assert server.wait(10) == 0


def test_requests_and_answers(fork: Callable[[], Talk], work: Path) -> None:
    box = fork()
    assert box.ask(b"12345", op="put", files=[["a", 2], ["b/c", 3]]) == ({"ok": True, "count": 2}, b"")
    reply, blob = box.ask(op="snapshot", root=str(work))
    assert (reply["files"], blob) == ([["a", 2], ["b/c", 3]], b"12345")
    limits = {"timeout": 20, "max_bytes": 1000}
    script = "cat; cat a; echo E >&2; echo $X; exit 5"
    reply, blob = box.ask(
        b"in", op="exec", argv=["sh", "-c", script], cwd=str(work), env={"X": "y"}, **limits
    )
    assert (reply["rc"], reply["out"], blob) == (5, 6, b"in12y\nE\n")
    reply, blob = box.ask(op="exec", argv=["sleep", "9"], cwd="/", env={}, timeout=0.2, max_bytes=9)
    assert reply["timed_out"] and reply["rc"] == 137
    reply, blob = box.ask(op="exec", argv=["absent"], cwd="/", env={}, **limits)
    assert reply["rc"] == 127 and b"absent" in blob
    reply, blob = box.ask(b"hello", op="call", script="echo", **limits)
    assert (reply["rc"], blob) == (3, b"hello") and reply["cpu"] > 0
    reply, blob = box.ask(b"raise", op="call", script="echo", **limits)
    assert reply["rc"] == 127 and b"guest script failed" in blob
    refused, _ = box.ask(b"x", op="put", files=[["../up", 1]])
    assert refused["ok"] is False and refused["reason"] == "sandbox_put"
    assert list(work.iterdir()) == [], "the tree lives in a mount of the sandbox's own"


def test_a_grading_by_hand(fork: Callable[[], Talk]) -> None:
    request = {
        "nonce": "n",
        "tests": {
            "tests/test_m.py": "import m\ndef test_a(): assert m.x == 1\ndef test_b(): assert m.x == 2\n"
        },
        "canaries": ["test_c1", "test_c2"],
        "required": None,
        "stop_early": False,
    }
    box = fork()
    assert box.ask(b"x = 1\n", op="put", files=[["m.py", 6]])[0]["ok"]
    reply, blob = box.ask(
        json.dumps(request).encode(), op="call", script="runner", timeout=20, max_bytes=10_000
    )
    assert reply["rc"] == 1, (reply, blob)
    report = json.loads(blob[: reply["out"]])
    assert report["results"] == [["tests/test_m.py::test_a", "passed"], ["tests/test_m.py::test_b", "failed"]]
    assert report["canaries"] == ["failed", "failed"] and report["nonce"] == "n" and report["exit"] == 1


def test_the_end_of_the_connection_ends_the_command(fork: Callable[[], Talk], work: Path) -> None:
    box, other = fork(), fork()
    text = json.dumps(
        {"op": "exec", "argv": ["sleep", "60"], "cwd": "/", "env": {}, "timeout": 60, "max_bytes": 9}
    )
    box.file.write(struct.pack("!II", len(text), 0) + text.encode())
    box.file.flush()
    box.sock.shutdown(socket.SHUT_WR)
    assert box.file.read() == b"", "the sandbox has closed its end without an answer"
    assert other.ask(op="snapshot", root=str(work))[0]["ok"]

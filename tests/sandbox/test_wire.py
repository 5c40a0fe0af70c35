"""Frames from a sandbox are checked before they are believed."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from muonrl.errors import InfrastructureError
from muonrl.sandbox.wire import receive_frame, send_frame, wait_end


def receive(data: bytes, max_blob: int = 100) -> tuple[dict[str, object], bytes]:
    async def session() -> tuple[dict[str, object], bytes]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                theirs.sendall(data)
            return await receive_frame(ours, max_blob)

    return asyncio.run(session())


def frame(text: bytes, blob: bytes = b"") -> bytes:
    return struct.pack("!II", len(text), len(blob)) + text + blob


def test_round_trip() -> None:
    async def session() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        with ours, theirs:
            blob = bytes(300_000)
            await asyncio.gather(
                send_frame(ours, {"a": 1}, blob), got := asyncio.ensure_future(receive_frame(theirs, 300_000))
            )
            assert got.result() == ({"a": 1}, blob)
            assert not await wait_end(ours, 0.05)
            theirs.close()
            assert await wait_end(ours, 5.0)

    asyncio.run(session())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "sandbox_died"),
        (b"\0\0", "sandbox_died"),
        (frame(b'{"ok": true}')[:-1], "sandbox_died"),
        (frame(b'{"ok": true}', b"123")[:-1], "sandbox_died"),
        (frame(b"not json"), "sandbox_protocol"),
        (frame(b"\xff\xfe"), "sandbox_protocol"),
        (frame(b"[1, 2]"), "sandbox_protocol"),
        (frame(b"{}", bytes(101)), "sandbox_protocol"),
        (struct.pack("!II", 1 << 31, 0), "sandbox_protocol"),
    ],
)
def test_anything_else_is_an_infrastructure_fault(data: bytes, reason: str) -> None:
    with pytest.raises(InfrastructureError) as caught:
        receive(data)
    assert caught.value.reason == reason


def test_a_dead_peer_on_sending() -> None:
    async def session() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.close()
        with ours, pytest.raises(InfrastructureError):
            await send_frame(ours, {}, bytes(1 << 20))

    asyncio.run(session())

"""The host's end of a sandbox socket: frames of a JSON object and a blob, over asyncio."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from muonrl.errors import InfrastructureError

_HEADER = struct.Struct("!II")
_MAX_HEAD = 16 << 20


async def send_frame(sock: socket.socket, head: dict[str, Any], blob: bytes = b"") -> None:
    """Send one frame; InfrastructureError ``sandbox_died`` if the sandbox is gone."""
    text = json.dumps(head).encode()
    try:
        await asyncio.get_running_loop().sock_sendall(
            sock, b"".join((_HEADER.pack(len(text), len(blob)), text, blob))
        )
    except OSError as error:
        raise InfrastructureError("sandbox_died", str(error)) from error


async def receive_frame(sock: socket.socket, max_blob: int) -> tuple[dict[str, Any], bytes]:
    """Receive one frame of at most ``max_blob`` bytes of data.

    InfrastructureError ``sandbox_died`` at the end of the stream, ``sandbox_protocol`` for anything that is no frame:
    what comes from a sandbox is never trusted.
    """
    head_size, blob_size = _HEADER.unpack(await _read_exactly(sock, _HEADER.size))
    if head_size > _MAX_HEAD or blob_size > max_blob:
        raise InfrastructureError("sandbox_protocol", f"a frame of {head_size}+{blob_size} bytes")
    text = await _read_exactly(sock, head_size)
    try:
        head = json.loads(text)
    except ValueError as error:
        raise InfrastructureError("sandbox_protocol", "a frame without a JSON head") from error
    if not isinstance(head, dict):
        raise InfrastructureError("sandbox_protocol", "a frame whose head is no object")
    return head, await _read_exactly(sock, blob_size)


async def wait_end(sock: socket.socket, timeout: float) -> bool:
    """Half-close and wait until the other side has closed too; False if it had not after ``timeout`` seconds."""
    loop = asyncio.get_running_loop()
    try:
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(timeout):
            while await loop.sock_recv(sock, 1 << 16):
                pass
    except TimeoutError:
        return False
    except OSError:
        pass  # a reset is an end too
    return True


async def _read_exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            got = await loop.sock_recv_into(sock, view)
        except OSError as error:
            raise InfrastructureError("sandbox_died", str(error)) from error
        if got == 0:
            raise InfrastructureError("sandbox_died", "the sandbox closed its connection")
        view = view[got:]
    return bytes(data)

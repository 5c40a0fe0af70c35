"""Births and deaths: what happens when a part dies, is refused, or is interrupted."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muonrl.config import SandboxConfig
from muonrl.errors import InfrastructureError, SandboxUnavailable
from muonrl.sandbox import (
    BubblewrapProvider,
    ProcessProvider,
    SandboxProvider,
    bwrap_command,
    guest_scripts,
    make_provider,
)

Play = Callable[..., None]
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
ISOLATED = pytest.mark.parametrize("backend", ["nested", "cold"])

OWNER = """
import asyncio, sys
from pathlib import Path
from muonrl.sandbox import BubblewrapProvider

async def main():
    provider = BubblewrapProvider({}, mode=sys.argv[1])
    await provider.start()
    try:
        boxes = [await provider.acquire() for _ in range(2)]
        print("ready", flush=True)
        await asyncio.gather(*(b.exec(["sleep", "987.25"], timeout=1000) for b in boxes))
    finally:
        await provider.close()
        print("closed", flush=True)

asyncio.run(main())
"""


def running(word: str) -> list[int]:
    """Processes that have ``word`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill_guest(guest: Any) -> None:
    """Kill the interpreter inside, the only child of bubblewrap."""
    pid = guest.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)


@pytest.fixture
def owner(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A process of its own that holds two sandboxes with a running command each."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    process = subprocess.Popen(
        [sys.executable, str(script), request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert wait_until(lambda: len(running("987.25")) == 2)
    yield process
    process.kill()
    process.communicate()


@needs_bwrap
@pytest.mark.parametrize("owner", ["nested", "cold"], indirect=True)
def test_sandboxes_die_with_a_killed_owner(owner: Any) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not running("987.25"))


@needs_bwrap
@pytest.mark.parametrize("owner", ["nested", "cold"], indirect=True)
def test_ctrl_c_ends_in_order_and_at_once(owner: Any) -> None:
    begin = time.monotonic()
    owner.send_signal(signal.SIGINT)
    out, err = owner.communicate(timeout=10)
    assert out == "closed\n" and err.strip().endswith("KeyboardInterrupt")
    assert time.monotonic() - begin < 3
    assert not running("987.25")


def test_a_killed_server_is_an_infrastructure_fault(play: Play) -> None:
    async def body(provider: Any) -> None:
        box, idle = await provider.acquire(), await provider.acquire()
        running_call = asyncio.ensure_future(box.exec(["sleep", "60"]))
        await asyncio.wait([running_call], timeout=0.2)
        kill_guest(provider._server)
        with pytest.raises(InfrastructureError) as caught:
            await running_call
        assert caught.value.reason == "sandbox_died"
        with pytest.raises(InfrastructureError):
            await idle.put({"a": b""})
        await box.close()
        fresh = await provider.acquire()  # the provider has started another server
        assert (await fresh.exec(["echo", "back"])).stdout == b"back\n"

    play("nested", body)


def test_a_killed_cold_sandbox_is_an_infrastructure_fault(play: Play) -> None:
    async def body(provider: Any) -> None:
        box, other = await provider.acquire(), await provider.acquire()
        running_call = asyncio.ensure_future(box.exec(["sleep", "60"]))
        await asyncio.wait([running_call], timeout=0.2)
        victim = next(guest for guest in provider._guests if guest.sock is box._sock)
        kill_guest(victim)
        with pytest.raises(InfrastructureError):
            await running_call
        assert (await other.exec(["echo", "fine"])).stdout == b"fine\n"

    play("cold", body)


@ISOLATED
def test_close_breaks_off_running_commands(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        task = asyncio.ensure_future(box.exec(["sleep", "60"]))
        await asyncio.wait([task], timeout=0.2)
        begin = time.monotonic()
        await provider.close()
        assert time.monotonic() - begin < 3
        with pytest.raises(InfrastructureError):
            await asyncio.wait_for(task, 3)
        with pytest.raises(InfrastructureError):
            await provider.acquire()

    play(backend, body)


@ISOLATED
def test_cancelled_acquires_leave_nothing(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        tasks = [asyncio.ensure_future(provider.acquire()) for _ in range(12)]
        for turns, task in enumerate(tasks):
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(
                result, BaseException
            ):  # it was there before the cancellation: on a busy machine that happens
                await result.close()
        async with asyncio.timeout(60):
            boxes = [
                await provider.acquire() for _ in range(4)
            ]  # the room of the cancelled ones is free again
        for box in boxes:
            assert (await box.exec(["true"])).rc == 0

    play(backend, body, max_active=4)


def test_acquire_waits_for_room(play: Play) -> None:
    async def body(provider: Any) -> None:
        first = await provider.acquire()
        second = asyncio.ensure_future(provider.acquire())
        await asyncio.wait([second], timeout=0.2)
        assert not second.done()
        await first.close()
        assert (await (await second).exec(["true"])).rc == 0

    play("nested", body, max_active=1)


def test_without_bubblewrap_one_line_names_the_package(
    make: Callable[..., SandboxProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = make("nested")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxUnavailable, match="install the package `bubblewrap`") as caught:
        asyncio.run(provider.start())
    assert "\n" not in str(caught.value)


@needs_bwrap
def test_auto_falls_back_to_cold(scripts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = bwrap_command.build

    def refuse_nested(*args: Any, single: bool) -> list[str]:
        return genuine(*args, single=True) if single else ["/bin/sh", "-c", "echo no namespaces >&2; exit 1"]

    monkeypatch.setattr(bwrap_command, "build", refuse_nested)

    async def session() -> None:
        provider = BubblewrapProvider(scripts)
        await provider.start()
        assert provider.mode == "cold"
        box = await provider.acquire()
        assert (await box.call("echo", b"x")).stdout == b"x"
        await provider.close()

    asyncio.run(session())


def wait_for_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server end before it is asked for a sandbox, the order that a busy machine brings about."""
    asked = BubblewrapProvider._fork

    async def late(self: BubblewrapProvider, server: Any) -> Any:
        server.process.wait(timeout=10)
        return await asked(self, server)

    monkeypatch.setattr(BubblewrapProvider, "_fork", late)


@needs_bwrap
@pytest.mark.parametrize("dead", ["before it is asked", "while it is asked"])
def test_when_nothing_works_one_line_says_why(
    scripts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    if dead == "before it is asked":
        wait_for_death(monkeypatch)

    def build(*_: Any, single: bool) -> list[str]:
        hears = "" if single or dead == "before it is asked" else "head -c 1 >/dev/null; "
        return ["/bin/sh", "-c", hears + "echo bad luck >&2; exit 1"]

    monkeypatch.setattr(bwrap_command, "build", build)
    with pytest.raises(SandboxUnavailable) as caught:
        asyncio.run(BubblewrapProvider(scripts).start())
    assert str(caught.value).count("bad luck") == 2 and "\n" not in str(caught.value)


@needs_bwrap
def test_a_server_found_dead_when_asked_is_replaced(
    scripts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def session() -> None:
        provider = BubblewrapProvider(scripts)
        await provider.start()
        if provider.mode != "nested":
            pytest.skip("no nested sandboxes on this machine")
        server = provider._server
        assert server is not None
        asked = BubblewrapProvider._fork

        async def after_a_murder(self: BubblewrapProvider, guest: Any) -> Any:
            if guest is server:
                kill_guest(server)
                server.process.wait(timeout=10)
            return await asked(self, guest)

        monkeypatch.setattr(BubblewrapProvider, "_fork", after_a_murder)
        box = await provider.acquire()
        assert provider._server is not server
        assert (await box.call("echo", b"x")).stdout == b"x"
        await provider.close()

    asyncio.run(session())


@ISOLATED
def test_in_a_user_namespace_of_its_own(play: Play, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an ordinary user, and of a root without the right to administer the system."""
    mapped = 1000 if os.geteuid() == 0 else None
    monkeypatch.setattr(bwrap_command, "identity", lambda index=0: bwrap_command.Identity(True, mapped))

    async def body(provider: Any) -> None:
        box, other = await provider.acquire(), await provider.acquire()
        await box.put({"a": b"1"})
        result = await box.exec(["sh", "-c", "id -u; cat a; echo x > b"])
        assert result.stdout.split()[0] != b"0" and result.rc == 0
        assert await box.snapshot() == {"a": b"1", "b": b"x\n"}
        assert await other.snapshot() == {}
        assert (await box.call("echo", b"y")).stdout == b"y"

    play(backend, body)


def test_who_sandboxes_run_as(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert bwrap_command.identity() == bwrap_command.Identity(namespace=True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bwrap_command, "_effective_capabilities", lambda: 0)
    assert bwrap_command.identity() == bwrap_command.Identity(namespace=True, map_uid=1000)
    monkeypatch.setattr(bwrap_command, "_effective_capabilities", lambda: 1 << 21)
    one, two = bwrap_command.identity(1), bwrap_command.identity(2)
    assert not one.namespace and one.switch_uid and one.switch_uid != two.switch_uid


def test_a_python_that_the_sandbox_would_hide_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/tmp/env")
    monkeypatch.setattr(sys, "_base_executable", "/tmp/env/bin/python9", raising=False)
    monkeypatch.setattr(os.path, "realpath", lambda path: str(path))
    assert bwrap_command.guest_python() == ("/tmp/env", "/opt/python", "/opt/python/bin/python9")


def test_the_process_backend_is_refused_unless_allowed() -> None:
    with pytest.raises(SandboxUnavailable, match="allow_unsandboxed"):
        ProcessProvider({})
    with pytest.raises(SandboxUnavailable, match="allow_unsandboxed"):
        make_provider(SandboxConfig(backend="process"))
    assert isinstance(
        make_provider(SandboxConfig(backend="process", allow_unsandboxed=True)), ProcessProvider
    )
    assert isinstance(make_provider(SandboxConfig()), BubblewrapProvider)
    assert all(path.is_file() for path in guest_scripts().values())

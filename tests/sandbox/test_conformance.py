"""What every backend must do alike; the isolated ones also what keeps the host safe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muonrl.errors import InfrastructureError
from muonrl.sandbox import Limits

ALL = pytest.mark.parametrize("backend", ["nested", "cold", "process"])
ISOLATED = pytest.mark.parametrize("backend", ["nested", "cold"])
Play = Callable[..., None]


@ALL
def test_exec_gives_streams_status_and_environment(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        result = await box.exec(
            ["sh", "-c", "cat; printf E >&2; printf $X; exit 7"], stdin=b"in\xff", env={"X": "y"}
        )
        assert (result.stdout, result.stderr, result.rc) == (b"in\xffy", b"E", 7)
        assert not result.timed_out and not result.truncated
        assert (await box.exec(["sh", "-c", "kill -9 $$"])).rc == 137
        missing = await box.exec(["no-such-program"])
        assert missing.rc == 127 and b"no-such-program" in missing.stderr
        assert (await box.exec(["pwd"], cwd="/work/absent")).rc == 127
        with pytest.raises(ValueError, match="argv"):
            await box.exec([])

    play(backend, body)


@ALL
def test_call_answers_on_stdout(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        data = bytes(range(256)) * 2000
        result = await box.call("echo", data)
        assert (result.stdout, result.rc) == (data, 3)
        failed = await box.call("echo", b"raise")
        assert failed.rc != 0 and b"guest script failed" in failed.stderr
        assert (await box.call("echo", b"die")).rc == 9
        with pytest.raises(KeyError):
            await box.call("absent", b"")

    play(backend, body)


@ALL
def test_put_and_snapshot_round_trip(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        files = {"a.py": b"x", "pkg/deep/er/b.bin": bytes(range(256)), "empty": b"", "ü/n ame.txt": b"1"}
        await box.put(files)
        assert await box.snapshot() == files
        await box.put({"a.py": b"changed", "pkg/new.py": b"2"})
        assert await box.snapshot() == {**files, "a.py": b"changed", "pkg/new.py": b"2"}
        assert await box.snapshot("/work/pkg") == {"deep/er/b.bin": bytes(range(256)), "new.py": b"2"}
        for path in ("/etc/x", "../x", "a/../../x", "", ".", "a\0b"):
            with pytest.raises(ValueError, match="relative path"):
                await box.put({path: b""})

    play(backend, body)


@ALL
def test_symlinks_lead_nowhere(play: Play, backend: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "secret").write_bytes(b"host")

    async def body(provider: Any) -> None:
        box = await provider.acquire()
        script = f"ln -s {victim} d; ln -s {victim}/secret f; ln -s /etc/passwd p; ln -s . loop; mkfifo q; mkdir real"
        assert (await box.exec(["sh", "-c", script])).rc == 0
        await box.put({"real/x": b"1"})
        assert await box.snapshot() == {"real/x": b"1"}
        await box.put({"d/secret": b"put", "f": b"put", "q": b"put"})
        assert (victim / "secret").read_bytes() == b"host"
        assert await box.snapshot() == {"d/secret": b"put", "f": b"put", "q": b"put", "real/x": b"1"}

    play(backend, body)


@ALL
def test_snapshot_is_capped(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        await box.put({"big": b"x" * (1 << 20) + b"y", "small": b"s"})
        assert await box.snapshot() == {"small": b"s"}
        await box.put({f"n{i:02d}": b"z" for i in range(30)})
        assert len(await box.snapshot()) == 20

    play(backend, body, Limits(snapshot_file_mb=1, snapshot_files=20))


@ISOLATED
def test_a_tree_that_fights_back_is_read(play: Play, backend: str) -> None:
    deep = "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')\nopen('lost', 'w')"
    long = "import os\nfor i in range(3000): open(f'{i:0250}', 'w')"

    async def body(provider: Any) -> None:
        box = await provider.acquire()
        await box.put({"a.py": b"1", "shut/b.py": b"2"})
        for code in (deep, long):
            assert (await box.exec(["python3", "-S", "-c", code])).rc == 0
        await box.exec(["sh", "-c", "chmod 000 shut; chmod 000 /work"])
        files = await box.snapshot()
        assert files["a.py"] == b"1" and len(files) == 3001
        await box.put({"c.py": b"3"})

    play(backend, body)


@ALL
def test_endless_output_is_cut(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        result = await box.exec(["head", "-c", "100000000", "/dev/zero"], max_bytes=5000)
        assert (result.rc, len(result.stdout), result.truncated) == (0, 5000, True)
        exact = await box.exec(["head", "-c", "5000", "/dev/zero"], max_bytes=5000)
        assert (len(exact.stdout), exact.truncated) == (5000, False)
        both = await box.exec(["sh", "-c", "printf abc; printf defg >&2"], max_bytes=3)
        assert (both.stdout, both.stderr, both.truncated) == (b"abc", b"def", True)

    play(backend, body)


@ALL
def test_timeout_kills_the_group(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        begin = time.monotonic()
        result = await box.exec(["sh", "-c", "echo first; trap '' TERM; sleep 60 & sleep 60"], timeout=0.4)
        assert result.timed_out and result.rc != 0 and result.stdout == b"first\n"
        assert time.monotonic() - begin < 5
        assert (await box.exec(["echo", "again"])).stdout == b"again\n"

    play(backend, body)


@ALL
def test_a_child_left_behind_does_not_hold_the_call(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        begin = time.monotonic()
        result = await box.exec(["sh", "-c", "sleep 60 & echo done"])
        assert (result.stdout, result.rc, result.timed_out) == (b"done\n", 0, False)
        assert time.monotonic() - begin < 5

    play(backend, body)


@ALL
def test_cancelled_exec_ends_the_sandbox_only(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box, other = await provider.acquire(), await provider.acquire()
        task = asyncio.ensure_future(box.exec(["sleep", "60"]))
        await asyncio.wait([task], timeout=0.2)
        begin = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await box.close()
        assert time.monotonic() - begin < 3
        with pytest.raises(InfrastructureError) as caught:
            await box.exec(["true"])
        assert caught.value.reason == "sandbox_closed"
        assert (await other.exec(["echo", "fine"])).stdout == b"fine\n"

    play(backend, body)


@ALL
def test_closed_is_closed(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        assert provider.stats.active == 1
        await box.close()
        await box.close()
        assert provider.stats.active == 0 and provider.stats.started == 1
        for use in (box.exec(["true"]), box.put({"a": b""}), box.snapshot(), box.call("echo", b"")):
            with pytest.raises(InfrastructureError):
                await use

    play(backend, body)


@ALL
def test_closing_breaks_off_a_command(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        task = asyncio.ensure_future(box.exec(["sleep", "60"]))
        await asyncio.wait([task], timeout=0.2)
        begin = time.monotonic()
        await box.close()
        with pytest.raises(InfrastructureError):
            await asyncio.wait_for(task, 5)
        assert time.monotonic() - begin < 3

    play(backend, body)


@ISOLATED
def test_no_process_outlives_its_call(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        script = "setsid sh -c 'while :; do echo x >> beat; sleep 0.05; done' & sleep 0.3; echo ok"
        assert (await box.exec(["sh", "-c", script])).stdout == b"ok\n"
        beat = len((await box.snapshot())["beat"])
        assert beat > 0
        assert (await box.exec(["sleep", "0.3"])).rc == 0
        assert len((await box.snapshot())["beat"]) == beat

    play(backend, body)


@ISOLATED
def test_fork_bomb(play: Play, backend: str) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"

    async def body(provider: Any) -> None:
        box, other = await provider.acquire(), await provider.acquire()
        begin = time.monotonic()
        running = asyncio.ensure_future(box.exec(["python3", "-S", "-c", bomb], timeout=1.0))
        assert (await other.exec(["echo", "alive"])).stdout == b"alive\n"
        assert (await running).timed_out
        assert time.monotonic() - begin < 10
        counted = "n=0; for i in 1 2 3 4 5 6 7 8 9; do sleep 1 & done; wait"
        result = await box.exec(["bash", "-c", counted], timeout=10)
        assert b"ork" in result.stderr, "more processes than the limit of 8"
        assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"

    play(backend, body, Limits(processes=8))


@ISOLATED
def test_memory_bomb(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        result = await box.exec(["python3", "-S", "-c", "x = bytearray(1 << 31)"])
        assert result.rc == 1 and b"MemoryError" in result.stderr
        assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"

    play(backend, body)


@ISOLATED
def test_disk_bomb(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        for folder in ("/work", "/tmp", "/dev/shm"):
            script = f"for i in 1 2 3 4; do head -c 3000000 /dev/zero > {folder}/f$i || exit 5; done"
            result = await box.exec(["sh", "-c", script])
            assert result.rc != 0 and b"No space left" in result.stderr, folder
        assert (await box.exec(["sh", "-c", "rm /tmp/f*; head -c 6000000 /dev/zero > /tmp/x"])).rc != 0
        for place in ("/x", "/usr/x", "/opt/x", "/etc/x", "/dev/x", "/proc/x", "/opt/muonrl/x"):
            assert (await box.exec(["sh", "-c", f"echo > {place}"])).rc != 0, place

    play(backend, body, Limits(work_mb=8, tmp_mb=8, file_mb=4))


@ISOLATED
def test_network_is_denied(play: Play, backend: str) -> None:
    code = (
        "import socket\n"
        "s = socket.socket(); s.settimeout(3)\n"
        "try: s.connect(('192.0.2.1', 80))\n"
        "except OSError as e: print(type(e).__name__, e.errno)\n"
        "print([n for _, n in socket.if_nameindex()])\n"
    )

    async def body(provider: Any) -> None:
        box, other = await provider.acquire(), await provider.acquire()
        result = await box.exec(["python3", "-S", "-c", code])
        assert result.stdout.split(b"\n")[0] == b"OSError 101", result  # network unreachable
        assert b"'lo'" in result.stdout and b"eth" not in result.stdout
        # The loopback of one sandbox is not that of another, nor are abstract sockets.
        begin = "import socket, time; s = socket.socket(socket.AF_UNIX); "
        serve = begin + "s.bind('\\0x'); s.listen(); print(1, flush=True); time.sleep(1)"
        dial = begin + "s.connect('\\0x')"
        serving = asyncio.ensure_future(box.exec(["python3", "-S", "-c", serve]))
        refused = await other.exec(["python3", "-S", "-c", dial])
        assert refused.rc == 1 and b"ConnectionRefused" in refused.stderr
        assert (await serving).stdout == b"1\n"

    play(backend, body)


@ISOLATED
def test_host_is_invisible(play: Play, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of the host")
    (tmp_path / "file").write_text("of the host")

    async def body(provider: Any) -> None:
        box = await provider.acquire()
        assert b"SECRET" not in (await box.exec(["env"])).stdout
        for path in (
            tmp_path,
            Path.home() / ".bashrc",
            __file__,
            "/etc/passwd",
            "/etc/hostname",
            "/var",
            "/home",
        ):
            assert (await box.exec(["ls", str(path)])).rc != 0, path
        assert (
            await box.exec(["ls", "-A", "/proc", "/work", "/tmp"])
        ).stdout == b"/proc:\n\n/tmp:\n\n/work:\n"
        me = await box.exec(
            ["python3", "-S", "-c", "import os; print(os.getuid(), os.getgid(), os.getpid())"]
        )
        uid, gid, pid = (int(word) for word in me.stdout.split())
        assert uid and gid and pid < 50
        for command in (
            "mount -t tmpfs x /opt",
            "umount /proc",
            "chroot / true",
            "hostname x",
            "mknod n b 1 1",
        ):
            assert (await box.exec(["sh", "-c", f"PATH=$PATH:/usr/sbin:/sbin; {command}"])).rc != 0, command
        assert (await box.exec(["sh", "-c", "kill -9 1; kill -9 -1"])).rc in (0, 1, 137)
        assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"

    play(backend, body)


@ISOLATED
def test_commands_hold_no_descriptor_but_their_own(play: Play, backend: str) -> None:
    code = "import os\nfor fd in range(1000):\n try: os.fstat(fd); print(fd)\n except OSError: pass"

    async def body(provider: Any) -> None:
        box = await provider.acquire()
        assert (await box.exec(["python3", "-S", "-c", code])).stdout.split() == [b"0", b"1", b"2"]
        assert (await box.call("echo", b"descriptors")).stdout == b"[0, 1, 2]"

    play(backend, body)


@ISOLATED
def test_sandboxes_do_not_see_each_other(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        one, two = await provider.acquire(), await provider.acquire()
        for folder in ("/work", "/tmp", "/dev/shm"):
            assert (await one.exec(["sh", "-c", f"echo secret > {folder}/mark"])).rc == 0
            assert (await two.exec(["cat", f"{folder}/mark"])).rc != 0
        sleeping = asyncio.ensure_future(one.exec(["sleep", "1"]))
        look = "import os\nfor p in range(2, 30000):\n try: os.kill(p, 0); print(p == os.getpid())\n except OSError: pass"
        assert (await two.exec(["python3", "-S", "-c", look])).stdout == b"True\n"
        await sleeping
        await one.close()
        three = await provider.acquire()
        assert await three.snapshot() == {} and await three.snapshot("/tmp") == {}

    play(backend, body)


@ISOLATED
def test_many_at_once(play: Play, backend: str) -> None:
    count = 64 if backend == "nested" else 6

    async def one(provider: Any, number: int) -> None:
        box = await provider.acquire()
        await box.put({"n": str(number).encode()})
        assert (await box.exec(["cat", "n"])).stdout == str(number).encode()
        assert (await box.call("echo", b"%d" % number)).stdout == b"%d" % number
        await box.close()

    async def body(provider: Any) -> None:
        await asyncio.gather(*(one(provider, n) for n in range(count)))
        assert provider.stats.started == count and provider.stats.peak <= 48
        assert provider.stats.peak > 1

    play(backend, body, max_active=48)


@ISOLATED
def test_limits_are_set(play: Play, backend: str) -> None:
    async def body(provider: Any) -> None:
        box = await provider.acquire()
        limits = (
            await box.exec(["bash", "-c", "ulimit -u; ulimit -n; ulimit -c; ulimit -Hv"])
        ).stdout.split()
        assert limits == [b"16", b"64", b"0", b"204800"]

    play(backend, body, Limits(processes=16, open_files=64, memory_mb=200))

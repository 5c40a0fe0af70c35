"""A whole run in seconds: a policy of a few thousand parameters, eight tasks, real sandboxes, real grading."""

from __future__ import annotations

import atexit
import functools
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from muonrl import cli

RECIPE = """
[run]
updates = 3
rollouts_per_update = 4
checkpoint_every = 2
eval_samples = 1
[tasks]
limit = 8
[model]
hidden = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
ffn = 64
vocab = 400
max_context = 512
[warmstart]
demonstrations = 60
steps = 3
batch_tokens = 1024
cache_dir = "{cache}"
[agent]
max_turns = 2
max_new_tokens = 16
[sandbox]
concurrency = 8
"""

_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@functools.cache
def home() -> Path:
    """A folder for this test process with the recipe and the cached warm start; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="muonrl-micro-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "micro.toml").write_text(RECIPE.format(cache=folder / "cache"))
    return folder


def muonrl(*command: str | Path) -> int:
    """The command line within this process; the thread count that it sets is put back."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _QUIET.items():
            patch.setenv(name, value)
        try:
            return cli.main([str(part) for part in command])
        finally:
            torch.set_num_threads(threads)


def arguments(run_dir: Path | str, *more: str) -> list[str]:
    """The command line of a training run; ``more`` are further ``--set`` values."""
    sets = [part for value in more for part in ("--set", value)]
    return ["train", "--recipe", str(home() / "micro.toml"), "--run-dir", str(run_dir), *sets]


@functools.cache
def finished_run() -> Path:
    """A run to its end, made once: tests that change something work on a :func:`copy_run`."""
    run = home() / "run"
    assert muonrl(*arguments(run)) == 0
    return run


def copy_run(target: Path) -> Path:
    return Path(shutil.copytree(finished_run(), target))


def descendants(pid: int) -> set[int]:
    """All processes below ``pid`` now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= level
    return found


def command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Watch:
    """Handles on processes, by which their end can be awaited even if their numbers are given away again."""

    def __init__(self, pids: set[int]) -> None:
        self.names = {pid: command_line(pid) for pid in pids}
        self.handles: dict[int, int] = {}
        for pid in pids:
            try:
                self.handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue

    def left(self, seconds: float) -> list[str]:
        """The command lines of those that are still there after ``seconds``; the handles are closed."""
        end = time.monotonic() + seconds
        alive = dict(self.handles)
        poll = select.poll()
        for handle in alive.values():
            poll.register(handle, select.POLLIN)
        while alive and (rest := end - time.monotonic()) > 0:
            for handle, _ in poll.poll(rest * 1000):
                poll.unregister(handle)
                alive = {pid: h for pid, h in alive.items() if h != handle}
        for handle in self.handles.values():
            os.close(handle)
        return [self.names[pid] for pid in alive]


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """``muonrl`` with some arguments as a process of its own session, killed with all of it where a test fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "muonrl", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()
        for stream in (running.stdout, running.stderr):
            assert stream is not None
            stream.close()


def read_until(running: subprocess.Popen[str], text: str, times: int = 1) -> list[str]:
    """Read standard output until a line with ``text`` in it has come ``times`` times."""
    lines: list[str] = []
    assert running.stdout is not None
    for line in running.stdout:
        lines.append(line)
        times -= text in line
        if times == 0:
            return lines
    assert running.stderr is not None
    raise AssertionError(f"the process ended first: {lines} {running.stderr.read()}")

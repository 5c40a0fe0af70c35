"""Real `muonrl train` processes that are interrupted, lose a part, or meet a disk that refuses: clean ends, one line."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muonrl.reporting.metrics import read_metrics
from muonrl.training.checkpoint import latest_checkpoint, verify_checkpoint
from muonrl.training.run import REQUIRED
from tests.training.micro import (
    Watch,
    arguments,
    command_line,
    descendants,
    home,
    muonrl,
    needs_bwrap,
    process,
    read_until,
)

pytestmark = needs_bwrap
LONG = ("run.updates=5000", "run.checkpoint_every=2", "run.eval_samples=0")


def one_line(text):
    assert text.count("\n") == 1 and text.startswith("muonrl: ") and "Traceback" not in text, text
    return text


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The warm start is in the cache, so that the processes begin at once."""
    assert muonrl("warmstart", "--recipe", home() / "micro.toml") == 0


def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(tmp_path, capsys):
    run = tmp_path / "my run"
    with process(*arguments(run, *LONG)) as running:
        read_until(running, "success", 3)
        below = descendants(running.pid)
        assert any("bwrap" in command_line(pid) for pid in below)
        watch = Watch(below)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: everything in the foreground gets it
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err == ""
    assert watch.left(10) == []
    told = re.search(r"stopped; continue with: (muonrl resume '(.*)')\n\Z", out)
    assert told and told[2] == str(run)
    last = latest_checkpoint(run / "checkpoints")
    verify_checkpoint(last, REQUIRED)
    records = read_metrics(run)
    done = len(records)
    assert done >= 3 and last.name == f"step-{done:06d}"
    config = run / "config.toml"
    config.write_text(config.read_text().replace("updates = 5000", f"updates = {done + 1}"))
    assert muonrl("resume", run) == 0
    assert [r["update"] for r in read_metrics(run)] == list(range(1, done + 2))
    assert "stopped" not in capsys.readouterr().out


def test_ctrl_c_before_the_first_update(tmp_path):
    """The rollout process is still starting: it must not break off by itself, and there is nothing to save yet."""
    run = tmp_path / "run"
    with process(*arguments(run, *LONG)) as running:
        read_until(running, "starting sandboxes")
        watch = Watch(descendants(running.pid))
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
        left = watch.left(10)
    assert running.returncode == 130 and err == "" and left == []
    assert f"continue with: muonrl resume {run}" in out
    assert not (run / "checkpoints").exists() and read_metrics(run) == []


def test_a_killed_rollout_process_ends_the_run_with_one_line(tmp_path):
    run = tmp_path / "run"
    with process(*arguments(run, *LONG)) as running:
        read_until(running, "success", 3)
        below = descendants(running.pid)
        rollouts = next(pid for pid in below if "spawn_main" in command_line(pid))
        watch = Watch(below)
        os.kill(rollouts, signal.SIGKILL)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "the rollout process ended with code -9" in one_line(err)
    assert watch.left(10) == []
    verify_checkpoint(latest_checkpoint(run / "checkpoints"), REQUIRED)


def test_a_killed_trainer_takes_everything_with_it(tmp_path):
    with process(*arguments(tmp_path / "run", *LONG)) as running:
        read_until(running, "success", 3)
        below = descendants(running.pid)
        assert any("bwrap" in command_line(pid) for pid in below)
        watch = Watch(below)
        running.kill()
        running.wait()
        assert watch.left(20) == []
    verify_checkpoint(latest_checkpoint(tmp_path / "run" / "checkpoints"), REQUIRED)


def mounted(folder: Path, options: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a muonrl command where ``folder`` is a file system of its own, seen by it alone; skip where none can be mounted."""
    unshare = shutil.which("unshare")
    mount = f'mount -t tmpfs -o {options} muonrl-test "$0"'
    if (
        unshare is None
        or subprocess.run([unshare, "-m", "sh", "-c", mount, folder], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    # A copy of what was left comes out beside the folder, since the file system ends with the process.
    after = '"$@"; code=$?; cp -a "$0" "$0.left"; exit $code'
    return subprocess.run(
        [unshare, "-m", "sh", "-c", f"{mount} && {after}", folder, sys.executable, "-m", "muonrl", *command],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_read_only_run_folder_is_one_line(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    result = mounted(folder, "ro", *arguments(folder / "run"))
    assert result.returncode == 2
    assert "the file system is read-only" in one_line(result.stderr)
    assert list((tmp_path / "disk.left").iterdir()) == []


@pytest.mark.parametrize("size", ["140k", "500k"], ids=["weights", "checkpoint"])
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path, size):
    """The disk fills up at the first weights for the sampler, or at a checkpoint after the first."""
    folder = tmp_path / "disk"
    folder.mkdir()
    run = folder / "run"
    result = mounted(folder, f"size={size}", *arguments(run, *LONG))
    assert result.returncode == 2, result.stdout
    line = one_line(result.stderr)
    assert "disk is full" in line or "No space left" in line
    left = tmp_path / "disk.left"
    assert not [p for p in left.rglob("*") if p.name.startswith(".") or p.suffix in (".part", ".partial")]
    for checkpoint in left.glob("run/checkpoints/*"):
        verify_checkpoint(checkpoint, REQUIRED)
    if (left / "run" / "metrics.jsonl").exists():
        assert (left / "run" / "metrics.jsonl").read_text()[-1:] in ("", "\n")

"""Checkpoints are whole or absent, damage is named, and optimizer states survive exactly."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muonrl.errors import CheckpointError, MuonrlError
from muonrl.training import checkpoint
from muonrl.training.checkpoint import (
    latest_checkpoint,
    load_optimizer,
    optimizer_from_tensors,
    optimizer_to_tensors,
    prune,
    read_json,
    save_checkpoint,
    save_optimizer,
    verify_checkpoint,
    write_json,
)


def writer(text="one"):
    def write(folder: Path):
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(b"\0" * 1000 + text.encode())
        write_json(folder / "tracker.json", {"text": text})

    return write


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_a_checkpoint_is_written_described_and_found(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    assert latest_checkpoint(root) is None
    for step in (20, 3, 1_000_000):
        assert save_checkpoint(root, step, writer()).name == f"step-{step:06d}"
    assert names(root) == ["step-000003", "step-000020", "step-1000000"]
    latest = latest_checkpoint(root)
    assert latest == root / "step-1000000"
    manifest = verify_checkpoint(latest, require=["model/weights.bin", "tracker.json"])
    assert manifest["step"] == 1_000_000
    assert manifest["files"]["model/weights.bin"]["bytes"] == 1003
    assert set(manifest["files"]) == {"model/weights.bin", "tracker.json"}


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, 5, writer("one"))
    path = save_checkpoint(tmp_path, 5, writer("two"))
    assert read_json(path / "tracker.json") == {"text": "two"}
    verify_checkpoint(path)
    assert names(tmp_path) == ["step-000005"]


def damage_missing(path):
    (path / "model" / "weights.bin").unlink()


def damage_bit(path):
    data = bytearray((path / "model" / "weights.bin").read_bytes())
    data[500] ^= 1
    (path / "model" / "weights.bin").write_bytes(data)


def damage_length(path):
    with (path / "tracker.json").open("a") as file:
        file.write(" ")


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


def damage_escape(path):
    manifest = read_json(path / "manifest.json")
    manifest["files"]["../x"] = manifest["files"]["tracker.json"]
    write_json(path / "manifest.json", manifest)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (damage_missing, "model/weights.bin is missing"),
        (damage_bit, "model/weights.bin does not match manifest.json"),
        (damage_length, "tracker.json does not match"),
        (damage_manifest, "manifest.json is no valid JSON"),
        (damage_escape, "names ../x, outside"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text('{"format": 9, "files": {}}'), "not of format 1"),
        (lambda path: (path / "manifest.json").write_text("[]"), "not of format 1"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": 1, "files": {"a": {}}}'),
            "lacks sizes",
        ),
    ],
)
def test_damage_is_named(tmp_path, harm, text):
    path = save_checkpoint(tmp_path, 1, writer())
    harm(path)
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    assert text in str(caught.value) and str(path) in str(caught.value)


def test_missing_checkpoint_and_missing_component(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_checkpoint(tmp_path / "step-000009")
    path = save_checkpoint(tmp_path, 1, writer())
    with pytest.raises(CheckpointError, match=r"optimizer\.json, store\.json is not part of it"):
        verify_checkpoint(path, require=["store.json", "tracker.json", "optimizer.json"])


def fills_the_disk(folder):
    writer("half")(folder)
    with Path("/dev/full").open("w") as full:
        full.write("x" * 100_000)


def safetensors_without_folder(folder):
    save_file({"a": torch.zeros(2)}, folder / "absent" / "a.safetensors")


@pytest.mark.parametrize(
    ("write", "text"),
    [(fills_the_disk, "No space left on device"), (safetensors_without_folder, "No such file or directory")],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, write, text):
    before = save_checkpoint(tmp_path, 1, writer("one"))
    with pytest.raises(MuonrlError) as caught:
        save_checkpoint(tmp_path, 1, write)
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert str(before) in str(caught.value)
    assert names(tmp_path) == ["step-000001"]
    verify_checkpoint(before)


def test_a_manifest_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def refuse(path, value):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkpoint, "write_json", refuse)
    with pytest.raises(MuonrlError, match="cannot write checkpoint .*step-000001: Read-only file system"):
        save_checkpoint(tmp_path, 1, lambda folder: (folder / "a").write_text("a"))
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MuonrlError, match="cannot write checkpoint"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, writer())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_writer_leaves_nothing(tmp_path, error):
    def write(folder):
        writer()(folder)
        raise error

    with pytest.raises(error):
        save_checkpoint(tmp_path, 1, write)
    assert names(tmp_path) == []


def test_a_failed_rename_keeps_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, writer("one"))
    real = Path.rename

    def rename(self, target):
        if self.name.startswith(".tmp-"):
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(MuonrlError, match="Input/output error"):
        save_checkpoint(tmp_path, 1, writer("two"))
    assert names(tmp_path) == ["step-000001"]
    assert read_json(path / "tracker.json") == {"text": "one"}


# Forks one writer after the other, each of which kills itself at a later call of the operating system than the one before.
KILLED = """
import os, signal, sys
from pathlib import Path
from muonrl.training import checkpoint

def save(root, at):
    calls = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call

    Path.rename, os.fsync = counted(Path.rename), counted(os.fsync)
    checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)
    checkpoint.save_checkpoint(root, 2, lambda folder: (folder / "a").write_text("new"))
    os._exit(0)

for root in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if child == 0:
        save(root, int(root.name))
    print(root.name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path):
    for at in range(1, 11):
        save_checkpoint(tmp_path / str(at), 2, lambda folder: (folder / "a").write_text("old"))
    output = subprocess.check_output([sys.executable, "-c", KILLED, str(tmp_path)], text=True)
    codes = {int(at): int(code) for at, code in (line.split() for line in output.splitlines())}
    # Three syncs, two renames, the sync of the parent, the deletion of the old folder: seven moments to die at.
    assert codes == {at: -signal.SIGKILL if at <= 7 else 0 for at in range(1, 11)}
    contents = {}
    for at in codes:
        latest = latest_checkpoint(tmp_path / str(at))
        verify_checkpoint(latest, require=["a"])
        assert names(tmp_path / str(at)) == ["step-000002"]
        contents[at] = (latest / "a").read_text()
    # Calls 4 and 5 are the renames: from the sixth on the new one is in place.
    assert contents == {at: "old" if at <= 5 else "new" for at in codes}


def test_only_regular_files_are_accepted(tmp_path):
    with pytest.raises(CheckpointError, match="link is no regular file"):
        save_checkpoint(tmp_path, 1, lambda folder: (folder / "link").symlink_to("/etc/passwd"))
    assert names(tmp_path) == []


def test_prune_keeps_the_last_and_the_protected(tmp_path):
    for step in (1, 2, 10, 11):
        save_checkpoint(tmp_path, step, writer())
    (tmp_path / "notes").mkdir()
    assert [p.name for p in prune(tmp_path, 2, protect=[1])] == ["step-000002"]
    assert names(tmp_path) == ["notes", "step-000001", "step-000010", "step-000011"]
    assert prune(tmp_path, 5) == [] and prune(tmp_path / "absent", 1) == []
    with pytest.raises(ValueError, match="keep = 0"):
        prune(tmp_path, 0)


def trained(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3, bias=False))
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.8, 0.9), amsgrad=True),
        lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=1e-3),
    ],
    ids=["adamw", "muon"],
)
def test_optimizer_state_round_trips_exactly(tmp_path, make):
    model, optimizer = trained(make)
    state = optimizer.state_dict()
    save_optimizer(tmp_path, state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["optimizer.json", "optimizer.safetensors"]
    restored = load_optimizer(tmp_path)
    assert_same(state, restored)
    fresh = make(model)
    fresh.load_state_dict(restored)
    assert_same(fresh.state_dict(), state)


def test_odd_values_round_trip_and_copies_are_independent():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state = {
        "state": {0: {"t": base.t(), "half": base.bfloat16(), "empty": torch.zeros(0, 3), "step": 7}},
        "nested": [(1, 2.5), [None, True], (), {"tensor": "a", ("k", 1): "v"}],
        "floats": (math.inf, -math.inf, math.nan, 0.1, -0.0),
        "shared": [base, base[1]],
    }
    tensors, skeleton = optimizer_to_tensors(state)
    restored = optimizer_from_tensors(tensors, json.loads(json.dumps(skeleton, allow_nan=False)))
    assert_same(state, restored)
    assert all(t.is_contiguous() for t in tensors.values())
    base.zero_()
    assert restored["shared"][0].sum() == 66


def test_what_cannot_be_saved_or_read_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="/param_groups/0/fn: a function cannot be saved"):
        optimizer_to_tensors({"param_groups": [{"fn": lambda: None}]})
    tensors, skeleton = optimizer_to_tensors({"state": {0: torch.ones(2)}})
    with pytest.raises(CheckpointError, match="tensor /state/0 is missing"):
        optimizer_from_tensors({}, skeleton)
    with pytest.raises(CheckpointError, match="is a list, expected a mapping"):
        optimizer_from_tensors({}, [])
    with pytest.raises(CheckpointError, match=r"optimizer\.json is missing"):
        load_optimizer(tmp_path)
    save_optimizer(tmp_path, {"state": tensors})
    os.truncate(tmp_path / "optimizer.safetensors", 9)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be read"):
        load_optimizer(tmp_path)

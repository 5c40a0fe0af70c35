"""The metrics file: durable, continued, readable after a crash."""

import errno
import json
import os

import numpy as np
import pytest

from muonrl.errors import MuonrlError
from muonrl.reporting.metrics import MetricsWriter, collapsed, read_metrics, series


def test_records_come_back_with_plain_types_and_the_ema(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"update": 1, "success": np.float32(0.5), "policy": (0, 1), "q": np.arange(2)})
        row = writer.write({"update": 2, "success": 0.8, "loss": float("nan"), "big": float("inf")})
    assert row["success_ema"] == pytest.approx(0.5 + (0.8 - 0.5) / 3)
    first, second = read_metrics(path)
    assert first == {"update": 1, "success": 0.5, "policy": [0, 1], "q": [0, 1], "success_ema": 0.5}
    assert second["loss"] is None and second["big"] is None


def test_each_line_is_on_the_disk_before_the_next_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"update": 1})
        writer.write({"update": 2})
    size = (tmp_path / "m.jsonl").stat().st_size
    assert synced == [size // 2, size]


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"update": 1, "success": 0.25})
    with path.open("a") as out:
        out.write('{"update": 2, "succ')
    assert [r["update"] for r in read_metrics(tmp_path)] == [1]
    with MetricsWriter(path) as writer:
        assert writer.write({"update": 2, "success": 0.55})["success_ema"] == pytest.approx(0.35)
    assert [r["update"] for r in read_metrics(path)] == [1, 2]


def test_resuming_drops_the_updates_that_are_done_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for update, success in ((1, 0.0), (2, 0.6), (3, 1.0)):
            writer.write({"update": update, "success": success})
    with MetricsWriter(path, keep_through=2) as writer:
        assert writer.write({"update": 3, "success": 0.2})["success_ema"] == pytest.approx(0.2)
    assert series(read_metrics(path), "success") == ([1, 2, 3], [0.0, 0.6, 0.2])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"update": 1}\nnonsense\n{"update": 3}\n', ":2: not a JSON line"),
        ('[1, 2]\n{"update": 2}\n', ":1: expected a JSON object, found list"),
        (b"\xff\xfe\n", "not UTF-8"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path, content, words):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MuonrlError, match=words) as caught:
        read_metrics(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(MuonrlError, match=r"metrics\.jsonl cannot be read: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_full_disk_is_one_clear_line_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"update": 1})

        def full(handle):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(MuonrlError, match="the disk is full"):
                writer.write({"update": 2})
        assert path.read_text() == '{"update":1}\n'
        writer.write({"update": 2})
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2]


def test_series_looks_into_groups_and_skips_what_is_missing():
    records = [
        {"update": 1, "groups": {"muon": {"lr": 1.0}}},
        {"update": 2, "groups": {}},
        {"update": 3, "groups": {"muon": {"lr": 3}}},
        {"update": 4, "groups": {"muon": {"lr": None}}},
    ]
    assert series(records, "groups.muon.lr") == ([1, 3], [1.0, 3.0])


def test_collapse_is_five_updates_below_half_of_the_peak():
    assert not collapsed([0.1, 0.4, 0.6, 0.5, 0.6])
    assert not collapsed([0.8] * 6 + [0.0] * 5)  # the EMA is below half for four of them
    assert collapsed([0.8] * 6 + [0.0] * 6)

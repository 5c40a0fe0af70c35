"""Writing in one piece, and what a user reads when a disk refuses."""

import errno
import os
from pathlib import Path

import pytest

from muonrl.errors import MuonrlError
from muonrl.reporting.files import write_atomic


def test_writes_text_and_bytes_and_makes_the_folder(tmp_path):
    write_atomic(tmp_path / "a" / "b.txt", "grün")
    write_atomic(tmp_path / "a" / "b.bin", b"\x00\x01")
    assert (tmp_path / "a" / "b.txt").read_text(encoding="utf-8") == "grün"
    assert (tmp_path / "a" / "b.bin").read_bytes() == b"\x00\x01"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_refusal_is_one_line_and_the_old_file_stays(tmp_path, monkeypatch, number, words):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def refuse(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(MuonrlError, match=words) as caught:
        write_atomic(path, "new")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def crash(self, target):
        assert self.read_text() == "new" and target == path
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(MuonrlError, match="cannot be written"):
        write_atomic(tmp_path / "run" / "summary.json", "{}")

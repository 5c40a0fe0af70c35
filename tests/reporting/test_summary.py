"""summary.json."""

import json

import pytest

from muonrl.errors import MuonrlError
from muonrl.reporting.summary import clock, read_summary, summarise, summary_table, write_summary


def test_means_totals_and_extra_fields(tmp_path, make_records):
    records = make_records(24)
    written = write_summary(
        tmp_path, records, heldout_before=0.2, heldout_after=0.5, recipe="tiny", seed=3, optimizer="muon"
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == written == read_summary(tmp_path)
    success = [r["success"] for r in records]
    assert written["success_first10"] == pytest.approx(sum(success[:10]) / 10, abs=1e-4)
    assert written["success_last10"] == pytest.approx(sum(success[-10:]) / 10, abs=1e-4)
    assert (written["heldout_before"], written["heldout_after"]) == (0.2, 0.5)
    assert (written["updates"], written["wall_s"], written["peak_rss_mb"]) == (24, 240.0, 1524.0)
    assert (written["gradings"], written["gradings_cached"], written["drops"]) == (
        960,
        192,
        {"sandbox_died": 3},
    )
    assert (written["recipe"], written["seed"], written["optimizer"]) == ("tiny", 3, "muon")


def test_what_the_records_lack_is_null():
    empty = summarise([])
    assert empty["success_first10"] is None and empty["wall_s"] is None and empty["updates"] == 0
    assert summarise([{"update": 1, "success": 0.5}])["peak_rss_mb"] is None
    assert summarise([{"update": 1}], peak_rss_mb=7.0)["peak_rss_mb"] == 7.0


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not valid JSON"), ("[]", "expected a JSON object"), (None, "cannot be read")],
)
def test_a_damaged_summary_is_one_clear_line(tmp_path, content, words):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(MuonrlError, match=words) as caught:
        read_summary(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_table_at_the_end_of_a_run():
    summary = {"success_first10": 0.25, "success_last10": 0.625, "heldout_before": 0.2, "heldout_after": None}
    table = summary_table(summary | {"updates": 60, "wall_s": 605.0, "peak_rss_mb": 2100.4})
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "training success, first -> last ten updates 25.0 % -> 62.5 % (+37.5)",
        "updates 60",
        "time 10:05",
        "peak memory 2100 MB",
    ]
    assert summary_table({}) == ""


def test_clock():
    assert [clock(s) for s in (None, 0.4, 59.6, 3725.0)] == ["?", "0:00", "1:00", "1:02:05"]

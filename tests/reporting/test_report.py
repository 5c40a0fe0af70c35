"""The report page: complete, self-contained, honest about what is missing."""

import json
import re
from html.parser import HTMLParser

import pytest

from muonrl.config import load_recipe, to_toml
from muonrl.errors import MuonrlError
from muonrl.reporting.metrics import MetricsWriter
from muonrl.reporting.report import PANELS, load_run, make_report
from muonrl.reporting.summary import write_summary

VOID = {"meta", "use", "path", "rect", "circle", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a browser would load and show."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.words, self.svgs = [], [], [], 0
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.svgs += tag == "svg"
        self.links += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def make_run(tmp_path, make_records):
    def make(name, recipe="tiny", seed=0, records=None):
        folder = tmp_path / name
        with MetricsWriter(folder / "metrics.jsonl") as writer:
            for record in make_records(24, seed) if records is None else records:
                writer.write(record)
        (folder / "config.toml").write_text(to_toml(load_recipe(recipe, seed=seed)))
        (folder / "provenance.json").write_text(json.dumps({"git": {"commit": "c0ffee"}, "note": "<b>&"}))
        write_summary(folder, writer.records, heldout_before=0.2, heldout_after=0.55)
        return folder

    return make


def test_the_page_holds_every_plot_and_table_and_loads_nothing(make_run):
    folder = make_run("tiny-0")
    path = make_report(folder)
    assert path == folder / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.links == []
    keys = [key for _, _, lines in PANELS for _, key in lines]
    assert len(set(keys)) == len(keys)
    shown = [
        title
        for title, _, _ in PANELS
        if title.split()[0] not in ("Newton-Schulz", "Rollouts", "Turns", "Outcomes")
    ]
    assert page.svgs == 1 + len(shown)
    for words in (
        *shown,
        "20.0 % → 55.0 %",
        "c0ffee",
        "optimizer.lr_muon",
        "<b>&",
        "sandbox_died 3",
        "75.0 %",
    ):
        assert words in page.text, words


def test_ids_of_different_plots_do_not_meet(make_run):
    text = make_report(make_run("tiny-0")).read_text(encoding="utf-8")
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', svg)) for svg in text.split("<svg")[1:]]
    assert all(clips) and sum(map(len, clips)) == len(set().union(*clips))


def test_runs_are_compared_side_by_side(make_run):
    first, second = make_run("muon"), make_run("adam", "tiny_adam", seed=1)
    page = Page(make_report(first, [second]).read_text(encoding="utf-8"))
    for words in (
        "Runs compared",
        "muon",
        "adam",
        "tiny_adam",
        "Configuration of adam",
        "Gradient norm: Muon",
    ):
        assert words in page.text, words
    assert not (second / "report.html").exists()


def test_an_unfinished_run_with_few_metrics_still_has_a_page(make_run):
    folder = make_run("young", records=[{"update": 1, "success": 0.5}, {"update": 2, "success": 0.25}])
    for name in ("summary.json", "config.toml", "provenance.json"):
        (folder / name).unlink()
    page = Page(make_report(folder).read_text(encoding="utf-8"))
    assert page.svgs == 1 and "2 updates" in page.text
    assert load_run(folder).summary["success_last10"] == 0.375


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "config.toml").write_text("x = ["), "config.toml: not valid TOML"),
        (lambda run: (run / "provenance.json").write_text("{"), "provenance.json: not valid JSON"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no finished update yet"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read"),
        (lambda run: (run / "report.html").mkdir(), "report.html cannot be written"),
    ],
)
def test_a_damaged_run_is_one_clear_line(make_run, damage, words):
    folder = make_run("tiny-0", records=[{"update": 1, "success": 0.5}])
    damage(folder)
    with pytest.raises(MuonrlError, match=words) as caught:
        make_report(folder)
    assert "\n" not in str(caught.value)


def test_no_such_run(tmp_path):
    with pytest.raises(MuonrlError, match="no such folder"):
        make_report(tmp_path / "nowhere")

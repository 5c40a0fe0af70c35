"""Reports: JSON round trip, ratios on equal subsets, extrapolations that say so, the plot."""

import dataclasses
import json

import pytest

from benchmarks.cases import describe, flops_of
from benchmarks.entrant import OURS
from benchmarks.report import plot, table, to_text, write_section
from benchmarks.results import CaseResult, Gate, Measurement, Report, load, save

WHOLE = ((64, 32, 8), (32, 32, 4))
HALF = ((64, 32, 4), (32, 32, 2))
ONE = ((32, 32, 1),)


def measurement(name, shapes, samples, group=0, **changes):
    made = Measurement(
        name, shapes, describe(shapes), flops_of(shapes), samples, 1 << 20, 2e9, 4e8, 34, "float32", group
    )
    return dataclasses.replace(made, **changes)


def result(*measurements):
    return CaseResult("small model", "a title", WHOLE, flops_of(WHOLE), measurements)


def report(*cases):
    machine = {
        "processor": "a CPU",
        "threads": 2,
        "cpu_capability": "AVX2",
        "isa_environment": {"ATEN_CPU_CAPABILITY": "avx2"},
        "versions": {"torch": "2.13.0"},
        "commit": "abc",
        "date": "2026-01-01",
    }
    gates = (
        Gate(OURS, "defaults", "float32", True, 1e-6, 1e-4),
        Gate("wrong", "a peer", "bfloat16", False, 0.5, 0.1, "error 5e-01"),
    )
    return Report(
        "Muon step times",
        "one optimizer step",
        "run muon",
        machine,
        {"float32": 1e11, "bfloat16": 4e11},
        1e10,
        gates,
        {"dion": "not installed"},
        cases,
        ("a note",),
    )


def test_a_report_survives_json(tmp_path):
    written = report(
        result(measurement(OURS, HALF, (1.0, 2.0)), measurement("torch", HALF, (3.0, 4.0), memory=None)),
        CaseResult(
            "big", "too big", WHOLE, flops_of(WHOLE), skipped="no time", left_out={"torch": "too slow"}
        ),
    )
    save(written, tmp_path / "muon.json")
    assert load(tmp_path / "muon.json") == written


def test_another_format_is_refused(tmp_path):
    save(report(), tmp_path / "muon.json")
    data = json.loads((tmp_path / "muon.json").read_text())
    (tmp_path / "muon.json").write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version reads 2"):
        load(tmp_path / "muon.json")


def test_ratios_use_exactly_the_same_matrices_and_rounds():
    ours, ours_small = measurement(OURS, WHOLE, (1.0, 1.0)), measurement(OURS, ONE, (0.1, 0.2), group=1)
    fast, slow = measurement("torch fp32", WHOLE, (2.0, 2.0)), measurement("torch", ONE, (4.0, 8.0), group=1)
    case = result(ours, fast, ours_small, slow)
    assert case.ratio(fast).median == 2.0
    assert case.ratio(slow).median == 40.0, "not 4.0 / 1.0: another subset"
    assert case.ratio(ours_small).median == 1.0
    lonely = measurement("torch", HALF, (4.0, 8.0), group=0)
    assert result(ours, lonely).ratio(lonely) is None
    other_rounds = measurement("torch", WHOLE, (4.0, 8.0), group=1)
    assert result(ours, other_rounds).ratio(other_rounds) is None


def test_equal_precision_is_compared_where_ours_iterates_in_both():
    ours = measurement(OURS, WHOLE, (1.0, 1.0), compute="bfloat16")
    ours_fp32, torch_fp32 = (
        measurement(n, WHOLE, t) for n, t in (("muonrl fp32", (2.0, 2.0)), ("torch fp32", (5.0, 5.0)))
    )
    case = result(ours, ours_fp32, torch_fp32)
    assert case.ratio(torch_fp32, "muonrl fp32").median == 2.5 and case.ratio(torch_fp32).median == 5.0
    assert "x ours fp32" in to_text(report(case)) and "x ours fp32" not in to_text(report(result(ours)))


def test_an_extrapolation_goes_with_operations_and_says_so():
    half, one = measurement(OURS, HALF, (1.0, 1.0, 9.0)), measurement(OURS, ONE, (0.1,), group=1)
    case = result(half, one)
    assert case.extrapolated(half) == 2.0
    assert case.extrapolated(one) is None, "a shape is missing"
    text = to_text(report(case))
    assert "~2 s extrapolated" in text
    assert "a subset with 50 % of the operations: (64, 32) x 4, (32, 32) x 2" in text
    whole = to_text(report(result(measurement(OURS, WHOLE, (1.0,)))))
    assert "extrapolated" not in whole and "| measured" in whole.replace("  ", "").replace(
        "|measured", "| measured"
    )


def test_shares_are_of_the_measured_rates():
    r = report()
    m = measurement(OURS, WHOLE, (0.5, 0.04))
    assert r.gemm_share(m) == pytest.approx(2e9 / 0.04 / 1e11)
    assert r.copy_share(m) == pytest.approx(4e8 / 0.04 / 1e10)


def test_the_text_names_what_failed_and_what_is_missing():
    text = to_text(
        report(
            CaseResult("big", "too big", WHOLE, flops_of(WHOLE), skipped="no time", left_out={"x": "died"})
        )
    )
    for part in (
        "dion: unavailable, not installed",
        "error 5e-01",
        "Skipped: no time.",
        "x: not measured here, died",
    ):
        assert part in text
    assert "ATEN_CPU_CAPABILITY=avx2" in text and "imitates a CPU without bf16" in text


def test_a_table_is_markdown():
    lines = table(("name", "n"), [("a", "1"), ("bcdefg", "22")]).splitlines()
    assert lines == ["| name   |  n |", "|--------|---:|", "| a      |  1 |", "| bcdefg | 22 |"]


def test_the_plot_is_a_picture(tmp_path):
    case = result(measurement(OURS, WHOLE, (1.0, 1.1)), measurement("torch", WHOLE, (3.0, 3.5)))
    plot(
        report(case, CaseResult("big", "t", WHOLE, flops_of(WHOLE), skipped="no time")), tmp_path / "muon.png"
    )
    assert (tmp_path / "muon.png").read_bytes().startswith(b"\x89PNG")


def test_a_section_of_a_page_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- audit -->\nold\n<!-- /audit -->\nafter\n<!-- estimate -->\n<!-- /estimate -->\n"
    )
    write_section(page, "audit", "new\nlines\n")
    write_section(page, "estimate", "~1 ms")
    assert page.read_text() == (
        "before\n<!-- audit -->\nnew\nlines\n<!-- /audit -->\nafter\n<!-- estimate -->\n~1 ms\n<!-- /estimate -->\n"
    )
    with pytest.raises(ValueError, match="has none"):
        write_section(page, "results", "")

"""A report as text tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.entrant import OURS
from benchmarks.implementations import OURS_FP32
from benchmarks.measure import Spread
from benchmarks.results import CaseResult, Measurement, Report

__all__ = ["plot", "table", "to_text", "write_section"]

_UNITS: Final = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))
_HEAD: Final = (
    "implementation",
    "computes in",
    "median",
    "quartiles",
    "shortest",
    "rounds",
    "x ours",
    "x ours fp32",
    "GFLOP",
    "GB",
    "launches",
    "of GEMM",
    "floor",
    "of copy",
    "extra memory",
    "whole case",
)
_OURS_COLOUR, _OTHER_COLOUR, _INK = "#2a9d5c", "#3b6fb6", "#1f2933"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width as a Markdown table: the first is flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    )
    return "\n".join([line(head), rule, *(line(row) for row in rows)])


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between <!-- name --> and <!-- /name --> in a Markdown file.

    Raises:
        ValueError: the file has no such section.
    """
    before, opening, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, closing, after = rest.partition(f"<!-- /{name} -->")
    if not opening or not closing:
        raise ValueError(
            f"--write needs a file with a section <!-- {name} --> ... <!-- /{name} -->; {path} has none"
        )
    path.write_text(f"{before}{opening}{text.strip()}\n{closing}{after}", encoding="utf-8")


def _without_empty(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that no row has anything in."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _time(seconds: float) -> str:
    unit, factor = next((unit, factor) for limit, unit, factor in _UNITS if seconds >= limit)
    return f"{seconds * factor:.3g} {unit}"


def _ratio(value: Spread | None) -> str:
    return "" if value is None else f"{value.median:.2f} ({value.lower:.2f}-{value.upper:.2f})"


def _row(report: Report, case: CaseResult, m: Measurement) -> tuple[str, ...]:
    s = m.seconds
    whole = case.extrapolated(m)
    covered = m.work == case.work
    return (
        m.implementation,
        m.compute,
        _time(s.median),
        f"{_time(s.lower)}-{_time(s.upper)}",
        _time(s.minimum),
        str(s.count),
        _ratio(case.ratio(m)),
        _ratio(case.ratio(m, OURS_FP32)) if m.compute == "float32" else "",
        f"{m.flops * 1e-9:.4g}" if m.flops else "",
        f"{m.nbytes * 1e-9:.3g}",
        f"{m.launches:.0f}" if m.launches else "",
        f"{report.gemm_share(m):.0%}" if m.flops else "",
        f"{report.floor_share(m):.0%}" if m.floor else "",
        f"{report.copy_share(m):.0%}",
        "" if m.memory is None else f"{m.memory / 2**20:.0f} MiB",
        "measured" if covered else "" if whole is None else f"~{_time(whole)} extrapolated",
    )


def _case_text(report: Report, case: CaseResult) -> Iterator[str]:
    yield f"\n## {case.case}: {case.title}\n"
    if case.skipped:
        yield f"Skipped: {case.skipped}."
    for group in sorted({m.group for m in case.measurements}):
        mine = [m for m in case.measurements if m.group == group]
        share = mine[0].work / case.work
        what = "the whole case" if share == 1.0 else f"a subset with {100.0 * share:.3g} % of the operations"
        yield f"Measured on {what}: {mine[0].what}.\n"
        yield _without_empty(_HEAD, [_row(report, case, m) for m in mine]) + "\n"
    for name, reason in case.left_out.items():
        yield f"{name}: not measured here, {reason}"


def _machine_text(report: Report) -> Iterator[str]:
    machine = report.machine
    yield f"Command: {report.command}"
    yield f"Machine: {machine.get('gpu', machine['processor'])}, {machine['threads']} threads, {machine['cpu_capability']}"
    if machine["isa_environment"]:
        listed = ", ".join(f"{key}={value}" for key, value in machine["isa_environment"].items())
        yield f"Instruction sets restricted by {listed}: this imitates a CPU without bf16 instructions."
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield f"Commit {machine['commit']}, {machine['date']}"
    rates = ", ".join(f"{name} {rate * 1e-9:.4g} GFLOP/s" for name, rate in report.gemm.items())
    yield f"Ceilings, the better of two measurements before and after: {rates}, copy {report.copy * 1e-9:.3g} GB/s"


def to_text(report: Report) -> str:
    """The whole report as Markdown."""
    lines = [f"# {report.title}\n", *_machine_text(report), *(f"Note: {note}." for note in report.notes)]
    lines.append("\n## Correctness gate\n")
    rows = [
        (g.name, g.compute, f"{g.error:.2e}", f"{g.bound:.2e}", "passed" if g.passed else g.reason, g.note)
        for g in report.gates
    ]
    lines.append(table(("implementation", "computes in", "error", "bound", "verdict", "how"), rows))
    lines += [f"{name}: unavailable, {reason}" for name, reason in report.unavailable.items()]
    for case in report.cases:
        lines += _case_text(report, case)
    return "\n".join(lines) + "\n"


def _panel(axes: Any, case: CaseResult) -> None:
    best = [m for m in case.measurements if case.ratio(m) is not None and m.implementation != OURS]
    spreads = [case.ratio(m) for m in best]
    shown = sorted(
        ((s.median, s.lower, s.upper, m.implementation) for m, s in zip(best, spreads, strict=True) if s),
        reverse=True,
    )
    names = [*(name for *_, name in shown), OURS]
    values = [*(median for median, *_ in shown), 1.0]
    errors = [[m - lo for m, lo, *_ in shown] + [0.0], [hi - m for m, _, hi, _ in shown] + [0.0]]
    colours = [_OTHER_COLOUR] * len(shown) + [_OURS_COLOUR]
    axes.barh(names, values, xerr=errors, color=colours, ecolor=_INK, height=0.7)
    axes.set_xscale("log")
    axes.axvline(1.0, color=_INK, linewidth=0.8)
    for index, value in enumerate(values):
        axes.annotate(
            f"{value:.2f}", (value, index), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.margins(x=0.15)
    axes.set_title(case.case, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def plot(report: Report, path: Path) -> None:
    """Time of each implementation over ours, one panel a case, with quartiles; needs matplotlib, opens no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [case for case in report.cases if case.measurements]
    bars = max((len(case.measurements) for case in cases), default=1)
    figure = Figure(figsize=(9.0, max(2.0, len(cases) * (0.9 + 0.3 * bars))), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max(1, len(cases)), 1, squeeze=False)
    for axes, case in zip(grid[:, 0], cases, strict=False):
        _panel(axes, case)
    grid[-1, 0].set_xlabel(f"time of {report.call}, as a multiple of ours in the same rounds")
    machine = report.machine
    figure.suptitle(f"{machine.get('gpu', machine['processor'])}, {machine['threads']} threads", fontsize=9)
    figure.savefig(path, dpi=130)

"""summary.json: what a run came to, in a few numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muonrl.errors import MuonrlError
from muonrl.reporting.files import read_text, write_atomic
from muonrl.reporting.metrics import series

SUMMARY = "summary.json"
WINDOW = 10


def summarise(records: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """The summary of a run's records; ``extra`` adds fields and takes precedence.

    ``success_first10`` and ``success_last10`` are means over the first and last ten updates, of the share of rollouts
    with reward 1. Totals are sums over all updates; ``peak_rss_mb`` is the largest that was seen. A field that the
    records say nothing about is null.
    """

    def values(key: str) -> list[float]:
        return series(records, key)[1]

    def total(key: str) -> float:
        return sum(values(key))

    success = values("success")
    wall, memory = values("wall_s"), values("rss_mb")
    drops: dict[str, int] = {}
    for record in records:
        for reason, count in (record.get("drops") or {}).items():
            drops[reason] = drops.get(reason, 0) + int(count)
    summary: dict[str, Any] = {
        "success_first10": _mean(success[:WINDOW]),
        "success_last10": _mean(success[-WINDOW:]),
        "heldout_before": None,
        "heldout_after": None,
        "updates": len(records),
        "wall_s": round(wall[-1], 1) if wall else None,
        "peak_rss_mb": round(max(memory), 1) if memory else None,
        "rollouts": int(total("rollouts")),
        "tokens": int(total("tokens_total")),
        "gradings": int(total("gradings")),
        "gradings_cached": int(total("gradings_cached")),
        "grade_cpu_s": round(total("grade_s"), 1),
        "sandboxes": int(total("sandboxes")),
        "staleness_mean": _mean(values("staleness_mean")),
        "drops": drops,
    }
    return summary | extra


def write_summary(run_dir: Path, records: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """Write ``run_dir``/summary.json in one piece and return what stands in it."""
    summary = summarise(records, **extra)
    write_atomic(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of a finished run. Raises MuonrlError, one line, where it is missing or unreadable."""
    path = run_dir / SUMMARY
    try:
        summary = json.loads(read_text(path))
    except json.JSONDecodeError as fault:
        raise MuonrlError(f"{path}: not valid JSON: {fault.msg}") from fault
    if not isinstance(summary, dict):
        raise MuonrlError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    return summary


def summary_table(summary: Mapping[str, Any]) -> str:
    """The end of a run as a few lines of text; what the summary does not know is left out."""
    rows: list[tuple[str, str]] = []
    for name, before, after in (
        ("training success, first -> last ten updates", "success_first10", "success_last10"),
        ("held-out pass@1, before -> after", "heldout_before", "heldout_after"),
    ):
        old, new = summary.get(before), summary.get(after)
        if old is not None and new is not None:
            rows.append((name, f"{100 * old:5.1f} % -> {100 * new:5.1f} %   ({100 * (new - old):+.1f})"))
    for name, key, form in (
        ("updates", "updates", lambda value: f"{value:5d}"),
        ("time", "wall_s", lambda value: f"{clock(value):>5}"),
        ("peak memory", "peak_rss_mb", lambda value: f"{value:5.0f} MB"),
    ):
        if summary.get(key) is not None:
            rows.append((name, form(summary[key])))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def clock(seconds: float | None) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``; ``?`` where they are not known."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None

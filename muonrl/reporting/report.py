"""report.html: a run, or several side by side, as one page that needs nothing but itself."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from muonrl.errors import MuonrlError
from muonrl.reporting.files import read_text, write_atomic
from muonrl.reporting.metrics import Record, read_metrics, series
from muonrl.reporting.plots import (
    FULL,
    OTHERS,
    Curve,
    curve_colors,
    is_full_recipe,
    series_figure,
    success_figure,
    svg_text,
)
from muonrl.reporting.summary import SUMMARY, read_summary, summarise

REPORT = "report.html"
Unit = Literal["number", "share", "log"]


@dataclass(frozen=True)
class Run:
    """What a run folder holds; parts that are not there yet (an unfinished run) are empty."""

    folder: Path
    records: list[Record]
    config: dict[str, Any]
    provenance: dict[str, Any]
    summary: dict[str, Any]

    @property
    def label(self) -> str:
        """The folder's name: what the run is called in plots and tables."""
        return self.folder.resolve().name

    @property
    def curve(self) -> Curve:
        """The run as a line of a success plot."""
        return Curve(self.label, self.records, "full" if is_full_recipe(self.config) else "auto")


# (title, unit, ((label, key), ...)): one panel each; a panel without data is left out.
PANELS: tuple[tuple[str, Unit, tuple[tuple[str, str], ...]], ...] = (
    ("Entropy of the policy (nats a token)", "number", (("entropy", "entropy"),)),
    ("Loss", "number", (("loss", "loss"),)),
    ("KL, k3 estimate", "log", (("θ | old", "k3_theta_old"), ("old | rollout", "k3_old_rollout"))),
    ("Clipped tokens", "share", (("low", "clip_low"), ("high", "clip_high"))),
    ("TIS: truncated tokens", "share", (("truncated", "tis_truncated"),)),
    ("TIS: mean weight", "number", (("mean weight", "tis_mean"),)),
    ("Effective sample size / tokens", "share", (("ESS", "ess"),)),
    ("Mean staleness (policy versions)", "number", (("staleness", "staleness_mean"),)),
    ("Gradient norm", "log", (("Muon", "groups.muon.grad_norm"), ("AdamW", "groups.adamw.grad_norm"))),
    ("Update RMS", "log", (("Muon", "groups.muon.update_rms"), ("AdamW", "groups.adamw.update_rms"))),
    (
        "Spectral norm of the update",
        "log",
        (("Muon", "groups.muon.update_spectral"), ("AdamW", "groups.adamw.update_spectral")),
    ),
    ("Newton-Schulz residual", "number", (("residual", "ns_residual"),)),
    ("Idle share of the time", "share", (("sampler", "idle_sampler"), ("learner", "idle_learner"))),
    ("Seconds an update", "number", (("wall", "update_s"), ("grading, CPU", "grade_s"), ("sync", "sync_s"))),
    ("Tokens a second", "number", (("tokens/s", "tokens_per_s"),)),
    (
        "Rollouts with faults",
        "share",
        (("tool error", "tool_error_rate"), ("too long", "length_rate"), ("cut off", "truncation_rate")),
    ),
    ("Turns an episode", "number", (("turns", "turns_mean"),)),
    ("Outcomes that a value rests on", "number", (("N_eff", "tracker_n_eff"),)),
)


def load_run(folder: Path) -> Run:
    """Read a run folder. Raises MuonrlError, one line, where it is no run or a file in it is damaged."""
    if not folder.is_dir():
        raise MuonrlError(f"{folder} is no run folder: there is no such folder")
    records = read_metrics(folder)
    summary = read_summary(folder) if (folder / SUMMARY).exists() else summarise(records)
    return Run(folder, records, _read_config(folder), _read_provenance(folder), summary)


def make_report(run_dir: Path, compare: Sequence[Path] = ()) -> Path:
    """Write ``run_dir``/report.html and return its path; the runs in ``compare`` are drawn beside it.

    Raises MuonrlError, one line, where a run cannot be read, has no update yet, or the page cannot be written.
    """
    runs = [load_run(folder) for folder in (run_dir, *compare)]
    for run in runs:
        if not run.records:
            raise MuonrlError(f"{run.folder} has no finished update yet: nothing to report")
    path = run_dir / REPORT
    write_atomic(path, render(runs))
    return path


def render(runs: Sequence[Run]) -> str:
    """The page as HTML text."""
    main = runs[0]
    title = "Runs compared" if len(runs) > 1 else f"Run {main.label}"
    curves = [run.curve for run in runs]
    style = files("muonrl.reporting").joinpath("report.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='lead'>{escape(_lead(main))}</p>" if len(runs) == 1 else "",
        _cards(main.summary) if len(runs) == 1 else _comparison(runs),
        f"<figure class='wide'>{svg_text(success_figure(curves), 'success')}</figure>",
        f"<div class='grid'>{''.join(_panels(runs))}</div>",
        _staleness(runs),
        *(_tables(run, with_name=len(runs) > 1) for run in runs),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)} · muonrl</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _lead(run: Run) -> str:
    said = run.summary
    parts = [f"{run.config.get('run', {}).get('recipe', 'recipe unknown')}"]
    seed = run.config.get("run", {}).get("seed")
    if seed is not None:
        parts.append(f"seed {seed}")
    parts.append(f"{said.get('updates', len(run.records))} updates")
    if said.get("wall_s"):
        parts.append(f"{said['wall_s'] / 60:.1f} minutes")
    return ", ".join(parts)


def _cards(summary: Mapping[str, Any]) -> str:
    cards: list[str] = []
    for name, before, after in (
        ("training success, first → last ten updates", "success_first10", "success_last10"),
        ("held-out pass@1, before → after", "heldout_before", "heldout_after"),
    ):
        if _is_number(summary.get(before)) and _is_number(summary.get(after)):
            cards.append(_card(f"{_percent(summary[before])} → {_percent(summary[after])}", name))
    if _is_number(summary.get("staleness_mean")):
        cards.append(_card(f"{summary['staleness_mean']:.2f}", "mean staleness (policy versions)"))
    if _is_number(summary.get("peak_rss_mb")):
        cards.append(_card(f"{summary['peak_rss_mb']:,.0f} MB", "peak memory"))
    if summary.get("gradings"):
        cached = summary.get("gradings_cached", 0)
        cards.append(_card(f"{summary['gradings']:,}", f"gradings, of which {cached:,} from the cache"))
    if summary.get("drops"):
        reasons = ", ".join(f"{k} {v}" for k, v in summary["drops"].items())
        cards.append(_card(str(sum(summary["drops"].values())), f"rollouts dropped: {reasons}"))
    return f"<div class='cards'>{''.join(cards)}</div>"


def _card(figure: str, name: str) -> str:
    return f"<div class='card'><b>{escape(figure)}</b><span>{escape(name)}</span></div>"


def _comparison(runs: Sequence[Run]) -> str:
    heads = (
        ("run", ""),
        ("recipe", ""),
        ("seed", ""),
        ("first 10", "success_first10"),
        ("last 10", "success_last10"),
        ("held-out before", "heldout_before"),
        ("held-out after", "heldout_after"),
    )
    rows = []
    for run in runs:
        settings = run.config.get("run", {})
        cells = [run.label, str(settings.get("recipe", "")), str(settings.get("seed", ""))]
        for _, key in heads[3:]:
            cells.append(_percent(run.summary[key]) if _is_number(run.summary.get(key)) else "")
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in heads)
    return f"<table class='compare'><tr>{head}</tr>{''.join(rows)}</table>"


def _panels(runs: Sequence[Run]) -> Iterable[str]:
    """A panel for each quantity of one run; with several runs, a panel for each line of it, a colour a run."""
    colors = [FULL, *OTHERS] if len(runs) == 1 else curve_colors([run.curve for run in runs])
    for title, unit, keys in PANELS:
        if len(runs) == 1:
            groups = [(title, [(label, key, runs[0]) for label, key in keys])]
        else:
            groups = [
                (title if len(keys) == 1 else f"{title}: {label}", [(run.label, key, run) for run in runs])
                for label, key in keys
            ]
        for name, wanted in groups:
            lines = [(label, *series(run.records, key)) for label, key, run in wanted]
            if any(updates for _, updates, _ in lines):
                figure = series_figure(lines, name, unit=unit, colors=colors)
                yield f"<figure>{svg_text(figure, name)}</figure>"


def _staleness(runs: Sequence[Run]) -> str:
    """The staleness histogram over the whole run: bars of the share of action tokens."""
    blocks: list[str] = []
    for run in runs:
        shares: dict[str, float] = {}
        weight = 0.0
        for record in run.records:
            tokens = float(record.get("tokens_action") or 1.0)
            if record.get("staleness"):
                weight += tokens
                for age, share in record["staleness"].items():
                    shares[age] = shares.get(age, 0.0) + tokens * float(share)
        if not weight:
            continue
        rows = "".join(
            f"<tr><td>{escape(age)}</td><td class='bar'><i style='width:{100 * total / weight:.2f}%'></i></td>"
            f"<td>{_percent(total / weight)}</td></tr>"
            for age, total in sorted(shares.items(), key=lambda item: (len(item[0]), item[0]))
        )
        name = f" ({escape(run.label)})" if len(runs) > 1 else ""
        blocks.append(f"<h2>Staleness of the trained tokens{name}</h2><table class='bars'>{rows}</table>")
    return "".join(blocks)


def _tables(run: Run, *, with_name: bool) -> str:
    name = f" of {run.label}" if with_name else ""
    parts = (
        ("Summary", run.summary, False),
        ("Configuration", run.config, True),
        ("Provenance", run.provenance, False),
    )
    return "".join(
        f"<details{' open' if not folded and not with_name else ''}><summary>{title}{escape(name)}</summary>"
        f"<table>{_rows(content)}</table></details>"
        for title, content, folded in parts
        if content
    )


def _rows(content: Mapping[str, Any], prefix: str = "") -> str:
    rows: list[str] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows.append(_rows(value, f"{name}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>")
    return "".join(rows)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.toml"
    if not path.exists():
        return {}
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as fault:
        raise MuonrlError(f"{path}: not valid TOML: {' '.join(str(fault).split())}") from fault


def _read_provenance(folder: Path) -> dict[str, Any]:
    path = folder / "provenance.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as fault:
        raise MuonrlError(f"{path}: not valid JSON: {fault.msg}") from fault
    return content if isinstance(content, dict) else {"provenance": content}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

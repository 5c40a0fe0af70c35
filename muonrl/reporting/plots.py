"""Plots: success curves, panels of other quantities, learning-rate sweeps. No window, no global pyplot state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from muonrl.algorithms.ema import ema
from muonrl.reporting.files import write_atomic
from muonrl.reporting.metrics import collapsed, series

Role = Literal["auto", "full", "collapsed", "other"]
FULL, COLLAPSED = "#2a9d5c", "#d1495b"
OTHERS = ("#3b6fb6", "#e08b2c", "#7a5ba6", "#2a9aa3", "#8a6d3b", "#6b7280")
INK, FAINT = "#1f2933", "#d9dee4"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "svg.fonttype": "none",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Curve:
    """One run in a success plot. ``role`` "auto" is "collapsed" where the curve says so, else "other"."""

    label: str
    records: Sequence[Mapping[str, Any]]
    role: Role = "auto"


@dataclass(frozen=True)
class SweepPoint:
    """One run of a learning-rate sweep: ``value`` is the share that is compared, e.g. success over the last updates."""

    optimizer: str
    lr: float
    value: float
    seed: int = 0


def is_full_recipe(config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a resolved configuration is the whole recipe: SPO++ values, both penalties, TIS, token mean, Muon."""
    expected: dict[str, dict[str, object]] = {
        "optimizer": {"name": "muon"},
        "algorithm": {
            "baseline": "spopp",
            "normalization": "action_token",
            "length_penalty": True,
            "tool_penalty": True,
        },
        "loss": {"is_mode": "tis", "agg": "token_mean"},
    }
    return all(config.get(s, {}).get(k) == v for s, part in expected.items() for k, v in part.items())


def success_figure(curves: Sequence[Curve], title: str = "Training success") -> Figure:
    """Success over updates, a line a run: thin raw values, bold EMA of span 5 from the first observation.

    The full recipe is green, collapsed runs are red. A single run also shows the means over its first and last ten updates.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.6), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        ends: list[tuple[float, str, str]] = []
        last = 1
        for curve, color in zip(curves, curve_colors(curves), strict=True):
            updates, success = series(curve.records, "success")
            if not updates:
                continue
            smooth = ema(success)
            axes.plot(updates, success, color=color, linewidth=0.9, alpha=0.38)
            axes.plot(updates, smooth, color=color, linewidth=2.6, solid_capstyle="round", label=curve.label)
            ends.append((smooth[-1], curve.label, color))
            last = max(last, updates[-1])
            if len(curves) == 1 and len(success) >= 20:
                _mark_means(axes, updates, success, color)
        axes.set_title(title)
        axes.set_xlabel("update")
        axes.set_ylabel("rollouts with every test passed")
        _percent(axes)
        axes.set_xlim(1, max(last, 2))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if len(ends) == 1:
            axes.plot([], [], color=ends[0][2], linewidth=0.9, alpha=0.5, label="raw")
            axes.lines[1].set_label("EMA, span 5")
            axes.legend(loc="upper left")
        elif ends:
            _label_ends(axes, ends, last)
    return figure


def plot_success(curves: Sequence[Curve], path: Path, title: str = "Training success") -> Path:
    """Write :func:`success_figure` as a PNG in one piece. Raises MuonrlError where ``path`` cannot be written."""
    return save_png(success_figure(curves, title), path)


def series_figure(
    lines: Sequence[tuple[str, Sequence[int], Sequence[float]]],
    title: str,
    *,
    unit: Literal["number", "share", "log"] = "number",
    colors: Sequence[str] = OTHERS,
) -> Figure:
    """A small panel of one quantity over updates; ``lines`` are (label, updates, values)."""
    with mpl.rc_context(STYLE | {"font.size": 9, "axes.titlesize": 10.5, "axes.titlepad": 7}):
        figure = Figure(figsize=(4.5, 2.55), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        for position, (label, updates, values) in enumerate(lines):
            if updates:  # a line without data keeps its colour for the run in the other panels
                color = colors[position % len(colors)]
                axes.plot(updates, values, color=color, linewidth=1.5, label=label)
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        if unit == "share":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
        elif unit == "log" and any(v > 0 for _, _, values in lines for v in values):
            axes.set_yscale("log")
        if len(lines) > 1:
            axes.legend(fontsize=8, loc="best", handlelength=1.4)
    return figure


def sweep_figure(
    points: Sequence[SweepPoint], *, baseline: float | None = None, title: str = "Learning-rate sweep"
) -> Figure:
    """Final success over learning rate (log scale), a line of means an optimizer, a dot a seed, the best mean ringed.

    ``baseline`` is the success before training, drawn as a dashed line.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        names = list(dict.fromkeys(p.optimizer for p in points))
        palette = {"muon": FULL, "adam": OTHERS[1], "adamw": OTHERS[1]}
        spare = iter(OTHERS * len(names))
        for position, name in enumerate(names):
            color = palette.get(name.lower()) or next(spare)
            own = [p for p in points if p.optimizer == name]
            rates = sorted({p.lr for p in own})
            means = [float(np.mean([p.value for p in own if p.lr == rate])) for rate in rates]
            axes.plot([p.lr for p in own], [p.value for p in own], "o", color=color, alpha=0.4, markersize=5)
            axes.plot(rates, means, color=color, linewidth=2.4, label=name)
            best = int(np.argmax(means))
            axes.plot(rates[best], means[best], "o", markersize=12, markerfacecolor="none", color=color)
            axes.annotate(
                f"{rates[best]:g}: {100 * means[best]:.0f} %",
                (rates[best], means[best]),
                xytext=(0, 11 if position % 2 == 0 else -24),  # neighbours must not write over one another
                textcoords="offset points",
                ha="center",
                color=color,
                weight="bold",
            )
        if baseline is not None:
            axes.axhline(
                baseline, color="#7b8794", linestyle=(0, (4, 3)), linewidth=1.2, label="before training"
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", length=0)
        axes.margins(x=0.09)
        _percent(axes)
        axes.set_title(title)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("success, last ten updates")
        if names:
            axes.legend(loc="best")
    return figure


def plot_sweep(
    points: Sequence[SweepPoint],
    path: Path,
    *,
    baseline: float | None = None,
    title: str = "Learning-rate sweep",
) -> Path:
    """Write :func:`sweep_figure` as a PNG in one piece. Raises MuonrlError where ``path`` cannot be written."""
    return save_png(sweep_figure(points, baseline=baseline, title=title), path)


def save_png(figure: Figure, path: Path) -> Path:
    """Render with Agg and write the file in one piece."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    write_atomic(path, buffer.getvalue())
    return path


def svg_text(figure: Figure, salt: str) -> str:
    """The figure as an ``<svg>`` element to stand inside a page; ``salt`` keeps the ids of several figures apart."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def curve_colors(curves: Sequence[Curve]) -> list[str]:
    """The colour of each curve: green for the full recipe, red for a collapsed run, else the next of the palette."""
    spare = iter(OTHERS * (1 + len(curves) // len(OTHERS)))
    colors: list[str] = []
    for curve in curves:
        role = curve.role
        if role in ("auto", "full") and collapsed(series(curve.records, "success")[1]):
            role = "collapsed"
        colors.append({"full": FULL, "collapsed": COLLAPSED}.get(role) or next(spare))
    return colors


def _percent(axes: Axes) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def _mark_means(axes: Axes, updates: Sequence[int], success: Sequence[float], color: str) -> None:
    """Dashed means of the first and last ten updates, with their figures clear of the curve."""
    for part in (slice(None, 10), slice(-10, None)):
        mean = float(np.mean(success[part]))
        first, last = updates[part][0], updates[part][-1]
        axes.hlines(mean, first, last, color=INK, linewidth=1.3, linestyle=(0, (2, 1.5)), zorder=3)
        low, high = min(success[part]), max(success[part])
        axes.annotate(
            f"{100 * mean:.0f} %",
            ((first + last) / 2, low if low > 0.12 else high),
            xytext=(0, -9 if low > 0.12 else 9),
            textcoords="offset points",
            ha="center",
            va="top" if low > 0.12 else "bottom",
            weight="bold",
            fontsize=14,
            color=color,
        )


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], last: int) -> None:
    """Name every line at its right end; names that would overlap are pushed apart."""
    gap, floor = 0.055, -1.0
    for value, label, color in sorted(ends):
        floor = max(value, floor + gap)
        axes.annotate(
            f"{label}  {100 * value:.0f} %",
            (last, floor),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            weight="bold",
            fontsize=9.5,
            annotation_clip=False,
        )

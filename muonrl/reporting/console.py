"""What a run shows while it goes: a live panel on a terminal, one plain line per update elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from muonrl.reporting.summary import clock

TICK_SECONDS = 10.0
SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Live progress of ``total`` updates, written to ``stream`` (default: standard output).

    ``plain`` chooses lines instead of the live panel; by default they are used wherever ``stream`` is no terminal. Use it
    as a context manager, or call :meth:`close`: the terminal gets its cursor back.
    """

    def __init__(
        self, total: int, title: str = "", *, stream: TextIO | None = None, plain: bool | None = None
    ) -> None:
        self.total = total
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        fit = self._console.is_terminal and not self._console.is_dumb_terminal
        self.plain = not fit if plain is None else plain
        self._began = time.monotonic()
        self._stage, self._detail, self._stage_began = "", "", self._began
        self._spoke = self._began
        self._record: Mapping[str, Any] = {}
        self._curve: list[float] = []
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        if title:
            self._say(title, style="bold")
        if not self.plain:
            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4)
            self._live.start()

    def stage(self, text: str) -> None:
        """Begin a stage (installation, warm start, evaluation ...); the one before it has ended."""
        self._end_stage()
        self._stage, self._detail, self._stage_began = text, "", time.monotonic()
        if self.plain and text:
            self._say(f"[{clock(time.monotonic() - self._began)}] {text}")

    def tick(self, detail: str) -> None:
        """How far the stage is, e.g. ``step 120/300``; where lines are printed, at most one in ten seconds."""
        self._detail = detail
        now = time.monotonic()
        if self.plain and now - self._spoke >= TICK_SECONDS:
            self._say(f"[{clock(now - self._began)}] {self._stage}: {detail}")

    def note(self, text: str) -> None:
        """A line that stays on the screen: a checkpoint, a warning, the command that resumes the run."""
        self._say(text)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the metrics of an update (keys of metrics.jsonl; a missing one is left out)."""
        if self._stage:
            self.stage("")
        self._record = record
        if record.get("success_ema") is not None:
            self._curve.append(float(record["success_ema"]))
        if self.plain:
            self._say(plain_line(record, self.total))

    def close(self) -> None:
        """End the display and leave its last state on the screen. May be called twice."""
        self._end_stage()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stage = ""  # a stage that broke off did not end well
        self.close()

    def _end_stage(self) -> None:
        if self._stage and not self.plain:
            seconds = time.monotonic() - self._stage_began
            self._say(f"✓ {self._stage}  {clock(seconds)}", style="green")
        self._stage = ""

    def _say(self, text: str, style: str | None = None) -> None:
        self._spoke = time.monotonic()
        if self.plain:
            print(text, file=self._stream, flush=True)
        else:
            self._console.print(Text(text, style=style or ""))

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._record:
            parts += [self._bar(), figures(self._record, sparkline(self._curve))]
        if self._stage:
            passed = clock(time.monotonic() - self._stage_began)
            self._spinner.update(text=Text(f"{self._stage}  {self._detail}  {passed}"))
            parts.append(self._spinner)
        return Group(*parts)

    def _bar(self) -> RenderableType:
        done = int(self._record.get("update", 0))
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(f"update {done}/{self.total}", style="bold"),
            ProgressBar(total=self.total, completed=done, width=40),
            Text(f"{clock(time.monotonic() - self._began)} passed"),
            Text(f"{clock(self._record.get('eta_s'))} to go"),
        )
        return row


def plain_line(record: Mapping[str, Any], total: int) -> str:
    """One update as one line of text."""
    parts = [f"update {record.get('update', 0):>{len(str(total))}}/{total}"]
    for name, value in _figures(record):
        parts.append(f"{name} {value}")
    if record.get("eta_s") is not None:
        parts.append(f"eta {clock(record['eta_s'])}")
    return "  ".join(parts)


def figures(record: Mapping[str, Any], curve: str = "") -> Table:
    """The figures of an update as a grid of four columns, the curve of the success EMA beneath."""
    table = Table.grid(padding=(0, 3))
    cells = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in _figures(record)]
    for start in range(0, len(cells), 4):
        table.add_row(*cells[start : start + 4])
    if not curve:
        return table
    outer = Table.grid()
    outer.add_row(table)
    outer.add_row(Text.assemble(("success ", "dim"), (curve, "green")))
    return outer


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in block characters, scaled from 0 to 1; a long series is thinned to its last value in each column."""
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    return "".join(SPARKS[min(7, max(0, int(v * 8)))] for v in values)


def _figures(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(name, value)`` of what is shown of an update, without what the record lacks."""
    forms: list[tuple[str, str, str]] = [
        ("success", "success", "share"),
        ("ema", "success_ema", "share"),
        ("entropy", "entropy", "number"),
        ("clip", "clip_share", "share"),
        ("stale", "staleness_mean", "number"),
        ("tok/s", "tokens_per_s", "count"),
        ("idle sampler", "idle_sampler", "share"),
        ("idle learner", "idle_learner", "share"),
    ]
    shown: list[tuple[str, str]] = []
    for name, key, form in forms:
        value = record.get(key)
        if value is None:
            continue
        text = {"share": f"{100 * value:.1f}%", "number": f"{value:.2f}", "count": f"{value:,.0f}"}[form]
        shown.append((name, text))
    return shown

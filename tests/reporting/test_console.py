"""Live progress on a terminal and in a pipe."""

import io

import pytest
from rich.console import Console

from muonrl.reporting import console
from muonrl.reporting.console import Progress, plain_line, sparkline


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_in_a_pipe_every_update_is_one_plain_line(make_records):
    out = io.StringIO()
    with Progress(24, "tiny, seed 0", stream=out) as progress:
        assert progress.plain
        progress.stage("warm start")
        for record in make_records(3):
            progress.update(record)
        progress.note("checkpoint step-000003")
    lines = out.getvalue().splitlines()
    assert lines[0] == "tiny, seed 0" and lines[1] == "[0:00] warm start"
    assert [line[:12] for line in lines[2:5]] == ["update  1/24", "update  2/24", "update  3/24"]
    assert lines[5:] == ["checkpoint step-000003"]
    assert "\x1b" not in out.getvalue()


def test_a_line_shows_every_figure_with_its_unit():
    line = plain_line(
        {
            "update": 7,
            "success": 0.3125,
            "success_ema": 0.3,
            "entropy": 0.456,
            "clip_share": 0.012,
            "staleness_mean": 0.75,
            "tokens_per_s": 3456.7,
            "idle_sampler": 0.125,
            "idle_learner": 0.25,
            "eta_s": 3725.0,
        },
        60,
    )
    assert line == (
        "update  7/60  success 31.2%  ema 30.0%  entropy 0.46  clip 1.2%  stale 0.75  tok/s 3,457  "
        "idle sampler 12.5%  idle learner 25.0%  eta 1:02:05"
    )


def test_missing_figures_are_left_out():
    assert plain_line({"update": 1, "success": None, "entropy": 1.0}, 9) == "update 1/9  entropy 1.00"


def test_ticks_are_rare_in_a_pipe(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    progress = Progress(5, stream=out)
    progress.stage("warm start")
    for step in range(1, 26):
        now[0] += 1.0
        progress.tick(f"step {step}/25")
    assert out.getvalue().splitlines() == [
        "[0:00] warm start",
        "[0:10] warm start: step 10/25",
        "[0:20] warm start: step 20/25",
    ]


def test_a_terminal_gets_a_live_panel_and_its_cursor_back(terminal, make_records):
    progress = Progress(24, "tiny", stream=terminal)
    assert not progress.plain
    progress.stage("warm start")
    progress.tick("step 3/300")
    for record in make_records(2):
        progress.update(record)
    progress.close()
    progress.close()
    text = terminal.getvalue()
    assert "✓ warm start" in text and "update 2/24" in text and "tok/s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_stage_that_broke_off_is_not_ticked_off(terminal):
    with pytest.raises(KeyboardInterrupt), Progress(24, stream=terminal) as progress:
        progress.stage("warm start")
        raise KeyboardInterrupt
    assert "✓" not in terminal.getvalue()


def test_the_panel_shows_the_stage_and_the_curve(terminal, make_records):
    progress = Progress(24, stream=terminal)
    for record in make_records(4):
        progress.update(record | {"success_ema": record["update"] / 4})
    progress.stage("held-out evaluation")
    screen = Console(file=io.StringIO(), width=120)
    screen.print(progress._panel())
    progress.close()
    assert "held-out evaluation" in screen.file.getvalue()
    assert "▃▅▇█" in screen.file.getvalue()


def test_sparkline_is_scaled_from_nothing_to_one_and_thinned():
    assert sparkline([-0.1, 0.0, 0.5, 0.99, 1.0, 1.2]) == "▁▁▅███"
    assert sparkline([i / 200 for i in range(200)], width=4) == "▂▄▆█"

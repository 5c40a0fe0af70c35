"""Plots: what is drawn, in which colour, and that the file is a picture."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from muonrl.algorithms.ema import ema
from muonrl.config import load_recipe
from muonrl.errors import MuonrlError
from muonrl.reporting import plots
from muonrl.reporting.plots import Curve, SweepPoint, plot_success, plot_sweep, success_figure, sweep_figure


def _drawn(figure):
    """``(color, linewidth, x, y)`` of the lines with data."""
    lines = figure.axes[0].lines
    return [(to_hex(x.get_color()), x.get_linewidth(), *x.get_data()) for x in lines if len(x.get_xdata())]


def test_a_run_is_a_thin_raw_line_and_a_bold_ema(make_records):
    records = make_records(30)
    thin, bold = _drawn(success_figure([Curve("tiny", records, "full")]))
    success = [r["success"] for r in records]
    assert thin[0] == bold[0] == plots.FULL and thin[1] < bold[1] / 2
    np.testing.assert_allclose(thin[3], success)
    np.testing.assert_allclose(bold[3], ema(success, 5))
    assert list(bold[2]) == list(range(1, 31))


def test_the_means_of_the_first_and_last_ten_updates_are_written(make_records):
    records = [r | {"success": 0.25 if r["update"] <= 10 else 0.75} for r in make_records(20)]
    figure = success_figure([Curve("tiny", records)])
    assert [t.get_text() for t in figure.axes[0].texts] == ["25 %", "75 %"]


def test_collapsed_runs_are_red_and_the_full_recipe_green(make_records):
    good = make_records(24)
    bad = [r | {"success": 0.6 if r["update"] < 10 else 0.0} for r in good]
    figure = success_figure(
        [Curve("a", good, "full"), Curve("b", bad), Curve("c", good), Curve("d", bad, "full")]
    )
    colors = [line[0] for line in _drawn(figure)][::2]
    assert colors == [plots.FULL, plots.COLLAPSED, plots.OTHERS[0], plots.COLLAPSED]
    assert sorted(t.get_text().split()[0] for t in figure.axes[0].texts) == ["a", "b", "c", "d"]
    heights = sorted(t.xy[1] for t in figure.axes[0].texts)
    assert min(np.diff(heights)) > 0.05  # equal ends, yet no name on top of another


@pytest.mark.parametrize("records", [[], [{"update": 1, "success": 0.5}], [{"update": 1}]])
def test_the_picture_is_written_for_runs_that_have_just_begun(tmp_path, records):
    picture = imread(plot_success([Curve("tiny", records)], tmp_path / "success.png"))
    assert picture.shape[0] > 400 and picture.std() > 0.01


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path, make_records):
    before = dict(mpl.rcParams)
    plot_success([Curve("tiny", make_records(24))], tmp_path / "success.png")
    assert dict(mpl.rcParams) == before


def test_a_folder_that_refuses_is_one_clear_line(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(MuonrlError, match="cannot be written"):
        plot_success([], tmp_path / "run" / "success.png")


def test_the_sweep_rings_the_best_mean_of_each_optimizer(tmp_path):
    points = [
        SweepPoint("Muon", 1e-3, 0.6, 0),
        SweepPoint("Muon", 1e-3, 0.7, 1),
        SweepPoint("Muon", 3e-3, 0.9, 0),
        SweepPoint("Muon", 3e-3, 0.3, 1),
        SweepPoint("AdamW", 3e-4, 0.5, 0),
        SweepPoint("AdamW", 1e-3, 0.1, 0),
    ]
    figure = sweep_figure(points, baseline=0.2)
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.texts] == ["0.001: 65 %", "0.0003: 50 %"]
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["Muon", "AdamW", "before training"]
    assert axes.get_xscale() == "log"
    assert imread(plot_sweep(points, tmp_path / "sweep.png")).std() > 0.01


@pytest.mark.parametrize(
    ("recipe", "overrides", "full"),
    [
        ("tiny", [], True),
        ("tiny_adam", [], False),
        ("tiny", ["algorithm.length_penalty=false"], False),
        ("tiny", ["loss.agg=sequence_mean"], False),
        ("tiny", ["loss.is_mode=none"], False),
    ],
)
def test_the_full_recipe_is_known_by_its_configuration(recipe, overrides, full):
    from dataclasses import asdict

    assert plots.is_full_recipe(asdict(load_recipe(recipe, overrides))) is full

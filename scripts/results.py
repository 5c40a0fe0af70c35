"""Make the figures of the README: a learning-rate sweep of Muon and of Adam, then both at their best rate on four seeds.

    python scripts/results.py run      plays every run that is missing below runs/results, a few minutes each
    python scripts/results.py write    writes docs/results/, and the tables in README.md and docs/results.md

Both optimizers get the same number of rates, the same seed for the sweep, and the same criterion: success over the last ten
updates. Nothing else differs between the two recipes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muonrl.config import load_recipe
from muonrl.reporting.metrics import read_metrics
from muonrl.reporting.plots import Curve, SweepPoint, plot_success, plot_sweep
from muonrl.reporting.summary import read_summary

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "results"
RESULTS = ROOT / "docs" / "results"
SEEDS = (0, 1, 2, 3)
RATES = {"tiny": (4e-4, 1e-3, 2.5e-3), "tiny_adam": (1.2e-4, 3e-4, 7.5e-4, 1.875e-3)}
KEY = {"tiny": "lr_muon", "tiny_adam": "lr_adamw"}
NAMES = {"tiny": "Muon", "tiny_adam": "AdamW"}


@dataclass(frozen=True)
class Job:
    """One run of a recipe at a rate and a seed."""

    recipe: str
    rate: float
    seed: int

    @property
    def folder(self) -> Path:
        return RUNS / f"{self.recipe}-{self.rate:g}-seed{self.seed}"

    @property
    def done(self) -> bool:
        return (self.folder / "summary.json").is_file()

    def play(self) -> None:
        overrides = ["--set", f"optimizer.{KEY[self.recipe]}={self.rate!r}"]
        command = [sys.executable, "-m", "muonrl", "train", "--recipe", self.recipe, "--seed", str(self.seed)]
        print(f"{self.folder.name} ...", flush=True)
        subprocess.run([*command, *overrides, "--run-dir", str(self.folder)], cwd=ROOT, check=True)


def chosen_rate(recipe: str) -> float:
    """The rate that the recipe ships with."""
    optimizer = load_recipe(recipe).optimizer
    return optimizer.lr_muon if recipe == "tiny" else optimizer.lr_adamw


def sweep() -> list[Job]:
    """Every rate of both optimizers on the first seed."""
    return [Job(recipe, rate, SEEDS[0]) for recipe, rates in RATES.items() for rate in rates]


def seeds() -> list[Job]:
    """Both recipes as shipped, on every seed."""
    return [Job(recipe, chosen_rate(recipe), seed) for recipe in RATES for seed in SEEDS]


def write() -> None:
    """Collect what was played into docs/results and the two pages."""
    jobs = [job for job in dict.fromkeys([*sweep(), *seeds()]) if job.done]
    rows = [{"recipe": j.recipe, "rate": j.rate, "seed": j.seed, **read_summary(j.folder)} for j in jobs]
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = json.loads((jobs[0].folder / "provenance.json").read_text())
    record = {"machine": {k: machine[k] for k in ("cpu", "platform", "python", "versions")}, "runs": rows}
    (RESULTS / "tiny.json").write_text(json.dumps(record, indent=1) + "\n")
    curves = [
        Curve(
            f"{NAMES[j.recipe]}, seed {j.seed}",
            read_metrics(j.folder),
            "full" if j.recipe == "tiny" else "auto",
        )
        for j in seeds()
        if j.done
    ]
    plot_success(
        curves, RESULTS / "success.png", title="Repairing repositories: success in training, one line a run"
    )
    points = [
        SweepPoint(NAMES[j.recipe], j.rate, read_summary(j.folder)["success_last10"], j.seed)
        for j in sweep()
        if j.done
    ]
    start = statistics.fmean(r["success_first10"] for r in rows if r["recipe"] == "tiny")
    plot_sweep(points, RESULTS / "sweep.png", title="Learning rates of both optimizers, seed 0, same budget")
    place(ROOT / "README.md", "results", seed_table(rows))
    place(ROOT / "docs" / "results.md", "seeds", seed_table(rows))
    place(ROOT / "docs" / "results.md", "sweep", sweep_table(rows))
    print(f"{len(rows)} runs, mean success over the first ten updates {start:.3f}")


def place(page: Path, name: str, table: str) -> None:
    """Put a table between the page's markers ``<!-- name -->`` and ``<!-- /name -->``."""
    text = page.read_text()
    head, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition(f"<!-- /{name} -->")
    if not mark or not end:
        raise SystemExit(f"{page} lacks the markers of {name}")
    page.write_text(f"{head}{mark}{table}{end}{tail}")


def percent(value: float) -> str:
    """A share as a number of percent."""
    return f"{100 * value:.1f}"


def seed_table(rows: list[dict[str, Any]]) -> str:
    """Both recipes as shipped: each seed, and the mean."""
    lines = [
        "| optimizer | seed | success %, first -> last ten updates | gain | held-out %, before -> after | time |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in RATES:
        own = [
            r
            for r in rows
            if r["recipe"] == recipe and r["rate"] == chosen_rate(recipe) and r["seed"] in SEEDS
        ]
        for r in own:
            lines.append(_row(NAMES[recipe], str(r["seed"]), r, f"{r['wall_s'] / 60:.1f} min"))
        if len(own) > 1:
            keys = ("success_first10", "success_last10", "heldout_before", "heldout_after")
            mean = {k: statistics.fmean(r[k] for r in own) for k in keys}
            lines.append(_row(f"**{NAMES[recipe]}**", "mean", mean, ""))
    return "\n".join(lines) + "\n"


def _row(name: str, seed: str, r: dict[str, Any], time: str) -> str:
    gain = f"{100 * (r['success_last10'] - r['success_first10']):+.1f}"
    success = f"{percent(r['success_first10'])} -> {percent(r['success_last10'])}"
    heldout = f"{percent(r['heldout_before'])} -> {percent(r['heldout_after'])}"
    return f"| {name} | {seed} | {success} | {gain} | {heldout} | {time} |"


def sweep_table(rows: list[dict[str, Any]]) -> str:
    """Every rate of the sweep."""
    lines = [
        "| optimizer | learning rate | success %, last ten updates | held-out % after |",
        "|---|---|---|---|",
    ]
    for r in rows:
        if r["seed"] == SEEDS[0] and r["rate"] in RATES[r["recipe"]]:
            best = " (shipped)" if r["rate"] == chosen_rate(r["recipe"]) else ""
            lines.append(
                f"| {NAMES[r['recipe']]} | {r['rate']:g}{best} "
                f"| {percent(r['success_last10'])} | {percent(r['heldout_after'])} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Dispatch on the one argument."""
    verb = sys.argv[1] if len(sys.argv) == 2 else ""
    if verb == "run":
        for job in dict.fromkeys([*sweep(), *seeds()]):
            if not job.done:
                job.play()
    elif verb == "write":
        write()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()

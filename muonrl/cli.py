"""The command ``muonrl``: train, resume, eval, report, warmstart, tasks, recipes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muonrl import __version__
from muonrl.config import Config, list_recipes, load_recipe, to_toml
from muonrl.errors import InfrastructureError, MuonrlError, TaskError
from muonrl.tasks.schema import SPLITS

Command = Callable[[argparse.Namespace], int]
USER_ERROR, FAULT, STOPPED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command -> exit status: 0 done, 1 a fault of the machine or the program, 2 a mistake, 130 stopped."""
    options = _parser().parse_args(arguments)
    # The tokenizer's own threads would compete with the learner and the sampler for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    command: Command = options.run
    try:
        return command(options)
    except MuonrlError as fault:
        print(f"muonrl: error: {fault}", file=sys.stderr)
        return USER_ERROR
    except InfrastructureError as fault:
        print(f"muonrl: fault: {fault}", file=sys.stderr)
        return FAULT
    except KeyboardInterrupt:
        print("muonrl: stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        sys.stderr.close()
        return FAULT
    except OSError as fault:
        where = f"{fault.filename}: " if fault.filename else ""
        print(f"muonrl: fault: {where}{fault.strerror or fault}", file=sys.stderr)
        return FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muonrl", description="Asynchronous single-rollout RL with Muon for repair agents."
    )
    parser.add_argument("--version", action="version", version=f"muonrl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "train a policy by a recipe")
    _recipe_options(train)
    train.add_argument("--run-dir", type=Path, help="folder of the run (default: runs/RECIPE-DATE)")
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the plan, and stop"
    )

    resume = _command(commands, "resume", _resume, "continue a stopped run from its newest checkpoint")
    resume.add_argument("run_dir", type=Path, metavar="RUN")

    evaluate = _command(commands, "eval", _eval, "held-out pass@1 of a checkpoint")
    evaluate.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint or model folder, or a run"
    )
    evaluate.add_argument("--samples", type=int, default=4, help="rollouts a task (default 4)")
    _recipe_options(evaluate, default=None)

    report = _command(commands, "report", _report, "write report.html of a run")
    report.add_argument("run_dir", type=Path, metavar="RUN")
    report.add_argument("others", type=Path, nargs="*", metavar="OTHER", help="runs to compare with")

    warm = _command(
        commands, "warmstart", _warmstart, "make (or find in the cache) the warm-started policy of a recipe"
    )
    _recipe_options(warm)
    _command(commands, "recipes", _recipes, "list the shipped recipes")
    _tasks_parser(_command(commands, "tasks", None, "make, verify and show repair tasks"))
    return parser


def _command(commands: Any, name: str, run: Command | None, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def _recipe_options(parser: argparse.ArgumentParser, default: str | None = "tiny") -> None:
    usual = default or "the recipe of the checkpoint, else tiny"
    parser.add_argument(
        "--recipe", default=default, help=f"a shipped recipe or the path of a .toml file (default {usual})"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seed", type=int, help="the run's seed")


def _tasks_parser(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    make = _command(verbs, "make", _tasks_make, "make tasks from a repository folder by bug operators")
    make.add_argument("repository", type=Path, help="a package and a tests folder that pytest can run")
    make.add_argument(
        "--out", type=Path, required=True, help="data folder to add the tasks to (tasks.source of a recipe)"
    )
    make.add_argument("--split", choices=SPLITS, default="train")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--limit", type=int, default=20, help="at most this many tasks (default 20)")
    verify = _command(
        verbs, "verify", _tasks_verify, "grade the gold patch (1) and the empty patch (0) of every task"
    )
    verify.add_argument("--source", default="shipped")
    verify.add_argument("--split", choices=SPLITS, action="append", help="default: both")
    show = _command(verbs, "show", _tasks_show, "print one task")
    show.add_argument("task_id")
    show.add_argument("--source", default="shipped")


def _load(options: argparse.Namespace) -> Config:
    return load_recipe(options.recipe, options.overrides, options.seed)


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    run_dir = options.run_dir or Path("runs") / f"{config.run.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if options.dry_run:
        print(to_toml(config) + _plan(config, run_dir))
        return 0
    from muonrl.reporting.console import Progress
    from muonrl.training.run import train_run

    title = f"muonrl {__version__}: recipe {config.run.recipe}, seed {config.run.seed}, {run_dir}"
    with Progress(config.run.updates, title) as progress:
        outcome = train_run(config, run_dir, progress)
    return _finish(outcome.run_dir, outcome.summary)


def _plan(config: Config, run_dir: Path) -> str:
    c = config
    start = (
        f"start from {c.model.path}"
        if c.model.path
        else f"warm start: {c.warmstart.steps} supervised steps (cached)"
    )
    per, at_once = c.run.rollouts_per_update, c.sandbox.concurrency
    rows = [
        f"run folder {run_dir}",
        start,
        f"{c.run.updates} updates of {per} single rollouts, {at_once} at once in {c.sandbox.backend} sandboxes",
        f"{c.algorithm.baseline} baseline, {c.optimizer.name}, staleness <= {c.staleness.eta}, weights by {c.weights.mode}",
        f"held-out pass@1 before and after, {c.run.eval_samples} samples a task",
        f"a checkpoint each {c.run.checkpoint_every} updates",
    ]
    return "\n".join(f"# plan {i}: {row}" for i, row in enumerate(rows, 1))


def _resume(options: argparse.Namespace) -> int:
    from muonrl.reporting.console import Progress
    from muonrl.training.run import resume_run

    def progress(config: Config) -> Progress:
        return Progress(config.run.updates, f"muonrl {__version__}: resuming {options.run_dir}")

    outcome = resume_run(options.run_dir, progress)
    return _finish(outcome.run_dir, outcome.summary)


def _finish(run_dir: Path, summary: dict[str, object] | None) -> int:
    if summary is None:
        print(f"stopped; continue with: muonrl resume {shlex.quote(str(run_dir))}")
        return STOPPED
    from muonrl.reporting.summary import summary_table

    print(summary_table(summary))
    print(
        f"curve {run_dir / 'success.png'}; report: muonrl report {run_dir}; policy {run_dir / 'checkpoints'}"
    )
    return 0


def _eval(options: argparse.Namespace) -> int:
    from muonrl.errors import CheckpointError
    from muonrl.reporting.console import Progress
    from muonrl.training.checkpoint import latest_checkpoint
    from muonrl.training.rollout_client import Interrupted
    from muonrl.training.run import evaluate_checkpoint

    if options.samples < 1:
        raise MuonrlError(f"--samples {options.samples}: must be at least 1")
    folder: Path = options.checkpoint
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: no such folder")
    folder = latest_checkpoint(folder / "checkpoints") or folder
    if options.recipe is None:
        own = folder / "config.toml"
        options.recipe = str(own) if own.is_file() else "tiny"
    config = _load(options)
    try:
        with Progress(1, f"evaluating {folder}") as progress:
            value = evaluate_checkpoint(folder, options.samples, progress, config)
    except Interrupted:
        raise KeyboardInterrupt from None
    print(f"held-out pass@1 {value:.4f} ({options.samples} samples a task)")
    return 0


def _report(options: argparse.Namespace) -> int:
    from muonrl.reporting.report import make_report

    print(make_report(options.run_dir, options.others))
    return 0


def _warmstart(options: argparse.Namespace) -> int:
    from muonrl.reporting.console import Progress
    from muonrl.training.run import select_tasks, starting_policy

    config = _load(options)
    if config.model.path:
        raise MuonrlError(f"model.path = {config.model.path!r}: a run of this recipe has no warm start")
    train, _ = select_tasks(config)
    with Progress(config.warmstart.steps, f"warm start of recipe {config.run.recipe}") as progress:
        folder = starting_policy(config, train, progress)
    print(folder)
    return 0


def _recipes(_: argparse.Namespace) -> int:
    for name in list_recipes():
        print(name)
    return 0


def _tasks_make(options: argparse.Namespace) -> int:
    from muonrl.tasks.make import MakeOptions, make_tasks, write_tasks

    if not options.repository.is_dir():
        raise TaskError(f"{options.repository}: no such folder")
    report = make_tasks(
        options.repository, MakeOptions(split=options.split, seed=options.seed, limit=options.limit)
    )
    print(f"{write_tasks(report, options.out)}: {len(report.tasks)} tasks; refused: {dict(report.refused)}")
    return 0


def _tasks_verify(options: argparse.Namespace) -> int:
    import asyncio

    from muonrl.grading.grader import Grader
    from muonrl.sandbox import make_provider
    from muonrl.tasks.load import load_tasks
    from muonrl.tasks.verify import Verdict, verify_tasks

    tasks = [t for split in options.split or SPLITS for t in load_tasks(options.source, split)]

    async def verify() -> tuple[Verdict, ...]:
        provider = make_provider(Config().sandbox)
        await provider.start()
        try:
            return await verify_tasks(tasks, Grader(provider, cache=False), concurrency=os.cpu_count() or 1)
        finally:
            await provider.close()

    verdicts = asyncio.run(verify())
    bad = [v for v in verdicts if v.problems]
    for verdict in bad:
        print(f"{verdict.task_id}: {'; '.join(verdict.problems)}")
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} tasks verified: gold patch 1, empty patch 0")
    return FAULT if bad else 0


def _tasks_show(options: argparse.Namespace) -> int:
    from muonrl.tasks.load import load_tasks
    from muonrl.tasks.show import find_task, show_task

    tasks = [t for split in SPLITS for t in load_tasks(options.source, split)]
    print(show_task(find_task(tasks, options.task_id)))
    return 0

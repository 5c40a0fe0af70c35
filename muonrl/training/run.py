"""Setting a run up and bringing it to its end: folders, warm start, processes, summary, clean stops."""

from __future__ import annotations

import asyncio
import gc
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from muonrl.algorithms.values import make_tracker
from muonrl.config import Config, load_recipe, to_toml
from muonrl.errors import CheckpointError, MuonrlError
from muonrl.policy.model import load_policy
from muonrl.reporting.console import Progress
from muonrl.reporting.files import write_atomic
from muonrl.reporting.metrics import METRICS, MetricsWriter, read_metrics
from muonrl.reporting.plots import Curve, Role, is_full_recipe, plot_success
from muonrl.reporting.summary import write_summary
from muonrl.sandbox import make_provider
from muonrl.tasks.load import load_tasks
from muonrl.tasks.schema import RepairTask
from muonrl.training.checkpoint import MANIFEST, latest_checkpoint, read_json, verify_checkpoint
from muonrl.training.collector import Collector
from muonrl.training.learner import Learner
from muonrl.training.loop import MODEL, TRAINER, Trainer
from muonrl.training.rollout_client import Interrupted, RolloutClient
from muonrl.training.rollout_process import RolloutSetup
from muonrl.training.weights import clear_save_faults
from muonrl.trajectory import PolicyId
from muonrl.warmstart.train import default_cache, warm_start

REQUIRED = (
    TRAINER,
    "optimizer.json",
    "optimizer.safetensors",
    "config.toml",
    f"{MODEL}/config.json",
    f"{MODEL}/model.safetensors",
    f"{MODEL}/tokenizer.json",
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary, or None where the user stopped it."""

    run_dir: Path
    summary: dict[str, Any] | None


class StopFlag:
    """Ctrl-C and SIGTERM ask the run to stop at its next safe point; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> StopFlag:
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def preflight(config: Config) -> None:
    """Start and end one sandbox, so that a lack shows before minutes of work. Raises SandboxUnavailable."""

    async def attempt() -> None:
        provider = make_provider(config.sandbox)
        await provider.start()
        await provider.close()

    asyncio.run(attempt())


def select_tasks(config: Config) -> tuple[tuple[RepairTask, ...], tuple[RepairTask, ...]]:
    """(training tasks, held-out tasks) of a config; raises TaskError where there are none.

    A run without evaluation has no held-out tasks, and its data set needs none.
    """
    train = _split(config, config.tasks.train_split)
    return train, _split(config, config.tasks.heldout_split) if config.run.eval_samples else ()


def _split(config: Config, split: str) -> tuple[RepairTask, ...]:
    return load_tasks(config.tasks.source, split)[: config.tasks.limit or None]


def starting_policy(
    config: Config,
    train: Sequence[RepairTask],
    progress: Progress,
    interrupted: Callable[[], bool] = lambda: False,
) -> Path:
    """The folder of the policy that a run begins with: ``model.path``, or the cached or fresh warm start.

    Raises Interrupted when asked to stop, and MuonrlError where the cache cannot be written; nothing is kept of either.
    """
    if config.model.path:
        return Path(config.model.path)
    torch.set_num_threads(config.run.threads_learner + config.run.threads_sampler)
    progress.stage(f"warm start on {config.warmstart.demonstrations} scripted demonstrations")

    def show(step: int, steps: int, loss: float) -> None:
        if interrupted():
            raise Interrupted
        progress.tick(f"step {step}/{steps}  loss {loss:.3f}")

    with clear_save_faults(Path(config.warmstart.cache_dir or default_cache())):
        folder, cached = warm_start(config, train, show)
    progress.stage("")
    progress.note(f"warm start {'from cache' if cached else 'done'}: {folder}")
    return folder


def train_run(config: Config, run_dir: Path, progress: Progress) -> Outcome:
    """A new run in ``run_dir``, which must not hold one yet."""
    if (run_dir / METRICS).exists() or (run_dir / "config.toml").exists():
        raise MuonrlError(f"{run_dir} already holds a run: continue it with `muonrl resume {run_dir}`")
    if config.model.path and not (Path(config.model.path) / "config.json").is_file():
        raise CheckpointError(f"model.path: no model at {config.model.path}: config.json is missing")
    preflight(config)
    train, heldout = select_tasks(config)
    write_atomic(run_dir / "provenance.json", json.dumps(provenance(config), indent=1) + "\n")
    write_atomic(run_dir / "config.toml", to_toml(config))
    with StopFlag() as stop:
        return _begin(config, run_dir, (train, heldout), progress, stop)


def resume_run(run_dir: Path, progress: Callable[[Config], Progress]) -> Outcome:
    """Continue the run in ``run_dir`` from its newest checkpoint, or from its start where it has none yet."""
    if not (run_dir / "config.toml").is_file():
        raise CheckpointError(f"{run_dir} holds no run: config.toml is missing")
    config = load_recipe(run_dir / "config.toml")
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is not None:
        verify_checkpoint(checkpoint, REQUIRED)
    preflight(config)
    tasks = select_tasks(config)
    with StopFlag() as stop, progress(config) as shown:
        if checkpoint is None:
            return _begin(config, run_dir, tasks, shown, stop)
        return _go(config, run_dir, checkpoint / MODEL, tasks, shown, stop, resume_from=checkpoint)


Tasks = tuple[tuple[RepairTask, ...], tuple[RepairTask, ...]]


def _begin(config: Config, run_dir: Path, tasks: Tasks, progress: Progress, stop: StopFlag) -> Outcome:
    try:
        policy = starting_policy(config, tasks[0], progress, stop)
    except Interrupted:
        return Outcome(run_dir, None)
    return _go(config, run_dir, policy, tasks, progress, stop, resume_from=None)


def _go(
    config: Config,
    run_dir: Path,
    policy: Path,
    tasks: Tasks,
    progress: Progress,
    stop: StopFlag,
    resume_from: Path | None,
) -> Outcome:
    train, heldout = tasks
    torch.set_num_threads(config.run.threads_learner)
    torch.manual_seed(config.run.seed)
    model, tokenizer = load_policy(policy)
    done = int(read_json(resume_from / TRAINER)["update"]) if resume_from else 0
    lost = _lost_epoch(run_dir, done)
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(run_dir / METRICS, keep_through=done))
        progress.stage("starting sandboxes")
        setup = RolloutSetup(config, str(policy), (*train, *heldout))
        client = stack.enter_context(RolloutClient(setup, run_dir / "weights"))
        try:
            client.wait_ready(stop)
        except Interrupted:
            return Outcome(run_dir, None)
        first = PolicyId(0 if lost is None else lost + 1, 0)
        tracker = make_tracker([t.task_id for t in train], config.algorithm, policy=first)
        collector = Collector(client, tracker, config, first, stop)
        trainer = Trainer(
            config, run_dir, Learner(model, config), collector, tokenizer, metrics, progress, heldout
        )
        if resume_from:
            trainer.restore(resume_from, lost_epoch=lost)
        if lost is not None:
            trainer.save()  # before anything is published in the new epoch, or a second fall-back would name it again
        client.publish(collector.policy, model.state_dict())
        gc.collect()
        try:
            trainer.run()
        except Interrupted:
            trainer.save()
            return Outcome(run_dir, None)
    return Outcome(run_dir, finish(config, run_dir, trainer))


def _lost_epoch(run_dir: Path, done: int) -> int | None:
    """The newest epoch among updates that were done after the checkpoint of update ``done``; None without such updates."""
    known = read_metrics(run_dir) if (run_dir / METRICS).exists() else []
    return max((int(r["policy"][0]) for r in known if r["update"] > done), default=None)


def finish(config: Config, run_dir: Path, trainer: Trainer) -> dict[str, Any]:
    """Write summary.json and success.png of a run that reached its end."""
    shutil.rmtree(run_dir / "weights", ignore_errors=True)
    records = read_metrics(run_dir)
    label = f"{config.run.recipe}, seed {config.run.seed}"
    role: Role = "full" if is_full_recipe(asdict(config)) else "auto"
    plot_success([Curve(label, records, role)], run_dir / "success.png", title=f"Training success: {label}")
    return write_summary(
        run_dir,
        records,
        recipe=config.run.recipe,
        seed=config.run.seed,
        optimizer=config.optimizer.name,
        heldout_before=trainer.heldout_before,
        heldout_after=trainer.heldout_after,
        wall_s=trainer.wall_seconds,
    )


def evaluate_checkpoint(checkpoint: Path, samples: int, progress: Progress, config: Config) -> float:
    """Held-out pass@1 of a checkpoint (or of a plain model folder): mean over ``samples`` rollouts of each task.

    Raises CheckpointError for a damaged checkpoint, and Interrupted when asked to stop.
    """
    if (checkpoint / MANIFEST).exists():
        verify_checkpoint(checkpoint, REQUIRED)
    folder = checkpoint / MODEL if (checkpoint / MODEL).is_dir() else checkpoint
    preflight(config)
    heldout = _split(config, config.tasks.heldout_split)
    torch.set_num_threads(config.run.threads_learner)
    model, _ = load_policy(folder)
    with StopFlag() as stop, ExitStack() as stack:
        progress.stage("starting sandboxes")
        staging = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muonrl-weights-")))
        client = stack.enter_context(RolloutClient(RolloutSetup(config, str(folder), heldout), staging))
        client.wait_ready(stop)
        tracker = make_tracker([t.task_id for t in heldout], config.algorithm)
        collector = Collector(client, tracker, config, PolicyId(0, 0), stop)
        client.publish(collector.policy, model.state_dict())
        progress.stage(f"held-out tasks: {len(heldout)} x {samples}")
        return collector.evaluate(heldout, samples, "eval")


def provenance(config: Config) -> dict[str, Any]:
    """What was run where: versions, git state, machine, command."""
    packages = ("muonrl", "torch", "triton", "transformers", "tokenizers", "numpy", "pytest")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "recipe": config.run.recipe,
        "seed": config.run.seed,
        "python": sys.version.split()[0],
        "versions": versions,
        "git": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "command": " ".join(sys.argv),
    }


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=False
        )
    except OSError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )

"""Compare the working tree with a git commit: the same calls in two processes that take turns."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from benchmarks.cases import Case, describe, flops_of, shrink
from benchmarks.loss_cases import LossCase, describe_rows, shrink_rows, valid_rows
from benchmarks.loss_cost import floor_flops
from benchmarks.measure import Spread, interleave, ratio
from benchmarks.report import table

__all__ = [
    "THRESHOLD",
    "Comparison",
    "Subject",
    "Worker",
    "compare",
    "kernels_of",
    "loss_subject",
    "muon_subject",
    "to_table",
]

ROOT: Final = Path(__file__).resolve().parents[1]
THRESHOLD: Final = 0.05
"""A median this much above 1 counts, if the lower quartile of the ratios is above 1 as well."""
_CPU_STEP_FLOPS: Final = 1.5e11
"""On a CPU a case is cut down to about this many operations a call."""


@dataclass(frozen=True)
class Subject:
    """What is compared: a case, cut down to what a CPU can do in about a second.

    `problem` are the arguments of the suite's class in benchmarks.worker; `what` describes it, and `flops` are its operations.
    """

    name: str
    suite: str
    problem: dict[str, Any]
    what: str
    flops: float


def muon_subject(case: Case, device: str) -> Subject:
    """An optimizer step on the matrices of a case."""
    shapes = case.shapes if device != "cpu" else shrink(case.shapes, _CPU_STEP_FLOPS)
    return Subject(case.name, "muon", {"shapes": shapes}, describe(shapes), flops_of(shapes))


def loss_subject(case: LossCase, device: str) -> Subject:
    """A forward and backward pass on the rows of a case."""
    fraction = case.floor / _CPU_STEP_FLOPS if device == "cpu" else 0.0
    rows = shrink_rows(case, case.rows / max(1.0, fraction))
    valid, linear = valid_rows(rows, case.share), case.kind == "linear"
    problem = {
        "rows": rows,
        "hidden": case.hidden,
        "vocabulary": case.vocabulary,
        "valid": valid,
        "linear": linear,
    }
    flops = floor_flops(valid, case.hidden, case.vocabulary) if linear else 0.0
    return Subject(case.name, "loss", problem, describe_rows(case, rows), flops)


@dataclass(frozen=True)
class Comparison:
    """Times of the working tree over those of the base on one case, round by round."""

    case: str
    what: str
    flops: float
    ratio: Spread
    threshold: float

    @property
    def verdict(self) -> str:
        """ "slower", "faster", or "same" within the noise threshold."""
        if self.ratio.median > 1.0 + self.threshold and self.ratio.lower > 1.0:
            return "slower"
        if self.ratio.median < 1.0 - self.threshold and self.ratio.upper < 1.0:
            return "faster"
        return "same"


@contextlib.contextmanager
def kernels_of(base: str, root: Path = ROOT) -> Iterator[Path]:
    """A temporary folder with the kernels as they are in commit `base`.

    Raises:
        ValueError: there is no such commit, or it has no kernels.
    """
    archived = subprocess.run(
        ["git", "-C", str(root), "archive", "--format=tar", base, "kernels"], capture_output=True
    )
    if archived.returncode:
        raise ValueError(
            f"BASE must be a commit with a folder kernels/; {base!r}: {archived.stderr.decode().strip()}"
        )
    with tempfile.TemporaryDirectory(prefix="muonrl-base-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder) / "kernels"


class Worker:
    """A process that runs the kernels of one source tree; see benchmarks.worker for what it is told."""

    def __init__(self, kernels: Path, device: str, threads: int | None) -> None:
        self._kernels = kernels
        options = ["--device", device, *(["--threads", str(threads)] if threads else [])]
        path = os.pathsep.join([str(kernels), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process measuring {self._kernels} died; its error is above")
        return json.loads(answer)

    def prepare(self, suite: str, problem: dict[str, Any]) -> None:
        """Make what is timed on new data, and make sure that it comes from the right tree."""
        origin = Path(self._ask({"suite": suite, "problem": problem}))
        if self._kernels.resolve() not in origin.resolve().parents:
            raise RuntimeError(f"muonrl_kernels came from {origin}, not from {self._kernels}")

    def seconds(self) -> float:
        """Duration of one call."""
        return float(self._ask({"step": True}))


def compare(
    base: str,
    subjects: Sequence[Subject],
    *,
    device: str,
    threads: int | None,
    rounds: int,
    processes: int,
    threshold: float,
    log: Callable[[str], None],
    root: Path = ROOT,
) -> list[Comparison]:
    """Ratios of the working tree to `base`.

    Each pair of processes takes turns, call by call; several pairs are started one after the other, since where a process
    has its memory can matter as much as its code. The side that goes first changes from pair to pair.
    """
    samples: dict[str, dict[str, list[float]]] = {
        subject.name: {"base": [], "new": []} for subject in subjects
    }
    with kernels_of(base, root) as old:
        for pair in range(processes):
            log(f"pair {pair + 1} of {processes}")
            with Worker(old, device, threads) as before, Worker(root / "kernels", device, threads) as after:
                order = [("base", before), ("new", after)][:: -1 if pair % 2 else 1]
                for subject in subjects:
                    for _, worker in order:
                        worker.prepare(subject.suite, subject.problem)
                    taken = interleave({side: worker.seconds for side, worker in order}, rounds)
                    for side, seconds in taken.items():
                        samples[subject.name][side] += seconds
    return [
        Comparison(s.name, s.what, s.flops, ratio(samples[s.name]["new"], samples[s.name]["base"]), threshold)
        for s in subjects
    ]


def to_table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table."""
    rows = [
        (
            c.case,
            f"{c.ratio.median:.3f}",
            f"{c.ratio.lower:.3f}-{c.ratio.upper:.3f}",
            str(c.ratio.count),
            f"{c.flops * 1e-9:.4g}",
            c.verdict,
            c.what,
        )
        for c in comparisons
    ]
    head = ("case", "time / base", "quartiles", "rounds", "GFLOP", "verdict", "measured")
    return table(head, rows)

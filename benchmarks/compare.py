"""Compare the working tree with a git commit: the same steps in two processes that take turns."""

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

from benchmarks.cases import Case, Shapes, describe, flops_of, shrink
from benchmarks.measure import Spread, interleave, ratio
from benchmarks.report import table

__all__ = ["THRESHOLD", "Comparison", "Worker", "compare", "kernels_of", "to_table"]

ROOT: Final = Path(__file__).resolve().parents[1]
THRESHOLD: Final = 0.05
"""A median this much above 1 counts, if the lower quartile of the ratios is above 1 as well."""
_CPU_STEP_FLOPS: Final = 1.5e11
"""On a CPU a case is cut down to about this many operations a step."""


@dataclass(frozen=True)
class Comparison:
    """Times of the working tree over those of the base on one case, round by round."""

    case: str
    shapes: Shapes
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
    """A process that steps the Muon of one source tree; see benchmarks.worker for what it is told."""

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

    def prepare(self, shapes: Shapes) -> None:
        """Make an optimizer on new matrices, and make sure that it comes from the right tree."""
        origin = Path(self._ask({"shapes": shapes}))
        if self._kernels.resolve() not in origin.resolve().parents:
            raise RuntimeError(f"muonrl_kernels came from {origin}, not from {self._kernels}")

    def seconds(self) -> float:
        """Duration of one step."""
        return float(self._ask({"step": True}))


def compare(
    base: str,
    cases: Sequence[Case],
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

    Each pair of processes takes turns, step by step; several pairs are started one after the other, since where a process
    has its memory can matter as much as its code. The side that goes first changes from pair to pair.
    """
    samples: dict[str, dict[str, list[float]]] = {case.name: {"base": [], "new": []} for case in cases}
    cut = {
        case.name: case.shapes if device != "cpu" else shrink(case.shapes, _CPU_STEP_FLOPS) for case in cases
    }
    with kernels_of(base, root) as old:
        for pair in range(processes):
            log(f"pair {pair + 1} of {processes}")
            with Worker(old, device, threads) as before, Worker(root / "kernels", device, threads) as after:
                order = [("base", before), ("new", after)][:: -1 if pair % 2 else 1]
                for case in cases:
                    for _, worker in order:
                        worker.prepare(cut[case.name])
                    taken = interleave({side: worker.seconds for side, worker in order}, rounds)
                    for side, seconds in taken.items():
                        samples[case.name][side] += seconds
    return [
        Comparison(
            case.name,
            cut[case.name],
            ratio(samples[case.name]["new"], samples[case.name]["base"]),
            threshold,
        )
        for case in cases
    ]


def to_table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a Markdown table."""
    rows = [
        (
            c.case,
            f"{c.ratio.median:.3f}",
            f"{c.ratio.lower:.3f}-{c.ratio.upper:.3f}",
            str(c.ratio.count),
            f"{flops_of(c.shapes) * 1e-9:.4g}",
            c.verdict,
            describe(c.shapes),
        )
        for c in comparisons
    ]
    head = ("case", "time / base", "quartiles", "rounds", "GFLOP", "verdict", "matrices")
    return table(head, rows)

"""What a run found, as data classes that go to JSON and come back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import Shapes
from benchmarks.entrant import OURS
from benchmarks.measure import Spread, ratio, spread

__all__ = ["CaseResult", "Gate", "Measurement", "Report", "load", "save"]

FORMAT: Final = 2


@dataclass(frozen=True)
class Gate:
    """Outcome of the correctness gate for one implementation."""

    name: str
    note: str
    compute: str
    passed: bool
    error: float
    bound: float
    reason: str = ""


@dataclass(frozen=True)
class Measurement:
    """Samples of one implementation on one subset of a case.

    `shapes` are (size, size, count), of which a subset has less; `what` describes the subset and `work` is its size in the
    case's own measure. `samples` are seconds of one call, one a round. Measurements of one `group` took turns on the same
    data, so they can be compared round by round. `memory` is in bytes; operations, bytes and launches are the cost model's
    (0: not modelled). `floor` are the operations that no implementation can do without, 0 where there is no such bound.
    """

    implementation: str
    shapes: Shapes
    what: str
    work: float
    samples: tuple[float, ...]
    memory: int | None
    flops: float
    nbytes: float
    launches: float
    compute: str
    group: int
    floor: float = 0.0

    @property
    def seconds(self) -> Spread:
        """Summary of the samples."""
        return spread(self.samples)


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case, or the reason why there are none; `left_out` are implementations that failed in it."""

    case: str
    title: str
    shapes: Shapes
    work: float
    measurements: tuple[Measurement, ...] = ()
    skipped: str = ""
    left_out: dict[str, str] = field(default_factory=dict)

    def baseline(self, of: Measurement, name: str = OURS) -> Measurement | None:
        """Ours, measured in the same rounds and on exactly the same data."""
        for m in self.measurements:
            if m.implementation == name and m.group == of.group and m.shapes == of.shapes:
                return m
        return None

    def ratio(self, of: Measurement, to: str = OURS) -> Spread | None:
        """How many times as long as ours (or as another one of the same group), round by round."""
        ours = self.baseline(of, to)
        return ratio(of.samples, ours.samples) if ours is not None else None

    def extrapolated(self, of: Measurement) -> float | None:
        """Seconds for the whole case if time goes with its work; None unless every shape was measured.

        An extrapolation, not a measurement, unless `of` covers the case (then it is the median).
        """
        if {s[:2] for s in of.shapes} != {s[:2] for s in self.shapes}:
            return None
        return of.seconds.median * self.work / of.work


@dataclass(frozen=True)
class Report:
    """Everything about one run; `title` names the suite and `call` what was timed."""

    title: str
    call: str
    command: str
    machine: dict[str, Any]
    gemm: dict[str, float]
    copy: float
    gates: tuple[Gate, ...]
    unavailable: dict[str, str]
    cases: tuple[CaseResult, ...]
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def gemm_share(self, of: Measurement) -> float:
        """Operations of the cost model over the shortest time, as a share of the machine's own GEMM rate."""
        return of.flops / min(of.samples) / self.gemm[of.compute]

    def floor_share(self, of: Measurement) -> float:
        """Operations that nobody can do without over the shortest time, as a share of the machine's own GEMM rate."""
        return of.floor / min(of.samples) / self.gemm[of.compute]

    def copy_share(self, of: Measurement) -> float:
        """Bytes of the cost model over the shortest time, as a share of the machine's own copy rate."""
        return of.nbytes / min(of.samples) / self.copy


def save(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")


def _shapes(rows: Any) -> Shapes:
    return tuple((int(a), int(b), int(c)) for a, b, c in rows)


def _measurement(data: dict[str, Any]) -> Measurement:
    return Measurement(**{**data, "shapes": _shapes(data["shapes"]), "samples": tuple(data["samples"])})


def _case(data: dict[str, Any]) -> CaseResult:
    measured = tuple(_measurement(m) for m in data["measurements"])
    return CaseResult(**{**data, "shapes": _shapes(data["shapes"]), "measurements": measured})


def load(path: Path) -> Report:
    """Read a report back.

    Raises:
        ValueError: the file has another format.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} has format {data.get('format')!r}, this version reads {FORMAT}")
    gates = tuple(Gate(**g) for g in data["gates"])
    cases = tuple(_case(c) for c in data["cases"])
    return Report(**{**data, "gates": gates, "cases": cases, "notes": tuple(data["notes"])})

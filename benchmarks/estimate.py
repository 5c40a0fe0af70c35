"""Step times of GPUs that are not at hand, from the cost model. Estimates, never measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.cases import Case
from benchmarks.cost import Op, step_ops
from benchmarks.report import table

__all__ = ["GPUS", "Assumptions", "Gpu", "estimate", "estimate_text"]


@dataclass(frozen=True)
class Gpu:
    """Peak rate of dense half-precision products in FLOP/s and bandwidth of the memory in bytes/s, by the data sheet."""

    name: str
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Assumptions:
    """What share of the peaks is reached. Not measured: a different share moves every estimate in proportion."""

    gemm: float = 0.80
    triangle: float = 0.70
    """Rate of a product that computes one triangle, relative to `gemm`."""
    bandwidth: float = 0.90
    launch: float = 2e-6
    """Shortest time of a launch, in seconds."""


GPUS: Final = (
    Gpu("A100 80GB SXM", 312e12, 2.039e12),
    Gpu("H100 SXM", 989e12, 3.35e12),
    Gpu("H200 SXM", 989e12, 4.8e12),
    Gpu("B200", 2250e12, 8.0e12),
)
_SHOWN: Final = (
    ("muonrl (Triton)", "fused"),
    ("torch.optim.Muon", "torch"),
    ("gram-newton-schulz", "gram batched"),
    ("dion (Triton)", "symmetric batched"),
    ("plain batched", "eager batched"),
)


def _seconds(op: Op, gpu: Gpu, a: Assumptions) -> float:
    rate = gpu.flops * a.gemm * (a.triangle if op.kind == "triangle" else 1.0)
    return max(op.flops / rate, op.nbytes / (gpu.bandwidth * a.bandwidth), op.launches * a.launch)


def estimate(ops: Iterable[Op], gpu: Gpu, assumptions: Assumptions = Assumptions()) -> float:
    """Seconds of a step: each kernel takes the longest of its arithmetic, its traffic and its launches."""
    return sum(_seconds(op, gpu, assumptions) for op in ops)


def _milliseconds(seconds: float) -> str:
    return f"~{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"~{seconds * 1e3:.2g} ms"


def estimate_text(cases: Sequence[Case], assumptions: Assumptions = Assumptions()) -> str:
    """A labelled table of estimates in milliseconds, with the assumptions above it."""
    a = assumptions
    lines = [
        "ESTIMATE from the cost model, not a measurement. Assumed: dense half-precision peaks and bandwidths "
        + ", ".join(
            f"{g.name} {g.flops * 1e-12:.0f} TFLOP/s and {g.bandwidth * 1e-12:.3g} TB/s" for g in GPUS
        )
        + f"; matrix products reach {a.gemm:.0%} of the peak, products of one triangle {a.triangle:.0%} of that, "
        f"memory {a.bandwidth:.0%} of its bandwidth, a launch takes at least {a.launch * 1e6:.0f} µs.",
        "",
    ]
    rows = []
    for case in cases:
        for label, algorithm in _SHOWN:
            ops = step_ops(algorithm, case.shapes)
            times = [_milliseconds(estimate(ops, gpu, a)) for gpu in GPUS]
            tera = f"{sum(o.flops for o in ops) * 1e-12:.3g}"
            giga = f"{sum(o.nbytes for o in ops) * 1e-9:.3g}"
            rows.append((label, case.name, tera, giga, f"{sum(o.launches for o in ops):.0f}", *times))
    head = ("estimate", "case", "TFLOP", "GB", "launches", *(gpu.name for gpu in GPUS))
    return "\n".join([*lines, table(head, rows)])

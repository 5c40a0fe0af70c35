"""Step times of GPUs that are not at hand, from the cost model. Estimates, never measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.cases import Case
from benchmarks.cost import Op, step_ops
from benchmarks.loss_cases import LossCase, valid_rows
from benchmarks.loss_cost import Problem, loss_ops
from benchmarks.report import table

__all__ = ["GPUS", "Assumptions", "Gpu", "estimate", "estimate_loss_text", "estimate_text"]


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
_SHOWN_LOSSES: Final = (
    ("muonrl", "single pass", 2048),
    ("muonrl fused", "fused", 2048),
    ("naive", "naive", 2048),
    ("checkpoint", "checkpoint", 2048),
    ("trl", "recompute", 4096),
)
"""Label, algorithm and rows of a chunk; those whose gradient products run in fp32 are not modelled."""


def _seconds(op: Op, gpu: Gpu, a: Assumptions) -> float:
    rate = gpu.flops * a.gemm * (a.triangle if op.kind == "triangle" else 1.0)
    return max(op.flops / rate, op.nbytes / (gpu.bandwidth * a.bandwidth), op.launches * a.launch)


def estimate(ops: Iterable[Op], gpu: Gpu, assumptions: Assumptions = Assumptions()) -> float:
    """Seconds of a step: each kernel takes the longest of its arithmetic, its traffic and its launches."""
    return sum(_seconds(op, gpu, assumptions) for op in ops)


def _milliseconds(seconds: float) -> str:
    return f"~{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"~{seconds * 1e3:.2g} ms"


Row = tuple[str, str, list[Op]]
"""What is estimated, the case, and its kernels."""


def _text(rows: Iterable[Row], a: Assumptions) -> str:
    """A labelled table of estimates in milliseconds, with the assumptions above it."""
    listed = list(rows)
    triangles = any(op.kind == "triangle" for *_, ops in listed for op in ops)
    lines = [
        "ESTIMATE from the cost model, not a measurement. Assumed: dense half-precision peaks and bandwidths "
        + ", ".join(
            f"{g.name} {g.flops * 1e-12:.0f} TFLOP/s and {g.bandwidth * 1e-12:.3g} TB/s" for g in GPUS
        )
        + f"; matrix products reach {a.gemm:.0%} of the peak, "
        + (f"products of one triangle {a.triangle:.0%} of that, " if triangles else "")
        + f"memory {a.bandwidth:.0%} of its bandwidth, a launch takes at least {a.launch * 1e6:.0f} µs.",
        "",
    ]
    cells = [
        (
            label,
            case,
            f"{sum(o.flops for o in ops) * 1e-12:.3g}",
            f"{sum(o.nbytes for o in ops) * 1e-9:.3g}",
            f"{sum(o.launches for o in ops):.0f}",
            *(_milliseconds(estimate(ops, gpu, a)) for gpu in GPUS),
        )
        for label, case, ops in listed
    ]
    head = ("estimate", "case", "TFLOP", "GB", "launches", *(gpu.name for gpu in GPUS))
    return "\n".join([*lines, table(head, cells)])


def estimate_text(cases: Sequence[Case], assumptions: Assumptions = Assumptions()) -> str:
    """Estimates of an optimizer step, labelled as such."""
    rows = (
        (label, case.name, step_ops(algorithm, case.shapes)) for case in cases for label, algorithm in _SHOWN
    )
    return _text(rows, assumptions)


def estimate_loss_text(cases: Sequence[LossCase], assumptions: Assumptions = Assumptions()) -> str:
    """Estimates of a forward and backward pass of the linear loss on bf16 inputs, labelled as such."""

    def problem(case: LossCase, chunk: int) -> Problem:
        valid = valid_rows(case.rows, case.share)
        return Problem(case.rows, valid, case.hidden, case.vocabulary, 2, chunk)

    rows = (
        (label, case.name, loss_ops(algorithm, problem(case, chunk)))
        for case in cases
        if case.kind == "linear"
        for label, algorithm, chunk in _SHOWN_LOSSES
    )
    return _text(rows, assumptions)

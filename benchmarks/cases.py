"""What is measured: the hidden matrices of models, single shapes, and stated subsets of them that fit a time budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.flops import standard_flops

__all__ = [
    "CASES",
    "Case",
    "Shapes",
    "choose_cases",
    "describe",
    "flops_of",
    "matrices",
    "parameters_of",
    "shrink",
]

Shapes = tuple[tuple[int, int, int], ...]
"""(rows, columns, count) of each distinct matrix shape."""


@dataclass(frozen=True)
class Case:
    """A set of matrices that one optimizer step updates."""

    name: str
    title: str
    shapes: Shapes

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return parameters_of(self.shapes)


def _qwen3(layers: int, hidden: int, ffn: int, kv: int) -> Shapes:
    """Hidden matrices of a Qwen3-like model: gate and up, down, q and o, k and v of each layer."""
    return (
        (ffn, hidden, 2 * layers),
        (hidden, ffn, layers),
        (hidden, hidden, 2 * layers),
        (kv, hidden, 2 * layers),
    )


_ALL: Final = (
    Case("qwen3-60m", "Qwen3-like, 14 layers, H 512", _qwen3(14, 512, 1536, 256)),
    Case("qwen3-300m", "Qwen3-like, 24 layers, H 1024", _qwen3(24, 1024, 3072, 512)),
    Case("minicpm5-2b", "MiniCPM5-2B, 294 hidden matrices", _qwen3(42, 2048, 6144, 256)),
    Case(
        "qwen3.5-4b",
        "Qwen3.5-4B, 200 hidden matrices",
        (
            (9216, 2560, 64),
            (2560, 9216, 32),
            (8192, 2560, 32),
            (2560, 4096, 32),
            (4096, 2560, 24),
            (1024, 2560, 16),
        ),
    ),
    Case("square", "one 1024 x 1024 matrix", ((1024, 1024, 1),)),
    Case("wide", "one 512 x 2048 matrix", ((512, 2048, 1),)),
    Case("tall", "one 2048 x 512 matrix", ((2048, 512, 1),)),
    Case("small", "32 matrices of 64 x 192", ((64, 192, 32),)),
)
CASES: Final[dict[str, Case]] = {case.name: case for case in _ALL}


def choose_cases(names: Sequence[str] | None) -> list[Case]:
    """Cases by name, all of them for None.

    Raises:
        ValueError: an unknown name.
    """
    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise ValueError(f"cases must be among {', '.join(CASES)}; got {', '.join(unknown)}")
    return [CASES[name] for name in names] if names else list(_ALL)


def flops_of(shapes: Shapes) -> float:
    """Operations of the standard five-step iteration over all matrices: the measure by which work is compared."""
    return sum(standard_flops(*sorted((rows, columns))) * count for rows, columns, count in shapes)


def matrices(shapes: Shapes) -> Iterator[tuple[int, int]]:
    """(rows, columns) of every single matrix, in order."""
    for rows, columns, count in shapes:
        for _ in range(count):
            yield rows, columns


def parameters_of(shapes: Shapes) -> int:
    """Number of weights of all matrices."""
    return sum(rows * columns * count for rows, columns, count in shapes)


def shrink(shapes: Shapes, limit: float, parameters: float = float("inf")) -> Shapes:
    """The largest stated subset with at most `limit` operations of the standard iteration and so many `parameters`.

    First all counts are divided by 2, 4, 8, ...; where one matrix of each shape is still too much, the most expensive
    shapes are left out. Empty if nothing fits.
    """

    def fits(subset: Shapes) -> bool:
        return flops_of(subset) <= limit and parameters_of(subset) <= parameters

    divisor = 1
    while True:
        subset = tuple((rows, columns, max(1, count // divisor)) for rows, columns, count in shapes)
        if fits(subset):
            return subset
        if all(count == 1 for *_, count in subset):
            break
        divisor *= 2
    kept = sorted(subset, key=lambda shape: flops_of((shape,)))
    while kept and not fits(tuple(kept)):
        kept.pop()
    return tuple(shape for shape in subset if shape in kept)


def describe(shapes: Shapes) -> str:
    """Such as "(1536, 512) x 28, (512, 512) x 28"."""
    return ", ".join(f"({rows}, {columns}) x {count}" for rows, columns, count in shapes)

"""What the loss is measured on: rows N, width H, vocabulary V and the share of valid tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.cases import Shapes
from benchmarks.loss_cost import floor_flops

__all__ = ["LOSS_CASES", "LossCase", "choose_loss_cases", "describe_rows", "shrink_rows", "valid_rows"]

Kind = Literal["linear", "elementwise"]


def valid_rows(rows: int, share: float) -> int:
    """How many of `rows` rows are valid: the nearest whole number, at least one."""
    return max(1, round(rows * share))


@dataclass(frozen=True)
class LossCase:
    """One forward and backward pass: the linear loss on [rows, hidden] and [vocabulary, hidden], or the elementwise one.

    `share` is the part of the rows whose mask is true; `device` is the kind that the case is meant for, None for both.
    """

    name: str
    title: str
    rows: int
    hidden: int
    vocabulary: int
    share: float = 1.0
    device: str | None = None
    kind: Kind = "linear"

    @property
    def shapes(self) -> Shapes:
        """((hidden, vocabulary, rows),): fewer rows are a subset of the case."""
        return ((self.hidden, self.vocabulary, self.rows),)

    @property
    def floor(self) -> float:
        """6 N H V over the valid rows; 0 for the elementwise loss."""
        if self.kind == "elementwise":
            return 0.0
        return floor_flops(valid_rows(self.rows, self.share), self.hidden, self.vocabulary)


def _shares(name: str, model: str, rows: int, hidden: int, vocabulary: int, device: str) -> list[LossCase]:
    return [
        LossCase(
            f"{name}-{percent}",
            f"{model}, N {rows}, H {hidden}, V {vocabulary}, {percent} % of the tokens valid",
            rows,
            hidden,
            vocabulary,
            percent / 100,
            device,
        )
        for percent in (100, 30, 10)
    ]


_ALL: Final = (
    LossCase("tokens", "policy_loss alone, 1,048,576 tokens", 1 << 20, 1, 1, kind="elementwise"),
    LossCase("trainer", "the small trainer's head, N 8192, H 128, V 1024", 8192, 128, 1024),
    *_shares("h512", "Qwen's vocabulary", 4096, 512, 151936, "cpu"),
    *_shares("h2560", "a 4 B model", 32768, 2560, 151936, "cuda"),
    *_shares("h4096", "an 8 B model", 32768, 4096, 131072, "cuda"),
)
LOSS_CASES: Final[dict[str, LossCase]] = {case.name: case for case in _ALL}


def choose_loss_cases(names: Sequence[str] | None, device: str) -> list[LossCase]:
    """Cases by name; for None all that are meant for that kind of device.

    Raises:
        ValueError: an unknown name.
    """
    unknown = [name for name in names or () if name not in LOSS_CASES]
    if unknown:
        raise ValueError(f"cases must be among {', '.join(LOSS_CASES)}; got {', '.join(unknown)}")
    if names:
        return [LOSS_CASES[name] for name in names]
    return [case for case in _ALL if case.device in (None, device)]


def shrink_rows(case: LossCase, limit: float) -> int:
    """The rows of the case, halved until at most `limit`; 0 where not even one is."""
    rows = case.rows
    while rows > limit:
        rows //= 2
    return rows


def describe_rows(case: LossCase, rows: int) -> str:
    """Such as "1024 of 4096 rows, 307 of them valid"."""
    return f"{rows} of {case.rows} rows, {valid_rows(rows, case.share)} of them valid"

"""Polynomial schedules of the Newton-Schulz iteration, each with its source.

Step t maps a singular value s to ``a s + b s^3 + c s^5``. A schedule is immutable: a tuple of (a, b, c), the steps after
which the Gram form restarts (recomputes X X^T from the current X), and where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = [
    "CANS",
    "KJ",
    "KJ10",
    "MAX_STEPS",
    "POLAR_EXPRESS",
    "PRESETS",
    "YOU",
    "Schedule",
    "Triple",
    "resolve_schedule",
]

Triple: TypeAlias = tuple[float, float, float]
MAX_STEPS: Final = 99


@dataclass(frozen=True)
class Schedule:
    """An immutable sequence of quintic steps.

    Attributes:
        name: how ``orthogonalize(schedule=...)`` finds it.
        source: where the coefficients were published.
        coefficients: one (a, b, c) a step, of the schedule's natural length.
        restarts: numbers of steps done when the Gram form recomputes its Gram matrix.
        tail: the step repeated beyond the natural length; None if the schedule cannot be longer.
        prefix_valid: whether the first k steps are a sensible schedule of k steps.
    """

    name: str
    source: str
    coefficients: tuple[Triple, ...]
    restarts: tuple[int, ...] = ()
    tail: Triple | None = None
    prefix_valid: bool = False

    def __len__(self) -> int:
        return len(self.coefficients)

    def with_steps(self, steps: int | None) -> Schedule:
        """The same schedule with `steps` steps (None: its natural number).

        Raises:
            ValueError: `steps` is outside 1..99 or this schedule is not defined for it.
        """
        natural = len(self.coefficients)
        if steps is None or steps == natural:
            return self
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"the number of steps must lie in 1..{MAX_STEPS}, got {steps}")
        if (steps < natural and not self.prefix_valid) or (steps > natural and self.tail is None):
            raise ValueError(f"schedule {self.name!r} is defined for {natural} steps, not for {steps}")
        chosen = self.coefficients[:steps]
        if self.tail is not None:
            chosen += (self.tail,) * (steps - len(chosen))
        kept = tuple(r for r in self.restarts if r < steps)
        return Schedule(self.name, self.source, chosen, kept, self.tail, self.prefix_valid)


def _restart_rule(steps: int) -> tuple[int, ...]:
    """Restarts of a schedule nobody has studied: after every second step, never after the last one."""
    return tuple(range(2, steps, 2))


def _safe(raw: Sequence[Triple], s: float) -> tuple[Triple, ...]:
    """Shrink the input range of each polynomial by `s`: p(x) becomes p(x / s)."""
    return tuple((a / s, b / s**3, c / s**5) for a, b, c in raw)


_KJ_STEP: Final[Triple] = (3.4445, -4.7750, 2.0315)

KJ: Final = Schedule(
    "kj",
    "Keller Jordan, Muon: An optimizer for hidden layers in neural networks (2024); torch.optim.Muon's default",
    (_KJ_STEP,) * 5,
    restarts=(3,),
    tail=_KJ_STEP,
    prefix_valid=True,
)

YOU: Final = Schedule(
    "you",
    "Jiacheng You, per-step coefficients for five steps, published in the modded-nanogpt speed-run (2025)",
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    restarts=(2,),
)

_POLAR_TAIL: Final[Triple] = (1.875, -1.25, 0.375)

POLAR_EXPRESS: Final = Schedule(
    "polar_express",
    "Amsel, Persson, Musco, Gower: The Polar Express (arXiv 2505.16932); safety factor 1.05 on the steps before the tail",
    _safe(
        (
            (8.28721, -23.59589, 17.30039),
            (4.10706, -2.94785, 0.54484),
            (3.94869, -2.90890, 0.55182),
            (3.31842, -2.48849, 0.51005),
            (2.30065, -1.66890, 0.41881),
        ),
        1.05,
    ),
    restarts=(2,),
    tail=_POLAR_TAIL,
    prefix_valid=True,
)

CANS: Final = Schedule(
    "cans",
    "Grishina, Smirnov, Rakhuba: Accelerating Newton-Schulz iteration with Chebyshev-type polynomials (arXiv 2506.10935)",
    (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    restarts=(2,),
)

KJ10: Final = Schedule(
    "kj10",
    "Keller Jordan's step eight times, then twice the convergent step (2, -1.5, 0.5)",
    (_KJ_STEP,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    restarts=(3, 6),
)

PRESETS: Final[dict[str, Schedule]] = {s.name: s for s in (KJ, YOU, POLAR_EXPRESS, CANS, KJ10)}


def _is_triple(spec: Sequence[object]) -> bool:
    return len(spec) == 3 and all(isinstance(v, (int, float)) for v in spec)


def resolve_schedule(
    spec: str | Schedule | Sequence[float] | Sequence[Triple], steps: int | None = None
) -> Schedule:
    """Make a :class:`Schedule` from what a caller may pass.

    Args:
        spec: a preset's name, a Schedule, one (a, b, c) that is repeated (`steps` times, 5 by default), or a sequence of
            (a, b, c), one a step.
        steps: number of steps; None takes the schedule's own number.

    Raises:
        ValueError: unknown name, malformed coefficients, or a number of steps for which the schedule is not defined.
    """
    if isinstance(spec, Schedule):
        return spec.with_steps(steps)
    if isinstance(spec, str):
        if spec not in PRESETS:
            raise ValueError(f"unknown schedule {spec!r}; the presets are {', '.join(PRESETS)}")
        return PRESETS[spec].with_steps(steps)
    if _is_triple(spec):
        a, b, c = (float(v) for v in spec)  # type: ignore[arg-type]
        if (a, b, c) == _KJ_STEP:
            return KJ.with_steps(steps)
        count = 5 if steps is None else steps
        custom = Schedule("custom", "given by the caller", ((a, b, c),), (), (a, b, c), True).with_steps(
            count
        )
        return Schedule("custom", custom.source, custom.coefficients, _restart_rule(count), custom.tail, True)
    rows: list[Triple] = []
    for row in spec:
        if isinstance(row, (int, float)) or not _is_triple(row):
            raise ValueError(f"a schedule is a name, one (a, b, c) or a sequence of (a, b, c); got {spec!r}")
        rows.append((float(row[0]), float(row[1]), float(row[2])))
    if not rows:
        raise ValueError("a schedule needs at least one step")
    known = next((p for p in PRESETS.values() if p.coefficients == tuple(rows)), None)
    found = known or Schedule("custom", "given by the caller", tuple(rows), _restart_rule(len(rows)))
    return found.with_steps(steps)

"""The exponential moving average under which success is shown: span 5, started at the first observation."""

from __future__ import annotations

from collections.abc import Iterable


def ema_step(previous: float | None, value: float, span: int = 5) -> float:
    """One step with alpha = 2 / (span + 1); ``previous`` is None before the first observation."""
    alpha = 2.0 / (span + 1)
    return float(value) if previous is None else alpha * value + (1.0 - alpha) * previous


def ema(values: Iterable[float], span: int = 5) -> list[float]:
    """The running average of a whole series, of the same length."""
    result: list[float] = []
    for value in values:
        result.append(ema_step(result[-1] if result else None, value, span))
    return result

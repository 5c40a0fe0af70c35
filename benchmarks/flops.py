"""Operations of the Newton-Schulz iteration on one matrix, in closed form.

A matrix has the short side m and the long side n; T is the number of steps and r that of Gram restarts. Multiply and add
count 2; a product that computes one triangle of a symmetric result counts half.

    standard     T (4 m^2 n + 2 m^3)
    symmetric    T (3 m^2 n + m^3)
    Gram         (1 + r) 3 m^2 n + (T + 3 (T - 1 - r)) m^3
"""

from __future__ import annotations

from typing import Final

__all__ = ["RESTARTS", "STEPS", "gram_flops", "standard_flops", "symmetric_flops"]

STEPS: Final = 5
RESTARTS: Final = 1


def standard_flops(m: int, n: int, steps: int = STEPS) -> float:
    """Operations of the standard iteration on one m x n matrix, m <= n."""
    return steps * (4.0 * m * m * n + 2.0 * float(m) ** 3)


def symmetric_flops(m: int, n: int, steps: int = STEPS) -> float:
    """Operations of the standard iteration whose symmetric products compute one triangle."""
    return steps * (3.0 * m * m * n + float(m) ** 3)


def gram_flops(m: int, n: int, steps: int = STEPS, restarts: int = RESTARTS) -> float:
    """Operations of the Gram form with triangular products: (6 alpha + 14) m^3 for five steps and one restart."""
    return (1 + restarts) * 3.0 * m * m * n + (steps + 3.0 * (steps - 1 - restarts)) * float(m) ** 3

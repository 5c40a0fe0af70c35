"""Advantages of single rollouts: outcome minus baseline plus penalty, normalised over the update.

With r_i the reward of trajectory i, v_i its baseline, c_ik the penalty of its turn k and L_ik that turn's action tokens,
A_ik = r_i - v_i + c_ik. Two normalisations:

``action_token`` (SPO++, arXiv 2608.24870): mu = sum L A / sum L, sigma^2 = sum L (A - mu)^2 / (sum L - 1).
``trajectory`` (SPO, arXiv 2509.13232): one scalar a trajectory, A_i = sum_k L_ik A_ik / sum_k L_ik, with the mean and the
standard deviation (n - 1) over trajectories.
Either way A~ = (A - mu) / (sigma + 1e-8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Normalization = Literal["action_token", "trajectory"]
EPSILON = 1e-8
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Advantages:
    """The advantages of one update; each entry of ``turns`` and ``raw`` is float64 [turns of that trajectory].

    ``turns`` are normalised, ``raw`` are the A_ik. ``weighted_mean`` is sum L A~ / sum L: 0 up to rounding under
    ``action_token``, and in general not under ``trajectory``.
    """

    turns: tuple[Floats, ...]
    raw: tuple[Floats, ...]
    mu: float
    sigma: float
    weighted_mean: float

    def quantiles(self) -> list[float]:
        """Minimum, quartiles and maximum of the normalised advantages over all turns."""
        return [float(q) for q in np.quantile(np.concatenate(self.turns), [0.0, 0.25, 0.5, 0.75, 1.0])]


def compute_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    penalties: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    normalization: Normalization = "action_token",
) -> Advantages:
    """The normalised advantage of every turn of an update.

    ``rewards`` and ``values`` have one entry a trajectory; ``penalties`` and ``lengths`` one a turn of each trajectory.
    Raises ValueError for shapes that do not fit, non-finite numbers or a trajectory without action tokens, and
    FloatingPointError should the mean that normalisation makes 0 not be 0.
    """
    if not (len(rewards) == len(values) == len(penalties) == len(lengths)) or not rewards:
        raise ValueError(
            f"{len(rewards)} rewards, {len(values)} values, {len(penalties)} penalties, {len(lengths)} lengths"
        )
    raw, weights = [], []
    for i, (r, v, c, n) in enumerate(zip(rewards, values, penalties, lengths, strict=True)):
        if len(c) != len(n):
            raise ValueError(f"trajectory {i} has {len(c)} penalties for {len(n)} turns")
        raw.append(float(r) - float(v) + np.asarray(c, dtype=np.float64))
        weights.append(np.asarray(n, dtype=np.float64))
        if not np.isfinite(raw[-1]).all() or (weights[-1] < 0).any() or weights[-1].sum() < 1:
            raise ValueError(f"trajectory {i}: advantages {raw[-1]} over action tokens {weights[-1]}")
    if normalization == "action_token":
        per_turn, weight = np.concatenate(raw), np.concatenate(weights)
        mu, sigma = _moments(per_turn, weight)
        turns = [(a - mu) / (sigma + EPSILON) for a in raw]
    else:
        scalars = np.array([float((a * n).sum() / n.sum()) for a, n in zip(raw, weights, strict=True)])
        mu, sigma = _moments(scalars, np.ones_like(scalars))
        turns = [np.full_like(a, (s - mu) / (sigma + EPSILON)) for a, s in zip(raw, scalars, strict=True)]
    return Advantages(
        tuple(turns), tuple(raw), mu, sigma, _checked_mean(turns, weights, normalization == "action_token")
    )


def _moments(a: Floats, weight: Floats) -> tuple[float, float]:
    """Weighted mean and standard deviation with Bessel's correction; one lone unit of weight has deviation 0."""
    total = float(weight.sum())
    mu = float((weight * a).sum() / total)
    return mu, float(np.sqrt((weight * (a - mu) ** 2).sum() / max(total - 1.0, 1.0)))


def _checked_mean(turns: Sequence[Floats], weights: Sequence[Floats], by_token: bool) -> float:
    """sum L A~ / sum L, after checking that the mean which the normalisation promises to be 0 is 0."""
    weight, a = np.concatenate(weights), np.concatenate(turns)
    token_mean = float((weight * a).sum() / weight.sum())
    promised = token_mean if by_token else float(np.mean([t[0] for t in turns]))
    if not abs(promised) <= _TOLERANCE:
        raise FloatingPointError(f"normalised advantages have mean {promised:.3g}, expected 0")
    return token_mean

"""Presets: values, valid step counts, and what resolve_schedule accepts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from muonrl_kernels.coefficients import (
    CANS,
    KJ,
    KJ10,
    POLAR_EXPRESS,
    PRESETS,
    YOU,
    Schedule,
    resolve_schedule,
)


def _image(schedule: Schedule, s: np.ndarray) -> np.ndarray:
    for a, b, c in schedule.coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "reach"),
    [
        ("kj", 0.68, 1.14, 0.02),
        ("you", 0.70, 1.30, 0.01),
        ("polar_express", 0.80, 1.15, 0.01),
        ("cans", 0.80, 1.20, 0.01),
        ("kj10", 0.99, 1.01, 0.001),
    ],
)
def test_singular_values_end_near_one(name: str, lowest: float, highest: float, reach: float) -> None:
    image = _image(PRESETS[name], np.linspace(reach, 1.0, 20001))
    assert lowest < image.min() and image.max() < highest


def test_known_values() -> None:
    assert KJ.coefficients == ((3.4445, -4.7750, 2.0315),) * 5
    a, b, c = POLAR_EXPRESS.coefficients[0]
    assert (a * 1.05, b * 1.05**3, c * 1.05**5) == pytest.approx((8.28721, -23.59589, 17.30039))
    assert KJ10.coefficients[8:] == ((2.0, -1.5, 0.5),) * 2


def test_presets_are_immutable_and_name_their_source() -> None:
    for preset in PRESETS.values():
        assert preset.source
        assert all(0 < r < len(preset) for r in preset.restarts)
        with pytest.raises(dataclasses.FrozenInstanceError):
            preset.name = "other"  # type: ignore[misc]


def test_step_counts() -> None:
    assert len(KJ.with_steps(12)) == 12
    assert KJ.with_steps(3).restarts == () and KJ.with_steps(4).restarts == (3,)
    assert POLAR_EXPRESS.with_steps(8).coefficients[-1] == (1.875, -1.25, 0.375)
    assert YOU.with_steps(5) is YOU
    for schedule, steps in ((YOU, 4), (CANS, 6), (KJ10, 9), (KJ, 0), (KJ, 100)):
        with pytest.raises(ValueError, match="steps"):
            schedule.with_steps(steps)


def test_what_resolve_schedule_accepts() -> None:
    assert resolve_schedule("kj", 7) == KJ.with_steps(7)
    assert resolve_schedule((3.4445, -4.7750, 2.0315)) == KJ
    assert resolve_schedule(YOU.coefficients) is YOU
    custom = resolve_schedule((2.0, -1.5, 0.5), 4)
    assert custom.coefficients == ((2.0, -1.5, 0.5),) * 4 and custom.restarts == (2,)
    assert len(resolve_schedule([(2.0, -1.5, 0.5), (1.875, -1.25, 0.375)])) == 2
    for bad in ("kjj", [], [(1.0, 2.0)], (1.0, 2.0), [1.0, (1.0, 2.0, 3.0)]):
        with pytest.raises(ValueError):
            resolve_schedule(bad)

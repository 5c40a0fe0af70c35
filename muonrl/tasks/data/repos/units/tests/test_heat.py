"""Tests of units.heat."""

import pytest

from units.heat import frost_days, hottest, is_freezing, to_fahrenheit, warming


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), 32),
        ((100,), 212),
        ((-10,), 14),
        ((-273,), -460),
        ((-300,), None),
        ((5,), 41),
    ],
)
def test_to_fahrenheit(args, want):
    assert to_fahrenheit(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), True),
        ((1,), False),
        ((-1,), True),
        ((-1, True), False),
        ((-2, True), True),
        ((-3, True), True),
    ],
)
def test_is_freezing(args, want):
    assert is_freezing(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([4],), 0),
        (([1, 3, 2],), 1),
        (([2, 2],), 0),
        (([1, 2, 5],), 2),
    ],
)
def test_hottest(args, want):
    assert hottest(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([1, 0, -1],), 1),
        (([-2, -3],), 2),
    ],
)
def test_frost_days(args, want):
    assert frost_days(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), True),
        (([1, 2, 3],), True),
        (([1, 1],), False),
        (([2, 1],), False),
        (([1, 3, 2],), False),
    ],
)
def test_warming(args, want):
    assert warming(*args) == want

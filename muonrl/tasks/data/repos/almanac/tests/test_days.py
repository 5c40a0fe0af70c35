"""Tests of almanac.days."""

import pytest

from almanac.days import (
    day_of_year,
    days_left,
    is_valid,
    is_weekend,
    next_day,
    weekday_after,
    workdays,
)


@pytest.mark.parametrize(
    "args, want",
    [
        ((2023, 1, 5), 5),
        ((2023, 3, 1), 60),
        ((2024, 3, 1), 61),
        ((2023, 12, 31), 365),
    ],
)
def test_day_of_year(args, want):
    assert day_of_year(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2023, 2, 29), False),
        ((2024, 2, 29), True),
        ((2023, 13, 1), False),
        ((2023, 0, 1), False),
        ((2023, 5, 0), False),
        ((2023, 1, 1), True),
        ((2023, 12, 31), True),
    ],
)
def test_is_valid(args, want):
    assert is_valid(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2023, 1, 31), 0),
        ((2023, 4, 1), 29),
        ((2024, 2, 20), 9),
        ((2023, 4, 31), 0),
    ],
)
def test_days_left(args, want):
    assert days_left(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2023, 1, 1), (2023, 1, 2)),
        ((2023, 1, 31), (2023, 2, 1)),
        ((2023, 12, 31), (2024, 1, 1)),
        ((2023, 12, 5), (2023, 12, 6)),
    ],
)
def test_next_day(args, want):
    assert next_day(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 0), 0),
        ((5, 3), 1),
        ((2, 7), 2),
        ((0, 6), 6),
        ((1, 1), 2),
    ],
)
def test_weekday_after(args, want):
    assert weekday_after(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((4,), False),
        ((5,), True),
        ((6,), True),
        ((7,), False),
        ((-1,), False),
    ],
)
def test_is_weekend(args, want):
    assert is_weekend(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 7), 5),
        ((5, 2), 0),
        ((4, 3), 1),
        ((0, 0), 0),
    ],
)
def test_workdays(args, want):
    assert workdays(*args) == want

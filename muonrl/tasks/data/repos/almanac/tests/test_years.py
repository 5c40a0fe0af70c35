"""Tests of almanac.years."""

import pytest

from almanac.years import century, is_leap, leap_count, month_days, quarter, year_days


@pytest.mark.parametrize(
    "args, want",
    [
        ((2000,), True),
        ((1900,), False),
        ((2024,), True),
        ((2023,), False),
        ((2100,), False),
    ],
)
def test_is_leap(args, want):
    assert is_leap(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2024, 2), 29),
        ((2023, 2), 28),
        ((2023, 4), 30),
        ((2023, 1), 31),
        ((2023, 11), 30),
        ((2023, 12), 31),
    ],
)
def test_month_days(args, want):
    assert month_days(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2000, 2004), 2),
        ((2001, 2003), 0),
        ((2004, 2004), 1),
        ((1896, 1904), 2),
    ],
)
def test_leap_count(args, want):
    assert leap_count(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2024,), 366),
        ((2023,), 365),
        ((2000,), 366),
        ((1900,), 365),
    ],
)
def test_year_days(args, want):
    assert year_days(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((1,), 1),
        ((100,), 1),
        ((101,), 2),
        ((2000,), 20),
        ((2001,), 21),
        ((0,), 0),
    ],
)
def test_century(args, want):
    assert century(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((1,), 1),
        ((3,), 1),
        ((4,), 2),
        ((12,), 4),
        ((0,), 0),
        ((13,), 0),
    ],
)
def test_quarter(args, want):
    assert quarter(*args) == want

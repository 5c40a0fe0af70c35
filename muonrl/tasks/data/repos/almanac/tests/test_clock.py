"""Tests of almanac.clock."""

import pytest

from almanac.clock import (
    clock_text,
    elapsed,
    is_open,
    longest_shift,
    minutes_of,
    to_hour12,
    total_minutes,
)


@pytest.mark.parametrize(
    "args, want",
    [
        (("7",), 420),
        (("1:30",), 90),
        (("0:05",), 5),
        (("2:00",), 120),
    ],
)
def test_minutes_of(args, want):
    assert minutes_of(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((65,), "1:05"),
        ((90,), "1:30"),
        ((0,), "0:00"),
        ((610,), "10:10"),
        ((70,), "1:10"),
    ],
)
def test_clock_text(args, want):
    assert clock_text(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((60, 90), 30),
        ((90, 90), 0),
        ((1380, 60), 120),
    ],
)
def test_elapsed(args, want):
    assert elapsed(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), 12),
        ((9,), 9),
        ((12,), 12),
        ((15,), 3),
        ((24,), 12),
    ],
)
def test_to_hour12(args, want):
    assert to_hour12(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((5, 5, 9), True),
        ((9, 5, 9), False),
        ((7, 5, 9), True),
        ((23, 20, 6), True),
        ((6, 20, 6), False),
        ((3, 20, 6), True),
        ((20, 20, 6), True),
        ((10, 20, 6), False),
    ],
)
def test_is_open(args, want):
    assert is_open(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([(1, 4)],), 3),
        (([(1, 4), (2, 9), (5, 6)],), 7),
    ],
)
def test_longest_shift(args, want):
    assert longest_shift(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([(1, 4)],), 3),
        (([(1, 4), (10, 30)],), 23),
    ],
)
def test_total_minutes(args, want):
    assert total_minutes(*args) == want

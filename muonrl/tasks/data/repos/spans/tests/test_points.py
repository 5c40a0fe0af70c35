"""Tests of spans.points."""

import pytest

from spans.points import count_in, first_at, is_sorted, nearest, spread, steps


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 5, 9], 6), 5),
        (([1, 5, 9], 8), 9),
        (([1, 5], 3), 1),
        (([4], 0), 4),
        (([9, 5, 1], 0), 1),
    ],
)
def test_nearest(args, want):
    assert nearest(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 0, 5), 0),
        (([1, 2, 3], 2, 5), 2),
        (([1, 5, 9], 1, 5), 2),
        (([3], 4, 5), 0),
    ],
)
def test_count_in(args, want):
    assert count_in(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 3, 5], 3), 1),
        (([1, 3, 5], 4), 2),
        (([1, 3, 5], 9), 3),
        (([], 1), 0),
        (([2, 4], 0), 0),
    ],
)
def test_first_at(args, want):
    assert first_at(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([4],), 0),
        (([2, 7, 5],), 5),
    ],
)
def test_spread(args, want):
    assert spread(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([3],), []),
        (([1, 4, 9],), [3, 5]),
        (([5, 2],), [-3]),
    ],
)
def test_steps(args, want):
    assert steps(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), True),
        (([1, 2, 3],), True),
        (([2, 1],), False),
        (([1, 1],), True),
        (([1, 3, 2],), False),
    ],
)
def test_is_sorted(args, want):
    assert is_sorted(*args) == want

"""Tests of tally.averages."""

import pytest

from tally.averages import mean, median, trimmed, value_range, variance, weighted


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([4],), 4.0),
        (([1, 2],), 1.5),
        (([2, 4, 6],), 4.0),
    ],
)
def test_mean(args, want):
    assert mean(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([3],), 3),
        (([3, 1, 2],), 2),
        (([4, 1],), 2.5),
        (([1, 2, 3, 10],), 2.5),
    ],
)
def test_median(args, want):
    assert median(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([5],), 0),
        (([2, 7, 4],), 5),
    ],
)
def test_value_range(args, want):
    assert value_range(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([4], [1]), 4.0),
        (([1, 2], [1, 1]), 1.5),
        (([10, 20], [3, 1]), 12.5),
    ],
)
def test_weighted(args, want):
    assert weighted(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([5],), 0.0),
        (([1, 3],), 1.0),
        (([0, 0, 3],), 2.0),
        (([2, 2],), 0.0),
    ],
)
def test_variance(args, want):
    assert variance(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([2, 1],), [2, 1]),
        (([3, 1, 2],), [2]),
        (([4, 1, 2, 9],), [2, 4]),
    ],
)
def test_trimmed(args, want):
    assert trimmed(*args) == want

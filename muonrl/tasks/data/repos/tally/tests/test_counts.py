"""Tests of tally.counts."""

import pytest

from tally.counts import histogram, longest_run, mode, percent, share_above, unique


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), {}),
        (([1, 2, 1],), {1: 2, 2: 1}),
        ((["a"],), {"a": 1}),
    ],
)
def test_histogram(args, want):
    assert histogram(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([3],), 3),
        (([1, 2, 2],), 2),
        (([1, 2],), 1),
        (([5, 5, 1],), 5),
    ],
)
def test_mode(args, want):
    assert mode(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 2, 3, 4], 2), 0.5),
        (([1], 1), 0.0),
        (([5, 6], 0), 1.0),
    ],
)
def test_share_above(args, want):
    assert share_above(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([1, 2, 1],), [1, 2]),
        (([3, 3],), [3]),
    ],
)
def test_unique(args, want):
    assert unique(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([1],), 1),
        (([1, 1, 2],), 2),
        (([1, 2, 2, 2, 1],), 3),
        (([3, 3],), 2),
    ],
)
def test_longest_run(args, want):
    assert longest_run(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((1, 2), 50),
        ((0, 5), 0),
        ((3, 0), 0),
        ((5, 5), 100),
        ((1, 3), 33),
    ],
)
def test_percent(args, want):
    assert percent(*args) == want

"""Tests of tally.ranks."""

import pytest

from tally.ranks import grade, passed, rank, records, top, winner


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), 1),
        (([9, 7], 8), 2),
        (([9, 7], 7), 2),
        (([5, 5], 5), 1),
        (([1], 2), 1),
    ],
)
def test_rank(args, want):
    assert rank(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((["a"], [1]), "a"),
        ((["a", "b"], [1, 2]), "b"),
        ((["a", "b"], [2, 2]), "a"),
        ((["a", "b", "c"], [2, 3, 1]), "b"),
    ],
)
def test_winner(args, want):
    assert winner(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((95,), "A"),
        ((90,), "A"),
        ((80,), "B"),
        ((75,), "B"),
        ((60,), "C"),
        ((50,), "C"),
        ((49,), "F"),
    ],
)
def test_grade(args, want):
    assert grade(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([0],), 1),
        (([1, 2, 2, 3],), 3),
        (([3, 1, 2],), 1),
    ],
)
def test_records(args, want):
    assert records(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 3, 2], 2), [3, 2]),
        (([1, 3], 0), []),
        (([5], 3), [5]),
        (([4, 6], 1), [6]),
    ],
)
def test_top(args, want):
    assert top(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), []),
        (([4, 5, 6], 5), [5, 6]),
        (([1], 5), []),
    ],
)
def test_passed(args, want):
    assert passed(*args) == want

"""Tests of lineup.queue."""

import pytest

from lineup.queue import enqueue, front, next_job, place_of, served, wait_time


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 1), [1]),
        (([1], 2), [1, 2]),
        (([1, 2], 1), [1, 2]),
    ],
)
def test_enqueue(args, want):
    assert enqueue(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 2, 3], 2), [1, 2]),
        (([1], 0), []),
        (([1, 2], 5), [1, 2]),
        (([3, 4], 1), [3]),
    ],
)
def test_front(args, want):
    assert front(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 1), 0),
        (([5, 6], 5), 1),
        (([5, 6], 6), 2),
        (([5], 7), 0),
    ],
)
def test_place_of(args, want):
    assert place_of(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([4, 5], 0), 0),
        (([4, 5], 1), 4),
        (([4, 5, 6], 2), 9),
    ],
)
def test_wait_time(args, want):
    assert wait_time(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([3],), 0),
        (([3, 1, 2],), 1),
        (([2, 2],), 0),
        (([4, 3, 1],), 2),
        (([1, 2],), 0),
    ],
)
def test_next_job(args, want):
    assert next_job(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), 0),
        (([2, 3], 5), 2),
        (([2, 3], 4), 1),
        (([6], 5), 0),
    ],
)
def test_served(args, want):
    assert served(*args) == want

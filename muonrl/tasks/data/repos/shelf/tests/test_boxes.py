"""Tests of shelf.boxes."""

import pytest

from shelf.boxes import box_count, fill, fits, free_space, heaviest, split_boxes


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 0), True),
        (([2, 3], 5), True),
        (([2, 3], 4), False),
        (([1], 5), True),
    ],
)
def test_fits(args, want):
    assert fits(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 4), 0),
        ((4, 4), 1),
        ((5, 4), 2),
        ((1, 4), 1),
        ((9, 3), 3),
        ((-1, 4), 0),
    ],
)
def test_box_count(args, want):
    assert box_count(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), []),
        (([3, 4, 2], 5), [3, 2]),
        (([5, 1], 5), [5]),
        (([6], 5), []),
    ],
)
def test_fill(args, want):
    assert fill(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), 5),
        (([2, 1], 5), 2),
        (([5], 5), 0),
        (([6], 5), 0),
    ],
)
def test_free_space(args, want):
    assert free_space(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([4],), 0),
        (([1, 3, 2],), 1),
        (([2, 2],), 0),
        (([1, 2, 5],), 2),
    ],
)
def test_heaviest(args, want):
    assert heaviest(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 2), []),
        (([1, 2, 3], 2), [[1, 2], [3]]),
        (([1, 2], 2), [[1, 2]]),
        (([1], 3), [[1]]),
    ],
)
def test_split_boxes(args, want):
    assert split_boxes(*args) == want

"""Tests of lineup.ring."""

import pytest

from lineup.ring import every, interleave, is_full, next_slot, ring_gap, rotate


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 3), 1),
        ((2, 3), 0),
        ((1, 3), 2),
        ((0, 1), 0),
    ],
)
def test_next_slot(args, want):
    assert next_slot(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 2), []),
        (([1, 2, 3], 1), [2, 3, 1]),
        (([1, 2, 3], 0), [1, 2, 3]),
        (([1, 2, 3], 4), [2, 3, 1]),
    ],
)
def test_rotate(args, want):
    assert rotate(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((1, 3, 5), 2),
        ((3, 1, 5), 3),
        ((2, 2, 5), 0),
        ((4, 0, 6), 2),
    ],
)
def test_ring_gap(args, want):
    assert ring_gap(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2, 2), True),
        ((1, 2), False),
        ((3, 2), True),
        ((0, 0), True),
        ((-1, 0), True),
    ],
)
def test_is_full(args, want):
    assert is_full(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 2), []),
        (([1, 2, 3, 4, 5], 2), [1, 3, 5]),
        (([1, 2, 3], 1), [1, 2, 3]),
        (([1, 2, 3, 4], 3), [1, 4]),
    ],
)
def test_every(args, want):
    assert every(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], [1]), []),
        (([1, 2], [3, 4]), [1, 3, 2, 4]),
        (([1], [2, 3]), [1, 2]),
    ],
)
def test_interleave(args, want):
    assert interleave(*args) == want

"""Tests of spans.bounds."""

import pytest

from spans.bounds import clamp, gap, inside, middle, overlap


@pytest.mark.parametrize(
    "args, want",
    [
        ((5, 1, 3), 3),
        ((0, 1, 3), 1),
        ((2, 1, 3), 2),
        ((1, 1, 3), 1),
        ((3, 1, 3), 3),
    ],
)
def test_clamp(args, want):
    assert clamp(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2, 1, 3), True),
        ((1, 1, 3), True),
        ((3, 1, 3), True),
        ((4, 1, 3), False),
        ((0, 1, 3), False),
        ((2, 3, 1), False),
        ((2, 2, 2), True),
    ],
)
def test_inside(args, want):
    assert inside(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (((1, 4), (3, 8)), 2),
        (((1, 2), (5, 6)), 0),
        (((1, 3), (3, 5)), 1),
        (((0, 9), (2, 4)), 3),
    ],
)
def test_overlap(args, want):
    assert overlap(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (((1, 2), (5, 6)), 3),
        (((5, 6), (1, 2)), 3),
        (((1, 5), (3, 8)), 0),
        (((1, 3), (3, 5)), 0),
        (((0, 0), (1, 4)), 1),
    ],
)
def test_gap(args, want):
    assert gap(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((2, 6), 4),
        ((6, 2), 4),
        ((0, 5), 2),
        ((3, 3), 3),
    ],
)
def test_middle(args, want):
    assert middle(*args) == want

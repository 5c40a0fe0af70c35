"""Tests of gridkit.moves."""

import pytest

from gridkit.moves import (
    around,
    distance,
    index_of,
    king_distance,
    neighbours,
    position_of,
    same_line,
    step,
)


@pytest.mark.parametrize(
    "args, want",
    [
        (((0, 0), (0, 0)), 0),
        (((1, 2), (4, 6)), 7),
        (((3, 1), (1, 1)), 2),
        (((0, 5), (0, 2)), 3),
    ],
)
def test_distance(args, want):
    assert distance(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (((0, 0), (0, 0)), 0),
        (((1, 2), (4, 6)), 4),
        (((3, 1), (1, 2)), 2),
        (((0, 5), (0, 2)), 3),
    ],
)
def test_king_distance(args, want):
    assert king_distance(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((1, 1, "up"), (0, 1)),
        ((1, 1, "down"), (2, 1)),
        ((1, 1, "left"), (1, 0)),
        ((1, 1, "right"), (1, 2)),
    ],
)
def test_step(args, want):
    assert step(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 0), [(-1, 0), (0, -1), (0, 1), (1, 0)]),
        ((1, 1), [(0, 1), (1, 0), (1, 2), (2, 1)]),
        ((3, 1), [(2, 1), (3, 0), (3, 2), (4, 1)]),
    ],
)
def test_around(args, want):
    assert around(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 0, 1), []),
        ((0, 0, 2), [(0, 1), (1, 0)]),
        ((1, 1, 2), [(0, 1), (1, 0)]),
        ((1, 1, 3), [(0, 1), (1, 0), (1, 2), (2, 1)]),
    ],
)
def test_neighbours(args, want):
    assert neighbours(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (((0, 1), (0, 3)), True),
        (((0, 1), (2, 1)), True),
        (((0, 1), (1, 2)), False),
        (((1, 1), (1, 1)), False),
    ],
)
def test_same_line(args, want):
    assert same_line(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 0, 3), 0),
        ((1, 2, 3), 5),
        ((2, 0, 4), 8),
        ((0, 3, 3), -1),
    ],
)
def test_index_of(args, want):
    assert index_of(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 3), (0, 0)),
        ((5, 3), (1, 2)),
        ((8, 4), (2, 0)),
    ],
)
def test_position_of(args, want):
    assert position_of(*args) == want

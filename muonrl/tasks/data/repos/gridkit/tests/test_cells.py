"""Tests of gridkit.cells."""

import pytest

from gridkit.cells import cell_at, column_of, count_value, find_value, in_grid, make_grid


@pytest.mark.parametrize(
    "args, want",
    [
        (([[1, 2]], 0, 1), True),
        (([[1, 2]], 1, 0), False),
        (([[1, 2]], 0, 2), False),
        (([[1]], -1, 0), False),
        (([[1]], 0, -1), False),
        (([[1], [2]], 1, 0), True),
    ],
)
def test_in_grid(args, want):
    assert in_grid(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([[1, 2]], 0, 1), 2),
        (([[1, 2]], 0, 2), 0),
        (([[1]], 1, 0), 0),
        (([[1]], -1, 0), 0),
        (([[1]], 0, -1, 9), 9),
        (([[1], [2]], 1, 0), 2),
    ],
)
def test_cell_at(args, want):
    assert cell_at(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 2), []),
        ((1, 2), [[0, 0]]),
        ((2, 1, 5), [[5], [5]]),
        ((2, 3), [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_make_grid(args, want):
    assert make_grid(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 1), 0),
        (([[1, 2], [1, 1]], 1), 3),
        (([[0]], 1), 0),
    ],
)
def test_count_value(args, want):
    assert count_value(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 1), None),
        (([[1, 2], [3, 4]], 3), (1, 0)),
        (([[1, 2]], 2), (0, 1)),
        (([[0]], 5), None),
    ],
)
def test_find_value(args, want):
    assert find_value(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 0), []),
        (([[1, 2], [3, 4]], 0), [1, 3]),
        (([[1, 2], [3, 4]], 1), [2, 4]),
    ],
)
def test_column_of(args, want):
    assert column_of(*args) == want

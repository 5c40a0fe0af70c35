"""Tests of gridkit.rows."""

import pytest

from gridkit.rows import best_row, border_count, diagonal, flip_rows, row_sums


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([[1, 2], [3, 4]],), [3, 7]),
        (([[5]],), [5]),
    ],
)
def test_row_sums(args, want):
    assert row_sums(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([[1], [3], [2]],), 1),
        (([[2, 2], [1, 1]],), 0),
        (([[1], [1]],), 0),
    ],
)
def test_best_row(args, want):
    assert best_row(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([[1, 2]],), [[2, 1]]),
        (([[1, 2, 3], [4, 5, 6]],), [[3, 2, 1], [6, 5, 4]]),
    ],
)
def test_flip_rows(args, want):
    assert flip_rows(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([[7]],), [7]),
        (([[1, 2], [3, 4]],), [1, 4]),
    ],
)
def test_diagonal(args, want):
    assert diagonal(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, 3), 0),
        ((3, 0), 0),
        ((1, 4), 4),
        ((4, 1), 4),
        ((2, 2), 4),
        ((3, 4), 10),
        ((-1, 1), 0),
    ],
)
def test_border_count(args, want):
    assert border_count(*args) == want

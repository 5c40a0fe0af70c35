"""Tests of matrices.vectors."""

import pytest

from matrices.vectors import add, dot, is_zero, largest_at, norm1, scale


@pytest.mark.parametrize(
    "args, want",
    [
        (([], []), 0),
        (([2], [3]), 6),
        (([1, 2], [3, 4]), 11),
    ],
)
def test_dot(args, want):
    assert dot(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], []), []),
        (([2], [3]), [5]),
        (([1, 2], [3, 4]), [4, 6]),
    ],
)
def test_add(args, want):
    assert add(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 2], 1), [1, 2]),
        (([1, 2], 3), [3, 6]),
        (([], 2), []),
        (([4], 0), [0]),
    ],
)
def test_scale(args, want):
    assert scale(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([4],), 0),
        (([1, 3, 2],), 1),
        (([2, 2],), 0),
        (([1, 2, 5],), 2),
    ],
)
def test_largest_at(args, want):
    assert largest_at(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([3],), 3),
        (([1, -2],), 3),
    ],
)
def test_norm1(args, want):
    assert norm1(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), True),
        (([0, 0],), True),
        (([0, 1],), False),
        (([-1],), False),
    ],
)
def test_is_zero(args, want):
    assert is_zero(*args) == want

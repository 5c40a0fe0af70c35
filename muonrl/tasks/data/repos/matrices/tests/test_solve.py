"""Tests of matrices.solve."""

import pytest

from matrices.solve import apply, det2, is_symmetric, max_entry, trace


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([[5]],), 5),
        (([[1, 2], [3, 4]],), 5),
    ],
)
def test_trace(args, want):
    assert trace(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([[1, 0], [0, 1]],), 1),
        (([[1, 2], [3, 4]],), -2),
        (([[2, 3], [4, 5]],), -2),
    ],
)
def test_det2(args, want):
    assert det2(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), True),
        (([[1, 2], [2, 1]],), True),
        (([[1, 2], [3, 1]],), False),
        (([[5]],), True),
    ],
)
def test_is_symmetric(args, want):
    assert is_symmetric(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], [1]), []),
        (([[1, 2]], [3, 4]), [11]),
        (([[1, 0], [0, 2]], [5, 6]), [5, 12]),
    ],
)
def test_apply(args, want):
    assert apply(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([[3]],), 3),
        (([[1, 5], [2, 4]],), 5),
        (([[-3, -2]],), -2),
    ],
)
def test_max_entry(args, want):
    assert max_entry(*args) == want

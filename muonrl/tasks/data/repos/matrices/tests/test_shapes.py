"""Tests of matrices.shapes."""

import pytest

from matrices.shapes import flatten, identity, is_square, reshape, transpose


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), []),
        ((1,), [[1]]),
        ((2,), [[1, 0], [0, 1]]),
        ((3,), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
    ],
)
def test_identity(args, want):
    assert identity(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), True),
        (([[1]],), True),
        (([[1, 2]],), False),
        (([[1, 2], [3, 4]],), True),
    ],
)
def test_is_square(args, want):
    assert is_square(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([[1]],), [[1]]),
        (([[1, 2]],), [[1], [2]]),
        (([[1, 2], [3, 4]],), [[1, 3], [2, 4]]),
    ],
)
def test_transpose(args, want):
    assert transpose(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([[1]],), [1]),
        (([[1, 2], [3]],), [1, 2, 3]),
    ],
)
def test_flatten(args, want):
    assert flatten(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 2), []),
        (([1, 2, 3, 4], 2), [[1, 2], [3, 4]]),
        (([1, 2, 3], 2), [[1, 2], [3]]),
        (([1], 1), [[1]]),
    ],
)
def test_reshape(args, want):
    assert reshape(*args) == want

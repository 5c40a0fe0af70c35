"""Tests of wraptext.pad."""

import pytest

from wraptext.pad import center, column, number_lines, pad_left, pad_right, ruler


@pytest.mark.parametrize(
    "args, want",
    [
        (("ab", 4), "ab  "),
        (("abc", 3), "abc"),
        (("abcd", 2), "abcd"),
        (("", 1), " "),
    ],
)
def test_pad_right(args, want):
    assert pad_right(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("ab", 4), "  ab"),
        (("7", 3, "0"), "007"),
        (("abc", 3), "abc"),
        (("abcd", 2), "abcd"),
    ],
)
def test_pad_left(args, want):
    assert pad_left(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("ab", 6), "  ab"),
        (("a", 4), " a"),
        (("a", 2), "a"),
        (("abc", 2), "abc"),
        (("ab", 4), " ab"),
    ],
)
def test_center(args, want):
    assert center(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), ""),
        ((3,), "---"),
        ((5,), "----+"),
        ((6,), "----+-"),
    ],
)
def test_ruler(args, want):
    assert ruler(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        ((["a"],), ["1 a"]),
        ((["a", "b"],), ["1 a", "2 b"]),
    ],
)
def test_number_lines(args, want):
    assert number_lines(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 0), []),
        (([[1, 2], [3]], 1), [2]),
        (([[1, 2], [3]], 0), [1, 3]),
        (([[1], [2, 3]], 2), []),
    ],
)
def test_column(args, want):
    assert column(*args) == want

"""Tests of units.roman."""

import pytest

from units.roman import digit_sum, from_roman, ordinal, scale_to, to_roman


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), 0),
        (("III",), 3),
        (("IV",), 4),
        (("XIX",), 19),
        (("CX",), 110),
        (("IX",), 9),
    ],
)
def test_from_roman(args, want):
    assert from_roman(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), ""),
        ((3,), "III"),
        ((4,), "IV"),
        ((9,), "IX"),
        ((16,), "XVI"),
        ((20,), "XX"),
    ],
)
def test_to_roman(args, want):
    assert to_roman(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((1,), "1st"),
        ((2,), "2nd"),
        ((4,), "4th"),
        ((11,), "11th"),
        ((13,), "13th"),
        ((14,), "14th"),
        ((23,), "23rd"),
        ((112,), "112th"),
    ],
)
def test_ordinal(args, want):
    assert ordinal(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0,), 0),
        ((7,), 7),
        ((10,), 1),
        ((123,), 6),
    ],
)
def test_digit_sum(args, want):
    assert digit_sum(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((5, 10, 100), 50),
        ((1, 3, 10), 3),
        ((4, 0, 9), 0),
        ((2, 2, 7), 7),
        ((3, 1, 2), 6),
    ],
)
def test_scale_to(args, want):
    assert scale_to(*args) == want

"""Tests of coins.amounts."""

import pytest

from coins.amounts import count_over, largest, parse_cents, refund, show, total_of


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([5],), 5),
        (([5, 10, -2],), 13),
    ],
)
def test_total_of(args, want):
    assert total_of(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("3",), 300),
        (("3.25",), 325),
        (("0.99",), 99),
        (("12.50",), 1250),
    ],
)
def test_parse_cents(args, want):
    assert parse_cents(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((5,), "0.05"),
        ((325,), "3.25"),
        ((-40,), "-0.40"),
        ((1000,), "10.00"),
        ((110,), "1.10"),
        ((0,), "0.00"),
    ],
)
def test_show(args, want):
    assert show(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([3],), 3),
        (([2, 9, 4],), 9),
        (([-5, -2],), -2),
    ],
)
def test_largest(args, want):
    assert largest(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((10, 7), 3),
        ((7, 7), 0),
        ((5, 7), 0),
    ],
)
def test_refund(args, want):
    assert refund(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), 0),
        (([4, 5, 6], 5), 1),
        (([9, 8], 5), 2),
        (([1], 5), 0),
    ],
)
def test_count_over(args, want):
    assert count_over(*args) == want

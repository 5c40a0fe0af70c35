"""Tests of coins.shares."""

import pytest

from coins.shares import add_tax, bulk_price, cheapest, discount, round_up, running, split_even


@pytest.mark.parametrize(
    "args, want",
    [
        ((10, 2), [5, 5]),
        ((10, 3), [4, 3, 3]),
        ((11, 3), [4, 4, 3]),
        ((2, 4), [1, 1, 0, 0]),
    ],
)
def test_split_even(args, want):
    assert split_even(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((200, 10), 220),
        ((200, 0), 200),
        ((50, 100), 100),
        ((99, -5), 99),
    ],
)
def test_add_tax(args, want):
    assert add_tax(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((200, 10), 180),
        ((200, 100), 0),
        ((200, 0), 200),
        ((50, 150), 0),
        ((200, 99), 2),
    ],
)
def test_discount(args, want):
    assert discount(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([3, 1, 2],), 1),
        (([5],), 0),
        (([2, 2],), 0),
        (([4, 3, 1],), 2),
    ],
)
def test_cheapest(args, want):
    assert cheapest(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((10, 4, 4), 20),
        ((10, 3, 4), 30),
        ((10, 5, 4), 25),
        ((10, 5, 0), 50),
    ],
)
def test_bulk_price(args, want):
    assert bulk_price(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([5],), [5]),
        (([1, 2, 3],), [1, 3, 6]),
    ],
)
def test_running(args, want):
    assert running(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((10, 5), 10),
        ((11, 5), 15),
        ((14, 5), 15),
        ((0, 5), 0),
    ],
)
def test_round_up(args, want):
    assert round_up(*args) == want

"""Tests of coins.change."""

import pytest

from coins.change import biggest_coin, can_pay, coin_count, coins_for, is_exact


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, [5, 1]), []),
        ((7, [5, 1]), [5, 1, 1]),
        ((30, [20, 10, 5]), [20, 10]),
        ((5, [5, 1]), [5]),
    ],
)
def test_coins_for(args, want):
    assert coins_for(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, [5, 1]), 0),
        ((7, [5, 1]), 3),
        ((40, [20, 10]), 2),
        ((99, [50, 20, 5, 1]), 8),
    ],
)
def test_coin_count(args, want):
    assert coin_count(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([5, 2], 7), True),
        (([5, 2], 8), False),
        (([], 0), True),
        (([], 1), False),
        (([9], 3), True),
    ],
)
def test_can_pay(args, want):
    assert can_pay(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((7, [1, 5, 10]), 5),
        ((10, [1, 5, 10]), 10),
        ((0, [1, 5]), 0),
        ((9, [5, 2]), 5),
    ],
)
def test_biggest_coin(args, want):
    assert biggest_coin(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 0), True),
        (([], 5), False),
        (([5, 2], 7), True),
        (([5, 2], 6), False),
    ],
)
def test_is_exact(args, want):
    assert is_exact(*args) == want

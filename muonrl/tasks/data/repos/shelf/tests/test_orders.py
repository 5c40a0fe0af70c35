"""Tests of shelf.orders."""

import pytest

from shelf.orders import biggest_line, first_short, is_free, order_total, reorder, shipping


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([(2, 5)],), 10),
        (([(2, 5), (1, 3)],), 13),
    ],
)
def test_order_total(args, want):
    assert order_total(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((50, 40, 5), 0),
        ((40, 40, 5), 0),
        ((30, 40, 5), 5),
    ],
)
def test_shipping(args, want):
    assert shipping(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([(2, 5)],), 10),
        (([(2, 5), (3, 4), (1, 9)],), 12),
    ],
)
def test_biggest_line(args, want):
    assert biggest_line(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((5, 5, 2), 0),
        ((9, 5, 2), 0),
        ((1, 5, 2), 2),
        ((2, 5, 2), 2),
        ((0, 3, 5), 1),
    ],
)
def test_reorder(args, want):
    assert reorder(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((0, False), True),
        ((5, True), True),
        ((5, False), False),
        ((10, True), False),
        ((12, True), False),
    ],
)
def test_is_free(args, want):
    assert is_free(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], []), -1),
        (([1], [1]), -1),
        (([1, 0], [1, 2]), 1),
        (([0, 3], [2, 2]), 0),
    ],
)
def test_first_short(args, want):
    assert first_short(*args) == want

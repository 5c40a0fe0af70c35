"""Tests of shelf.stock."""

import pytest

from shelf.stock import add_item, in_stock, low_items, missing, stock_size, take_item


@pytest.mark.parametrize(
    "args, want",
    [
        (({}, "a"), False),
        (({"a": 1}, "a"), True),
        (({"a": 0}, "a"), False),
        (({"a": 2}, "b"), False),
        (({"a": 2}, "a"), True),
    ],
)
def test_in_stock(args, want):
    assert in_stock(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (({}, "a", 2), {"a": 2}),
        (({"a": 1}, "a", 2), {"a": 3}),
        (({"a": 1}, "b", 3), {"a": 1, "b": 3}),
    ],
)
def test_add_item(args, want):
    assert add_item(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (({"a": 3}, "a", 1), {"a": 2}),
        (({"a": 1}, "a", 2), {"a": 1}),
        (({"a": 2}, "a", 2), {"a": 0}),
        (({}, "b", 1), {}),
    ],
)
def test_take_item(args, want):
    assert take_item(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (({}, []), []),
        (({"a": 1}, ["a", "b"]), ["b"]),
        (({"a": 1}, ["a"]), []),
    ],
)
def test_missing(args, want):
    assert missing(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (({}, 2), []),
        (({"b": 1, "a": 0, "c": 2}, 2), ["a", "b"]),
        (({"a": 5}, 2), []),
    ],
)
def test_low_items(args, want):
    assert low_items(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (({},), 0),
        (({"a": 2},), 2),
        (({"a": 2, "b": 5},), 7),
    ],
)
def test_stock_size(args, want):
    assert stock_size(*args) == want

"""Tests of routes.stops."""

import pytest

from routes.stops import between, is_loop, leg_pairs, skip, visits


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), False),
        ((["a"],), False),
        ((["a", "b"],), False),
        ((["a", "b", "a"],), True),
        ((["a", "a"],), True),
    ],
)
def test_is_loop(args, want):
    assert is_loop(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        ((["a"],), []),
        ((["a", "b"],), [("a", "b")]),
        ((["a", "b", "c"],), [("a", "b"), ("b", "c")]),
    ],
)
def test_leg_pairs(args, want):
    assert leg_pairs(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], "a"), 0),
        ((["a", "b", "a"], "a"), 2),
        ((["b"], "a"), 0),
    ],
)
def test_visits(args, want):
    assert visits(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((["a", "b", "c"], "a", "c"), ["b"]),
        ((["a", "b", "c"], "c", "a"), ["b"]),
        ((["a", "b"], "a", "b"), []),
        ((["a", "b", "c", "d"], "a", "d"), ["b", "c"]),
    ],
)
def test_between(args, want):
    assert between(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], ["a"]), []),
        ((["a", "b"], ["a"]), ["b"]),
        ((["a", "b"], []), ["a", "b"]),
    ],
)
def test_skip(args, want):
    assert skip(*args) == want

"""Tests of lineup.stack."""

import pytest

from lineup.stack import balanced, depth, peek, pop_many, push, swap_top


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 1, 2), [1]),
        (([1], 2, 2), [1, 2]),
        (([1, 2], 3, 2), [1, 2]),
        (([1], 5, 1), [1]),
    ],
)
def test_push(args, want):
    assert push(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), None),
        (([], 0), 0),
        (([1, 2],), 2),
        (([3],), 3),
    ],
)
def test_peek(args, want):
    assert peek(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1, 2, 3], 0), [1, 2, 3]),
        (([1, 2, 3], 1), [1, 2]),
        (([1, 2, 3], 2), [1]),
        (([1], 1), []),
    ],
)
def test_pop_many(args, want):
    assert pop_many(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), 0),
        (("()",), 1),
        (("(())",), 2),
        (("()()",), 1),
        (("(()())",), 2),
    ],
)
def test_depth(args, want):
    assert depth(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), True),
        (("()",), True),
        (("(",), False),
        ((")(",), False),
        (("(())",), True),
        (("())",), False),
    ],
)
def test_balanced(args, want):
    assert balanced(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([1],), [1]),
        (([1, 2],), [2, 1]),
        (([1, 2, 3],), [1, 3, 2]),
    ],
)
def test_swap_top(args, want):
    assert swap_top(*args) == want

"""Tests of spans.merging."""

import pytest

from spans.merging import covered, holes, merge, shift, touches, widest


@pytest.mark.parametrize(
    "args, want",
    [
        (((1, 3), (3, 5)), True),
        (((1, 2), (4, 5)), False),
        (((4, 5), (1, 2)), False),
        (((0, 9), (2, 3)), True),
        (((3, 5), (1, 3)), True),
    ],
)
def test_touches(args, want):
    assert touches(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([(1, 3), (2, 5)],), [(1, 5)]),
        (([(4, 5), (1, 2)],), [(1, 2), (4, 5)]),
        (([(1, 9), (2, 3)],), [(1, 9)]),
        (([(1, 2), (2, 4), (6, 7)],), [(1, 4), (6, 7)]),
    ],
)
def test_merge(args, want):
    assert merge(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([(1, 3)],), 3),
        (([(0, 0), (5, 9)],), 6),
    ],
)
def test_covered(args, want):
    assert covered(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([(1, 3)],), 2),
        (([(1, 3), (2, 9), (4, 5)],), 7),
    ],
)
def test_widest(args, want):
    assert widest(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 2), []),
        (([(1, 3)], 2), [(3, 5)]),
        (([(1, 3), (5, 6)], -1), [(0, 2), (4, 5)]),
    ],
)
def test_shift(args, want):
    assert shift(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([(1, 2), (5, 6)],), [(3, 4)]),
        (([(1, 2), (3, 4)],), []),
        (([(0, 1), (3, 4), (9, 9)],), [(2, 2), (5, 8)]),
    ],
)
def test_holes(args, want):
    assert holes(*args) == want

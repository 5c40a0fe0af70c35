"""Tests of routes.roads."""

import pytest

from routes.roads import degree, exits, road_km, shortest_road, toll


@pytest.mark.parametrize(
    "args, want",
    [
        (([], "a"), 0),
        (([("a", "b", 1), ("c", "a", 2)], "a"), 2),
        (([("b", "c", 1)], "a"), 0),
    ],
)
def test_degree(args, want):
    assert degree(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], "a", "b"), 0),
        (([("a", "b", 4)], "a", "b"), 4),
        (([("a", "c", 4)], "a", "b"), 0),
        (([("c", "b", 4)], "a", "b"), 0),
    ],
)
def test_road_km(args, want):
    assert road_km(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], "a"), []),
        (([("a", "b", 1)], "a"), ["b"]),
        (([("b", "a", 1)], "a"), []),
    ],
)
def test_exits(args, want):
    assert exits(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([("a", "b", 3)],), ("a", "b", 3)),
        (([("a", "b", 3), ("b", "c", 1)],), ("b", "c", 1)),
        (([("a", "b", 1), ("c", "d", 1)],), ("a", "b", 1)),
    ],
)
def test_shortest_road(args, want):
    assert shortest_road(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((5, 5, 2), 0),
        ((7, 5, 2), 4),
        ((3, 5, 2), 0),
        ((9, 0, 1), 9),
    ],
)
def test_toll(args, want):
    assert toll(*args) == want

"""Tests of routes.legs."""

import pytest

from routes.legs import fuel_stops, longest_leg, milestones, speed, stops_within, trip_length


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([4],), 4),
        (([4, 5, 1],), 10),
    ],
)
def test_trip_length(args, want):
    assert trip_length(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        (([4],), 4),
        (([4, 9, 1],), 9),
    ],
)
def test_longest_leg(args, want):
    assert longest_leg(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((10, 2), 5.0),
        ((9, 3), 3.0),
        ((5, 0), 0),
        ((5, -1), 0),
        ((6, 1), 6.0),
    ],
)
def test_speed(args, want):
    assert speed(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), 0),
        (([2, 3, 4], 5), 2),
        (([2, 3, 4], 4), 1),
        (([6], 5), 0),
        (([1], 9), 1),
    ],
)
def test_stops_within(args, want):
    assert stops_within(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        ((5, 5), 0),
        ((6, 5), 1),
        ((10, 5), 1),
        ((11, 5), 2),
        ((0, 5), 0),
    ],
)
def test_fuel_stops(args, want):
    assert fuel_stops(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        (([4],), [4]),
        (([4, 5, 1],), [4, 9, 10]),
    ],
)
def test_milestones(args, want):
    assert milestones(*args) == want

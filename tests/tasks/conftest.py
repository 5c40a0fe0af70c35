"""A toy repository and warm test processes that several test files share."""

import pytest

from muonrl.tasks.suite import SuiteRunner, write_tree

MODULE = b'''"""Toy."""


def clamp(x, lo, hi=9):
    if x < lo:
        return lo
    if x > hi:
        return hi
    return x


def count_down(n):
    out = []
    while n > 0:
        out.append(n)
        n -= 1
    return out


def unused(x):
    return x + 1
'''

TESTS = b"""import pytest

from toy.core import clamp, count_down


@pytest.mark.parametrize(
    "args, want", [((5, 1, 3), 3), ((0, 1, 3), 1), ((2, 1, 3), 2), ((1, 1, 3), 1), ((4, 5), 5), ((3, 2), 3)]
)
def test_clamp(args, want):
    assert clamp(*args) == want


def test_count_down():
    assert count_down(2) == [2, 1]


def test_nothing():
    assert count_down(0) == []


@pytest.mark.xfail
def test_expected_to_fail():
    assert clamp(1, 2, 3) == 1
"""


@pytest.fixture(scope="session")
def toy_files():
    return {"toy/__init__.py": b"", "toy/core.py": MODULE, "README.md": b"toy\n", "tests/test_core.py": TESTS}


@pytest.fixture
def toy(tmp_path, toy_files):
    """The folder of the toy repository."""
    write_tree(tmp_path / "toy", toy_files)
    return tmp_path / "toy"


@pytest.fixture(scope="session")
def runner():
    with SuiteRunner() as shared:
        yield shared

"""Tests of units.slugs."""

import pytest

from units.slugs import cut_slug, extension, free_name, is_slug, slug, version_less


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), ""),
        ((["Ab"],), "ab"),
        ((["Ab", "cD"],), "ab-cd"),
    ],
)
def test_slug(args, want):
    assert slug(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), False),
        (("ab",), True),
        (("Ab",), False),
        (("a b",), False),
        (("a-b",), True),
    ],
)
def test_is_slug(args, want):
    assert is_slug(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("ab", 2), "ab"),
        (("abc", 2), "ab"),
        (("ab-cd", 3), "ab"),
        (("a", 5), "a"),
    ],
)
def test_cut_slug(args, want):
    assert cut_slug(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([1], [2]), True),
        (([2], [1]), False),
        (([1, 2], [1, 2]), False),
        (([1], [1, 0]), True),
        (([1, 3], [1, 2, 9]), False),
        (([1, 0], [1]), False),
    ],
)
def test_version_less(args, want):
    assert version_less(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("a.py",), "py"),
        (("a",), ""),
        (("a.b.c",), "c"),
        ((".rc",), ""),
    ],
)
def test_extension(args, want):
    assert extension(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("a", []), "a"),
        (("a", ["a"]), "a-2"),
        (("a", ["a", "a-2"]), "a-3"),
        (("b", ["a"]), "b"),
    ],
)
def test_free_name(args, want):
    assert free_name(*args) == want

"""Tests of wraptext.lines."""

import pytest

from wraptext.lines import indent_of, longest_line, shorten, trim_blank, wrap_at, wrap_words


@pytest.mark.parametrize(
    "args, want",
    [
        (("", 2), []),
        (("abcd", 2), ["ab", "cd"]),
        (("abcde", 2), ["ab", "cd", "e"]),
        (("ab", 5), ["ab"]),
    ],
)
def test_wrap_at(args, want):
    assert wrap_at(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([], 5), []),
        ((["a", "b"], 3), ["a b"]),
        ((["ab", "cd", "e"], 5), ["ab cd", "e"]),
        ((["ab", "cd"], 4), ["ab", "cd"]),
        ((["one"], 2), ["one"]),
    ],
)
def test_wrap_words(args, want):
    assert wrap_words(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("abc", 3), "abc"),
        (("abcd", 3), "a.."),
        (("abcdef", 5), "abc.."),
        (("", 2), ""),
    ],
)
def test_shorten(args, want):
    assert shorten(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), 0),
        ((["a", "abc", "ab"],), 3),
        (([""],), 0),
    ],
)
def test_longest_line(args, want):
    assert longest_line(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), []),
        ((["a", ""],), ["a"]),
        ((["", "a"],), ["", "a"]),
        ((["a", "", ""],), ["a"]),
    ],
)
def test_trim_blank(args, want):
    assert trim_blank(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), 0),
        (("ab",), 0),
        (("  ab",), 2),
        (("   ",), 3),
        ((" a b",), 1),
    ],
)
def test_indent_of(args, want):
    assert indent_of(*args) == want

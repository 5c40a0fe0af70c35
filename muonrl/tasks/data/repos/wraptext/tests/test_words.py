"""Tests of wraptext.words."""

import pytest

from wraptext.words import (
    capitalize,
    count_char,
    count_words,
    initials,
    is_palindrome,
    longest_word,
)


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), 0),
        (("a",), 1),
        (("a b",), 2),
        (("a  b c",), 3),
    ],
)
def test_count_words(args, want):
    assert count_words(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), ""),
        ((["a", "abc", "ab"],), "abc"),
        ((["ab", "cd"],), "ab"),
    ],
)
def test_longest_word(args, want):
    assert longest_word(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (([],), ""),
        ((["ab", "cd"],), "ac"),
        ((["ab", ""],), "a"),
    ],
)
def test_initials(args, want):
    assert initials(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), ""),
        (("a",), "A"),
        (("abc",), "Abc"),
        (("Ab",), "Ab"),
    ],
)
def test_capitalize(args, want):
    assert capitalize(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("",), True),
        (("aba",), True),
        (("ab",), False),
        (("abba",), True),
        (("abca",), False),
    ],
)
def test_is_palindrome(args, want):
    assert is_palindrome(*args) == want


@pytest.mark.parametrize(
    "args, want",
    [
        (("", "a"), 0),
        (("banana", "a"), 3),
        (("abc", "z"), 0),
        (("aa", "a"), 2),
    ],
)
def test_count_char(args, want):
    assert count_char(*args) == want

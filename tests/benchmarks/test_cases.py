"""Subsets of cases."""

import pytest

from benchmarks.cases import CASES, choose_cases, describe, flops_of, matrices, shrink

SHAPES = ((8, 4, 16), (4, 4, 8), (2, 2, 4))


def test_cases_by_name():
    assert [case.name for case in choose_cases(["wide", "tall"])] == ["wide", "tall"]
    assert len(choose_cases(None)) == len(CASES)
    with pytest.raises(ValueError, match="cases must be among .*; got long"):
        choose_cases(["wide", "long"])


def test_everything_fits_a_large_limit():
    assert shrink(SHAPES, flops_of(SHAPES)) == SHAPES


def test_counts_are_halved_until_it_fits():
    half = ((8, 4, 8), (4, 4, 4), (2, 2, 2))
    assert shrink(SHAPES, flops_of(SHAPES) - 1) == half
    assert shrink(SHAPES, flops_of(half)) == half


def test_one_of_each_before_a_shape_is_left_out():
    ones = ((8, 4, 1), (4, 4, 1), (2, 2, 1))
    assert shrink(SHAPES, flops_of(ones)) == ones
    assert shrink(SHAPES, flops_of(ones) - 1) == ((4, 4, 1), (2, 2, 1))
    assert shrink(SHAPES, 1.0) == ()


def test_a_subset_never_costs_more_than_its_limit():
    whole = CASES["qwen3.5-4b"].shapes
    for limit in (1e9, 1e11, 1e12, 1e13, 1e15):
        subset = shrink(whole, limit)
        assert flops_of(subset) <= limit
        counts = {(rows, columns): count for rows, columns, count in whole}
        assert all(count <= counts[rows, columns] for rows, columns, count in subset)


def test_single_matrices_and_their_description():
    assert list(matrices(((3, 2, 2), (1, 5, 1)))) == [(3, 2), (3, 2), (1, 5)]
    assert describe(((3, 2, 2), (1, 5, 1))) == "(3, 2) x 2, (1, 5) x 1"

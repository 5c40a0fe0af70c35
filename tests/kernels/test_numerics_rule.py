"""The comparison rule must be able to fail."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import assert_as_good_as, assert_exactly, relative_error


def test_zeros_nan_and_small_biases_fail() -> None:
    truth = torch.randn(50, dtype=torch.float64)
    eager = truth.float()
    assert_as_good_as(eager, eager, truth)
    for wrong in (torch.zeros(50), eager * (1 + 1e-5), eager.roll(1), torch.full((50,), float("nan"))):
        with pytest.raises(AssertionError):
            assert_as_good_as(wrong, eager, truth)


def test_a_truth_of_zero_is_refused() -> None:
    with pytest.raises(AssertionError, match="compare exactly"):
        relative_error(torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError, match="shape"):
        relative_error(torch.zeros(3), torch.zeros(1, 3))


def test_exact_comparison() -> None:
    assert_exactly(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    with pytest.raises(AssertionError):
        assert_exactly(torch.tensor([1.0]), torch.tensor([1.0 + 1e-7]))
    with pytest.raises(AssertionError):
        assert_exactly(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))


def test_unwritten_memory_is_nan() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2, 2)).isnan().all()
    assert torch.zeros(2).new_empty(4).isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)

"""The one rule by which numbers are compared: err(result, fp64) <= factor * err(same-dtype eager, fp64) + a tiny epsilon.

Errors are relative to the size of the truth, so a result of all zeros has error 1 and can never pass; a truth of size zero is
refused, because nothing could fail against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 2.0
EPSILON_ULPS = 4.0


def relative_error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth|| in fp64; infinite if x has a NaN."""
    assert x.shape == truth.shape, f"shape {tuple(x.shape)} instead of {tuple(truth.shape)}"
    size = truth.double().norm().item()
    assert size > 0, "the truth is zero: compare exactly instead"
    error = (x.double() - truth.double()).norm().item() / size
    return error if error == error else float("inf")


def assert_as_good_as(
    x: Tensor, eager: Tensor, truth: Tensor, *, what: str = "result", factor: float = FACTOR
) -> None:
    """Assert the rule; the epsilon is four units in the last place of x's dtype, relative to the truth."""
    epsilon = EPSILON_ULPS * torch.finfo(x.dtype).eps
    assert epsilon < 0.1
    mine, theirs = relative_error(x, truth), relative_error(eager, truth)
    assert mine <= factor * theirs + epsilon, f"{what}: error {mine:.3g}, eager PyTorch has {theirs:.3g}"


def assert_exactly(x: Tensor, y: Tensor, what: str = "result") -> None:
    """Assert equality to the last bit, NaN included."""
    assert x.dtype == y.dtype and x.shape == y.shape, (
        f"{what}: {x.dtype}{tuple(x.shape)}, {y.dtype}{tuple(y.shape)}"
    )
    assert torch.equal(x.nan_to_num(123.0), y.nan_to_num(123.0)), f"{what} differs"

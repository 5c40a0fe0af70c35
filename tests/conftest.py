"""What every test runs under: fixed seeds, and memory that nobody wrote reads as NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same allocation, with NaN in floating-point tensors, so that unwritten output cannot pass for a result."""

    def allocate(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.is_floating_point() and not made.is_meta:
            with torch.no_grad():
                made.detach().fill_(float("nan"))
        return made

    return allocate


@pytest.fixture(autouse=True, scope="session")
def unwritten_memory_is_nan() -> Iterator[None]:
    """Poison torch.empty and its relatives while tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test draws the same numbers, alone or in the whole suite."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - code under test may use the global state
    torch.manual_seed(0)

"""Core cases for pytest-benchmark: `pytest benchmarks --benchmark-only` (see docs/kernels.md for tracking over commits)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.cases import CASES, shrink
from benchmarks.worker import Stepper

_STEP_FLOPS = 6e10
"""A step of a model is cut down to about this many operations of the standard iteration."""


@pytest.mark.parametrize("name", ["small", "square", "wide", "tall", "qwen3-60m"])
def test_step(benchmark: Any, name: str) -> None:
    stepper = Stepper(shrink(CASES[name].shapes, _STEP_FLOPS), torch.device("cpu"))
    benchmark.group = "muonrl_kernels.Muon, one step"
    benchmark.pedantic(stepper.step, setup=stepper.refresh, rounds=10, warmup_rounds=1)

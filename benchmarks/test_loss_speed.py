"""Core cases of the loss for pytest-benchmark: `pytest benchmarks --benchmark-only`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.loss_cases import LOSS_CASES, valid_rows
from benchmarks.worker import LossStepper

_ROWS = {"tokens": 1 << 18, "trainer": 8192, "h512-100": 64, "h512-30": 256}
"""Rows of the cases: a pass takes about a second at most."""


@pytest.mark.parametrize("name", list(_ROWS))
def test_loss(benchmark: Any, name: str) -> None:
    case, rows = LOSS_CASES[name], _ROWS[name]
    linear, valid = case.kind == "linear", valid_rows(rows, case.share)
    stepper = LossStepper(rows, case.hidden, case.vocabulary, valid, linear, torch.device("cpu"))
    benchmark.group = "muonrl_kernels, loss forward and backward"
    benchmark.pedantic(stepper.step, setup=stepper.refresh, rounds=10, warmup_rounds=1)

"""What Muon refuses when it is made: one clear line for every option and combination that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from muonrl_kernels import Muon


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Learning rate"),
        ({"lr": torch.ones(2)}, "1-element"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": math.nan}, "weight_decay"),
        ({"adjust_lr_fn": "rms"}, "rms"),
        ({"normalize": "l2"}, "normalize"),
        ({"method": "quick"}, "method"),
        ({"momentum_style": "mean"}, "momentum_style"),
        ({"ns_steps": 100}, "steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"ns_schedule": "kj11"}, "kj11"),
        ({"backend": "cuda"}, "backend"),
        ({"eps": -1e-7}, "eps"),
        ({"momentum": 1.5}, "average should be <= 1"),
        ({"method": "gram", "compute_dtype": torch.bfloat16}, "not stable in bfloat16"),
        ({"compute_dtype": torch.int8}, "compute_dtype"),
        ({"variant": "adamuon"}, "variant must be one of muon, normuon"),
        ({"beta2": 1.0}, "beta2 must lie in"),
        ({"momentum_dtype": torch.int32}, "momentum_dtype must be one of None"),
        ({"cautious_wd": 2}, "cautious_wd must be one of False, True"),
        ({"capturable": "yes"}, "capturable"),
        ({"max_workspace_bytes": 0}, "max_workspace_bytes"),
        ({"max_workspace_bytes": 1e6}, "max_workspace_bytes"),
        ({"rounding_seed": -1}, "rounding_seed"),
        (
            {"stochastic_rounding": True},
            "for bfloat16 and float16 parameters; this group has only torch.float32",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Muon([nn.Parameter(torch.eye(3))], **options)


def test_a_captured_learning_rate_lives_with_the_parameters() -> None:
    p = nn.Parameter(torch.zeros(3, 3, device="meta"))
    with pytest.raises(ValueError, match="lr on the parameters' device meta; got a tensor on cpu"):
        Muon([p], lr=torch.tensor(0.1), capturable=True, backend="torch")
    Muon([p], lr=0.1, capturable=True, backend="torch")


def test_options_of_the_other_algorithm() -> None:
    def group(**options: Any) -> list[dict[str, Any]]:
        return [{"params": [nn.Parameter(torch.eye(3))], **options}]

    with pytest.raises(ValueError, match="adamw group does not read momentum, split"):
        Muon(group(algorithm="adamw", momentum=0.5, split=3))
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"):
        Muon(group(algorithm="adamw", betas=(0.9, 1.0)))
    with pytest.raises(ValueError, match="betas belong to groups"):
        Muon(group(betas=(0.9, 0.95)))
    copied = Muon(group(algorithm="adamw")).param_groups
    assert Muon(copied).param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.raises(RuntimeError, match="backend='triton' is not available"):
        Muon(group(backend="triton"))
    optimizer = Muon(group())
    with pytest.raises(RuntimeError, match="backend='triton' is not available"):
        optimizer.add_param_group(group(backend="triton")[0])
    assert len(optimizer.param_groups) == 1


def test_bad_parameters() -> None:
    with pytest.raises(ValueError, match="2D"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="algorithm"):
        Muon([{"params": [nn.Parameter(torch.eye(3))], "algorithm": "sgd"}])
    complex_matrix = nn.Parameter(torch.eye(3, dtype=torch.complex64))
    complex_matrix.grad = torch.eye(3, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="complex"):
        Muon([complex_matrix]).step()
    sparse = nn.Parameter(torch.eye(3))
    sparse.grad = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        Muon([sparse]).step()
    optimizer = Muon([nn.Parameter(torch.eye(3))])
    with pytest.raises(ValueError, match="2D"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1

"""Log-probability, entropy and logsumexp through the head, all three differentiable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import linear_logprob, reference
from muonrl_kernels.linear_head import chunks
from tests.kernels.cases import linear_inputs
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

WRT = ("hidden", "weight", "bias")


def outputs_and_grads(
    function: Any, inputs: dict[str, Tensor], weights: tuple[float, ...], **options: Any
) -> list[Tensor]:
    """The three outputs and the gradients of a weighted sum of them, each row weighted differently."""
    leaves = {k: inputs[k].detach().clone().requires_grad_() for k in WRT}
    outputs = function(**leaves, targets=inputs["targets"], **options)
    rows = torch.linspace(-1, 1, len(inputs["targets"]), dtype=outputs[0].dtype)
    total = sum((w * rows * o).sum() for w, o in zip(weights, outputs, strict=True) if w)
    return [o.detach() for o in outputs] + list(torch.autograd.grad(total, list(leaves.values())))


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, -0.5, 0.3)])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0, "temperature": 0.7, "logit_scale": 1.5, "vocab_size": 35}],
    ids=["plain", "all"],
)
def test_exact_in_fp64(weights: tuple[float, ...], options: dict[str, Any]) -> None:
    inputs = linear_inputs(53, 12, 41)
    inputs["targets"] %= 35
    truth = outputs_and_grads(reference.linear_logprob, inputs, weights, **options)
    ours = outputs_and_grads(linear_logprob, inputs, weights, chunk_rows=20, **options)
    for a, b in zip(ours, truth, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharp", [1.0, 30.0])
def test_by_the_rule(dtype: torch.dtype, sharp: float) -> None:
    inputs = linear_inputs(257, 252, 1021, sharp=sharp)
    inputs = {k: v.to(dtype) if k in WRT else v for k, v in inputs.items()}
    weights = (1.0, 0.2, 0.1)
    truth = outputs_and_grads(
        reference.linear_logprob, {k: v.double() if k in WRT else v for k, v in inputs.items()}, weights
    )
    eager = outputs_and_grads(reference.linear_logprob, inputs, weights)
    ours = outputs_and_grads(linear_logprob, inputs, weights)
    for name, a, b, c in zip(("logp", "entropy", "lse", *WRT), ours, eager, truth, strict=True):
        assert_as_good_as(a, b, c, what=name)


def test_logits_of_bf16_input_are_not_rounded_to_bf16() -> None:
    inputs = {k: v.bfloat16() if k in WRT else v for k, v in linear_inputs(64, 32, 101).items()}
    ours = linear_logprob(inputs["hidden"], inputs["weight"], inputs["targets"])
    truth = reference.linear_logprob(inputs["hidden"].double(), inputs["weight"].double(), inputs["targets"])
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == torch.float32 and relative_error(a, b) < 1e-6


def test_gradcheck() -> None:
    inputs = linear_inputs(4, 3, 5)
    leaves = [inputs[k].requires_grad_() for k in WRT]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return linear_logprob(hidden, weight, inputs["targets"], bias=bias, softcap=3.0, chunk_rows=3)

    assert torch.autograd.gradcheck(function, leaves)


def test_backward_may_run_twice_and_rows_without_gradient_are_skipped() -> None:
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in linear_inputs(9, 4, 6).items()}
    hidden = inputs["hidden"].requires_grad_()
    logp, _, _ = linear_logprob(hidden, inputs["weight"], inputs["targets"])
    chosen = logp[::3].sum()
    (first,) = torch.autograd.grad(chosen, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(chosen, hidden)
    assert_exactly(first, second)
    assert torch.equal(first.any(1), torch.arange(9) % 3 == 0)


def test_no_rows() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.zeros(6, 4, requires_grad=True)
    logp, entropy, lse = linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert logp.shape == entropy.shape == lse.shape == (0,)
    logp.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_tied_embedding_gets_both_gradients() -> None:
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 3, 5])
    logp, _, _ = linear_logprob(weight[tokens], weight, tokens)
    (ours,) = torch.autograd.grad(logp.sum(), weight)
    expected, _, _ = reference.linear_logprob(weight[tokens], weight, tokens)
    (truth,) = torch.autograd.grad(expected.sum(), weight)
    assert relative_error(ours, truth) < 1e-12


def test_bad_targets() -> None:
    with pytest.raises(ValueError, match="targets of valid rows"):
        linear_logprob(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]), vocab_size=3)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_chunks_cover_the_rows_evenly(kind: str) -> None:
    device = torch.device(kind)
    for rows in (0, 1, 255, 257, 8192, 100_000):
        for columns in (1, 1024, 151_936):
            parts = chunks(rows, columns, None, device)
            assert [i for p in parts for i in (p.start, p.stop)] == sorted(
                i for p in parts for i in (p.start, p.stop)
            )
            assert sum(p.stop - p.start for p in parts) == rows
            assert all(p.stop - p.start <= 8192 for p in parts)
    assert max(p.stop - p.start for p in chunks(10_000, 151_936, None, device)) <= (
        256 if kind == "cpu" else 2048
    )
    assert len(chunks(10, 5, 3, device)) == 4

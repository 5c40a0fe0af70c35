"""The losses under torch.compile and as operators of torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from muonrl_kernels import LossOptions, linear_logprob, linear_policy_loss, policy_loss
from muonrl_kernels.loss_ops import encode, linear_logprob_op, linear_policy_loss_op, policy_loss_op
from tests.kernels.cases import Tensors, cast, linear_inputs, token_inputs
from tests.numerics import assert_exactly

WRT = ("hidden", "weight", "bias")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "gspo", "agg": "sequence_mean", "entropy_coef": 0.05, "dual_clip": 1.5},
    {"beta": 0.1, "kl_weighted": True, "normalizer": torch.tensor(20.0), "is_low": 0.5},
]


def leaves(inputs: Tensors, names: tuple[str, ...]) -> Tensors:
    return {k: v.detach().clone().requires_grad_(k in names) for k, v in inputs.items()}


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_policy_loss_compiles_to_one_graph(options: dict[str, Any]) -> None:
    inputs = cast(token_inputs(4, 9), torch.float32)

    def loss(x: Tensors) -> tuple[Tensor, Tensor]:
        value, metrics = policy_loss(**x, **options)
        return value * 2.0, metrics.sums

    results = []
    for function in (loss, compiled(loss)):
        x = leaves(inputs, ("logp", "entropy") if "entropy_coef" in options else ("logp",))
        value, sums = function(x)
        value.backward()
        results.append((value.detach(), sums, x["logp"].grad, x["entropy"].grad))
    for eager, ours in zip(*results, strict=True):
        assert (eager is None and ours is None) or torch.allclose(eager, ours, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linear_losses_compile_to_one_graph(options: dict[str, Any]) -> None:
    inputs = cast(linear_inputs(20, 6, 11), torch.float32)
    bounds = torch.tensor([0, 8, 20])

    def loss(x: Tensors) -> Tensor:
        value, metrics = linear_policy_loss(**x, cu_seqlens=bounds, softcap=4.0, temperature=0.9, **options)
        logp, entropy, lse = linear_logprob(x["hidden"] * 2.0, x["weight"], x["targets"])
        return value + logp.mean() + 0.1 * entropy.mean() - 0.2 * lse.mean() + 0.0 * metrics.sums.sum()

    results = []
    for function in (loss, compiled(loss)):
        x = leaves(inputs, ("hidden", "bias"))
        value = function(x)
        value.backward()
        results.append((value.detach(), x["hidden"].grad, x["bias"].grad))
        assert x["weight"].grad is None
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)


def token_arguments(inputs: Tensors, options: LossOptions) -> tuple[Any, ...]:
    texts, numbers, normalizer = encode(options)
    names = ("logp", "entropy", "old_logp", "advantages", "mask", "rollout_logp", "ref_logp")
    return *(inputs[k] for k in names), None, normalizer, texts, numbers, "auto"


def linear_arguments(inputs: Tensors, options: LossOptions, wanted: list[bool]) -> tuple[Any, ...]:
    texts, numbers, normalizer = encode(options)
    names = (*WRT, "targets", "old_logp", "advantages", "mask", "rollout_logp", "ref_logp")
    head = (None, None, normalizer, False, [0.9, 3.0, 1.1], 10, 7, None)
    return *(inputs[k] for k in names), *head, wanted, texts, numbers, "auto"


def test_opcheck() -> None:
    tokens = leaves(cast(token_inputs(3, 5), torch.float32), ("logp", "entropy"))
    head = cast(linear_inputs(12, 6, 11), torch.float32)
    head["targets"] %= 10
    head = leaves(head, WRT)
    options = LossOptions(entropy_coef=0.1, beta=0.2)
    torch.library.opcheck(policy_loss_op, token_arguments(tokens, options))
    torch.library.opcheck(policy_loss_op, token_arguments(tokens, LossOptions(normalizer=torch.tensor(3.0))))
    torch.library.opcheck(linear_policy_loss_op, linear_arguments(head, options, [True, True, True]))
    torch.library.opcheck(
        linear_policy_loss_op,
        linear_arguments({**head, "weight": head["weight"].detach()}, options, [True, False, True]),
    )
    rest = (head["targets"], torch.rand(12) + 0.5, [1.0, float("nan"), 1.0], None, 5, "auto")
    torch.library.opcheck(linear_logprob_op, (*(head[k] for k in WRT), *rest))


@pytest.mark.parametrize("eager", [True, False])
def test_a_second_derivative_is_refused(eager: bool) -> None:
    tokens = leaves(cast(token_inputs(6), torch.float32), ("logp",))
    head = leaves(cast(linear_inputs(6, 4, 11), torch.float32), WRT)
    head["targets"] %= 10
    rows = (head["targets"], None, [1.0, float("nan"), 1.0], None, None, "auto")
    if eager:
        logp = linear_logprob(head["hidden"], head["weight"], head["targets"])[0]
        losses = [policy_loss(**tokens)[0], linear_policy_loss(**head)[0], logp.sum()]
    else:
        logp = linear_logprob_op(*(head[k] for k in WRT), *rows)[0]
        losses = [
            policy_loss_op(*token_arguments(tokens, LossOptions()))[0],
            linear_policy_loss_op(*linear_arguments(head, LossOptions(), [True] * 3))[0],
            logp.sum(),
        ]
    for loss, x in zip(losses, (tokens["logp"], head["hidden"], head["hidden"]), strict=True):
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            torch.autograd.grad(loss, x, create_graph=True)[0].sum().backward()


def test_operators_return_what_eager_calls_return() -> None:
    inputs = cast(linear_inputs(12, 6, 11), torch.float32)
    inputs["targets"] %= 10
    arguments = linear_arguments(inputs, LossOptions(beta=0.3), [True, True, True])
    loss, *_, sums, extrema, _ = linear_policy_loss_op(*arguments)
    eager, metrics = linear_policy_loss(
        **inputs, beta=0.3, temperature=0.9, softcap=3.0, logit_scale=1.1, vocab_size=10, chunk_rows=7
    )
    assert_exactly(loss, eager)
    assert_exactly(sums, metrics.sums)
    assert_exactly(extrema, metrics.extrema)

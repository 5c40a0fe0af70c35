"""The loss on two processes: a vocabulary in two parts, tokens in two parts, against one process and fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from muonrl_kernels import linear_logprob, linear_policy_loss, policy_loss, reference
from muonrl_kernels.metrics import SUMS
from tests.kernels import parallel_worker as worker
from tests.kernels.cases import Tensors, cast, token_inputs, values_and_grads
from tests.numerics import assert_as_good_as, assert_exactly

Results = list[dict[str, Any]]
LOSS = SUMS.index("loss")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What both processes saved."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(worker.main, (str(folder),), nprocs=worker.WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(worker.WORLD)]


def compare(ours: Tensor, name: str, index: int, inputs: Tensors, wrt: Any, options: dict[str, Any]) -> None:
    """By the rule: entry `index` of (loss, *gradients) of the reference, in fp32 and in fp64."""
    eager = values_and_grads(reference.linear_policy_loss, inputs, wrt, **options)[index]
    truth = values_and_grads(reference.linear_policy_loss, cast(inputs, torch.float64), wrt, **options)[index]
    assert_as_good_as(ours, eager, truth, what=name)


@pytest.mark.parametrize("name", worker.VOCAB_CASES)
def test_a_vocabulary_in_two_parts(ranks: Results, name: str) -> None:
    parts = [r[f"vocab {name}"] for r in ranks]
    options = {k: v for k, v in worker.VOCAB_CASES[name][1].items() if k != "vocab_start"}
    options["cu_seqlens"] = torch.tensor(worker.BOUNDS)
    for key in ("loss", "hidden", "sums", "logp", "entropy", "lse"):
        assert_exactly(parts[0][key], parts[1][key], key)
    inputs = worker.vocabulary_inputs(options.get("vocab_size", worker.VOCAB))
    plain = {k: v for k, v in options.items() if k != "chunk_rows"}
    whole = {k: torch.cat([p[k] for p in parts]) for k in ("weight", "bias")}
    whole |= {k: parts[0][k] for k in ("loss", "hidden")}
    for index, key in enumerate(("loss", *worker.WRT)):
        compare(whole[key], key, index, inputs, worker.WRT, plain)
    single = linear_policy_loss(**inputs, **options)[1]
    torch.testing.assert_close(parts[0]["sums"], single.sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", worker.VOCAB_CASES)
def test_log_probabilities_of_a_vocabulary_in_two_parts(ranks: Results, name: str) -> None:
    parts = [r[f"vocab {name}"] for r in ranks]
    options = worker.VOCAB_CASES[name][1]
    inputs = worker.vocabulary_inputs(options.get("vocab_size", worker.VOCAB))
    head = {k: options.get(k) for k in ("vocab_size", "softcap")} | {
        "temperature": options.get("temperature", 1.0)
    }

    def run(function: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {
            k: v.clone().requires_grad_() if k in worker.WRT else v for k, v in cast(inputs, dtype).items()
        }
        logp, entropy, lse = function(
            leaves["hidden"], leaves["weight"], leaves["targets"], bias=leaves["bias"], **head
        )
        (logp.sum() + 0.3 * entropy.sum() + 0.1 * lse.sum()).backward()
        found = {"logp": logp.detach(), "entropy": entropy.detach(), "lse": lse.detach()}
        return found | {f"logprob {k}": leaves[k].grad for k in worker.WRT}

    eager = run(reference.linear_logprob, torch.float32)
    truth = run(reference.linear_logprob, torch.float64)
    ours = {k: parts[0][k] for k in ("logp", "entropy", "lse", "logprob hidden")}
    ours |= {k: torch.cat([p[k] for p in parts]) for k in ("logprob weight", "logprob bias")}
    for key, value in ours.items():
        assert_as_good_as(value, eager[key], truth[key], what=key)


@pytest.mark.parametrize("name", worker.DATA_CASES)
def test_tokens_in_two_parts(ranks: Results, name: str) -> None:
    parts = [r[f"data {name}"] for r in ranks]
    options, empty = worker.DATA_CASES[name]
    options = {"cu_seqlens": torch.tensor(worker.BOUNDS), **options}
    # What DDP and FSDP do to gradients with "mean", and the sum otherwise.
    divisor = 1 if options.pop("dp_reduction", "mean") == "sum" else worker.WORLD
    inputs = worker.data_inputs(empty)
    ours = {k: sum(p[k] for p in parts) / divisor for k in ("loss", "weight", "bias")}
    ours["hidden"] = torch.cat([p["hidden"] for p in parts]) / divisor
    for index, key in enumerate(("loss", *worker.WRT)):
        compare(ours[key], key, index, inputs, worker.WRT, options)
    if empty:
        assert parts[1]["loss"] == 0 and not any(parts[1][k].any() for k in worker.WRT)
    single = linear_policy_loss(**inputs, **options)[1]
    torch.testing.assert_close(parts[0]["sums"] + parts[1]["sums"], single.sums, rtol=1e-5, atol=1e-6)
    if "elementwise" in parts[0]:
        tokens = cast(token_inputs(worker.ROWS), torch.float32)
        eager = values_and_grads(reference.policy_loss, tokens, ("logp",), **options)
        truth = values_and_grads(reference.policy_loss, cast(tokens, torch.float64), ("logp",), **options)
        loss = sum(p["elementwise"] for p in parts) / divisor
        grad = torch.cat([p["logp"] for p in parts]) / divisor
        for a, b, c in zip((loss, grad), eager, truth, strict=True):
            assert_as_good_as(a, b, c, what="elementwise")


def test_gradients_under_ddp_are_those_of_one_process(ranks: Results) -> None:
    inputs = worker.data_inputs(empty=False)
    grads = []
    for dtype in (torch.float32, torch.float64):
        model = worker.Policy(log_ratio_clamp=50.0).to(dtype)
        model(**cast(inputs, dtype)).backward()
        grads.append({k: p.grad for k, p in model.named_parameters()})
    for key, truth in grads[1].items():
        assert_exactly(ranks[0]["ddp"][key], ranks[1]["ddp"][key], key)
        assert_as_good_as(ranks[0]["ddp"][key], grads[0][key], truth, what=key)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("triton", "RuntimeError: backend='triton' is not available with tp_group"),
        ("start without size", "ValueError: vocab_start needs vocab_size"),
        ("size", "ValueError: vocab_size must lie in 1..80, got 81"),
        ("target", "ValueError: targets of valid rows must lie in 0..2"),
    ],
)
def test_what_is_refused_on_every_rank(ranks: Results, name: str, text: str) -> None:
    assert all(r["refusals"][name].startswith(text) for r in ranks)


def test_a_group_without_this_process_is_refused(ranks: Results) -> None:
    assert ranks[1]["refusals"]["member"] == "ValueError: tp_group must hold this process, rank 1"


def test_without_init_process_group() -> None:
    assert not dist.is_initialized()
    row = torch.zeros(4)
    group: Any = object()
    with pytest.raises(ValueError, match="dp_group needs torch.distributed.init_process_group"):
        policy_loss(row, row, row, row.bool(), dp_group=group)
    with pytest.raises(ValueError, match="tp_group needs torch.distributed.init_process_group"):
        linear_logprob(torch.zeros(4, 2), torch.zeros(3, 2), row.long(), tp_group=group)
    with pytest.raises(ValueError, match="vocab_start goes with tp_group"):
        linear_logprob(torch.zeros(4, 2), torch.zeros(3, 2), row.long(), vocab_start=3)
    with pytest.raises(ValueError, match="dp_reduction must be one of mean, sum, got 'average'"):
        policy_loss(row, row, row, row.bool(), dp_reduction="average")  # type: ignore[arg-type]

"""What each of two processes does in the tests of the loss over several processes: run the cases and save what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muonrl_kernels import LinearPolicyLoss, linear_logprob, linear_policy_loss, policy_loss
from tests.kernels.cases import Tensors, cast, linear_inputs, token_inputs

WORLD = 2
ROWS, HIDDEN, VOCAB = 61, 12, 40
BOUNDS = [0, 17, 17, 18, 44, 61]
CUT = 44  # rank 0 holds the rows before it, whole sequences; rank 1 the rest
WRT = ("hidden", "weight", "bias")

# name -> (first column of each rank and the end, arguments)
VOCAB_CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "plain": ((0, 20, 40), {}),
    "padding": ((0, 20, 40), {"vocab_size": 33, "entropy_coef": 0.05, "chunk_rows": 9}),
    "a rank of padding alone": ((0, 20, 40), {"vocab_size": 20, "softcap": 3.0, "temperature": 0.7}),
    "uneven": ((0, 11, 40), {"vocab_size": 37, "vocab_start": True, "loss_type": "gspo", "beta": 0.1}),
}
# name -> (arguments, whether rank 1 has no valid row)
DATA_CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "mean": ({"dp_reduction": "mean"}, False),
    "sum": ({"dp_reduction": "sum"}, False),
    "a rank without tokens": ({"entropy_coef": 0.1}, True),
    "sequences": ({"agg": "sequence_mean", "is_level": "sequence"}, False),
    "own normalizer": ({"normalizer": 50.0}, False),
}


def vocabulary_inputs(vocab_size: int) -> Tensors:
    """Inputs in fp32 with targets inside of the vocabulary; a token is banned by a bias of -inf on the last column."""
    inputs = linear_inputs(ROWS, HIDDEN, VOCAB)
    inputs["targets"] %= vocab_size - 1
    inputs["bias"][vocab_size - 1] = -torch.inf
    return cast(inputs, torch.float32)


def data_inputs(empty: bool) -> Tensors:
    inputs = cast(linear_inputs(ROWS, HIDDEN, VOCAB, seed=3), torch.float32)
    inputs["advantages"] += 1.0  # a loss of nearly 0 would be a sum of cancelling terms
    if empty:
        inputs["mask"][CUT:] = False
    return inputs


def rank_rows(inputs: Tensors, rank: int) -> Tensors:
    part = slice(0, CUT) if rank == 0 else slice(CUT, None)
    return {k: v if k in ("weight", "bias") else v[part] for k, v in inputs.items()}


def rank_bounds(rank: int) -> Tensor:
    return torch.tensor(BOUNDS[:5]) if rank == 0 else torch.tensor(BOUNDS[4:]) - CUT


def _leaves(inputs: Tensors, names: tuple[str, ...]) -> Tensors:
    return {k: v.clone().requires_grad_() if k in names else v for k, v in inputs.items()}


def _vocabulary(rank: int, name: str) -> dict[str, Tensor]:
    starts, options = VOCAB_CASES[name]
    inputs = vocabulary_inputs(options.get("vocab_size", VOCAB))
    for key in ("weight", "bias"):
        inputs[key] = inputs[key][starts[rank] : starts[rank + 1]]
    arguments = {**options, "tp_group": dist.group.WORLD}
    if "vocab_start" in options:
        arguments["vocab_start"] = starts[rank]
    leaves = _leaves(inputs, WRT)
    loss, metrics = linear_policy_loss(**leaves, cu_seqlens=torch.tensor(BOUNDS), **arguments)
    loss.backward()
    result = {"loss": loss.detach(), "sums": metrics.sums, **{k: leaves[k].grad for k in WRT}}
    head = {k: arguments.get(k) for k in ("vocab_size", "softcap", "vocab_start", "tp_group", "chunk_rows")}
    again = _leaves({k: inputs[k] for k in (*WRT, "targets")}, WRT)
    logp, entropy, lse = linear_logprob(**again, temperature=options.get("temperature", 1.0), **head)
    (logp.sum() + 0.3 * entropy.sum() + 0.1 * lse.sum()).backward()
    result |= {"logp": logp.detach(), "entropy": entropy.detach(), "lse": lse.detach()}
    return result | {f"logprob {k}": again[k].grad for k in WRT}


def _data(rank: int, name: str) -> dict[str, Tensor]:
    options, empty = DATA_CASES[name]
    group = dist.group.WORLD
    inputs = rank_rows(data_inputs(empty), rank)
    leaves = _leaves(inputs, WRT)
    loss, metrics = linear_policy_loss(**leaves, cu_seqlens=rank_bounds(rank), dp_group=group, **options)
    loss.backward()
    result = {"loss": loss.detach(), "sums": metrics.sums, **{k: leaves[k].grad for k in WRT}}
    if "entropy_coef" not in options:
        tokens = rank_rows(cast(token_inputs(ROWS), torch.float32), rank)
        logp = tokens.pop("logp").requires_grad_()
        elementwise, _ = policy_loss(logp, **tokens, cu_seqlens=rank_bounds(rank), dp_group=group, **options)
        elementwise.backward()
        result |= {"elementwise": elementwise.detach(), "logp": logp.grad}
    return result


class Policy(nn.Module):
    """A layer, a head, and the loss inside of forward, as DDP wants it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.loss = LinearPolicyLoss(**settings)

    def forward(self, hidden: Tensor, **rest: Tensor) -> Tensor:
        rest = {k: v for k, v in rest.items() if k not in ("weight", "bias")}
        return self.loss(torch.tanh(self.layer(hidden)), self.head.weight, bias=self.head.bias, **rest)[0]


def _ddp(rank: int) -> dict[str, Tensor]:
    model = Policy(dp_group=dist.group.WORLD, log_ratio_clamp=50.0)
    parallel = DistributedDataParallel(model)
    parallel(**rank_rows(data_inputs(empty=False), rank)).backward()
    return {k: p.grad for k, p in model.named_parameters()}


def _refusals(folder: Path) -> dict[str, str]:
    """Messages of calls that must be refused, and the type of the exception."""
    world = dist.group.WORLD
    inputs = vocabulary_inputs(VOCAB)
    row = {k: inputs[k] for k in ("hidden", "weight", "targets")}
    alone = dist.new_group([0])
    calls: dict[str, dict[str, Any]] = {
        "triton": {"tp_group": world, "backend": "triton"},
        "start without size": {"tp_group": world, "vocab_start": 0},
        "size": {"tp_group": world, "vocab_size": 2 * VOCAB + 1},
        "target": {"tp_group": world, "vocab_size": 3},
    }
    if dist.get_rank() == 1:
        calls["member"] = {"tp_group": alone}
    said = {}
    for name, arguments in calls.items():
        try:
            linear_logprob(**row, **arguments)
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    try:
        results: dict[str, Any] = {f"vocab {name}": _vocabulary(rank, name) for name in VOCAB_CASES}
        results |= {f"data {name}": _data(rank, name) for name in DATA_CASES}
        results["ddp"] = _ddp(rank)
        results["refusals"] = _refusals(Path(folder))
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()

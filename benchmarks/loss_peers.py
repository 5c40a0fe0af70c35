"""Other implementations of the loss from hidden states, where they are installed.

An import that fails or an interface that has changed is reported with its error, never passed over in silence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.entrant import Unavailable, collect
from benchmarks.loss_implementations import LossImplementation, compute_dtype, token_mean
from benchmarks.loss_workload import CLIP_HIGH, CLIP_LOW, IS_HIGH, SEQUENCE, Batch

__all__ = ["LOSS_PEERS", "loss_peers"]

Found = list[LossImplementation]


def _trl(on_gpu: bool) -> Found:
    """TRL's chunked log-probabilities as its GRPO trainer calls them; the policy loss itself is the plain formula."""
    module = importlib.import_module("trl.kernels.chunked_logprob")
    utils = importlib.import_module("trl.trainer.utils")
    function, width = module.ChunkedLogProbFunction, int(utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    # Where its Triton kernels run its trainer takes the valid tokens out first; elsewhere it scores every position.
    compact = bool(module._use_triton(torch.device("cuda" if on_gpu else "cpu")))

    def call(b: Batch) -> Tensor:
        rows = b.mask.nonzero().squeeze(1) if compact else None
        hidden, targets = (b.hidden, b.targets) if rows is None else (b.hidden[rows], b.targets[rows])
        logp, *_ = function.apply(hidden, b.weight, None, targets, 1.0, width, None, 1.0, ("entropy",))
        return token_mean(logp, b, rows)

    which = "valid rows" if compact else "all rows"
    algorithm = "recompute" if compact else "recompute all rows"
    note = f"trl.kernels.ChunkedLogProbFunction, chunks of {width} columns; {which}"
    return [
        LossImplementation("trl", note, compute_dtype(on_gpu), call, algorithm, int(module.TOKEN_CHUNK_SIZE))
    ]


def _liger_call(module: Any, b: Batch) -> Tensor:
    sequences = b.sequence_advantages.numel()

    def by_sequence(x: Tensor) -> Tensor:
        return x.unflatten(0, (sequences, -1))

    loss, _ = module(
        by_sequence(b.hidden),
        b.weight,
        by_sequence(b.targets),
        by_sequence(b.mask).float(),
        b.sequence_advantages,
        old_per_token_logps=by_sequence(b.old_logp),
        vllm_is_ratio=by_sequence(torch.exp(b.old_logp - b.rollout_logp).clamp(max=IS_HIGH)),
    )
    assert isinstance(loss, Tensor)
    return loss


def _liger(on_gpu: bool) -> Found:
    """Liger's fused linear GRPO loss, one sequence after another."""
    package = importlib.import_module("liger_kernel.chunked_loss")
    module = package.LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=on_gpu,
        use_ref_model=False,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="dapo",
    )
    note = "LigerFusedLinearGRPOLoss, loss_type='dapo'; all rows"
    return [
        LossImplementation(
            "liger", note, compute_dtype(on_gpu), partial(_liger_call, module), "recompute all rows", SEQUENCE
        )
    ]


LOSS_PEERS: Final[dict[str, Callable[[bool], Found]]] = {"trl": _trl, "liger": _liger}


def loss_peers(device: torch.device) -> tuple[Found, list[Unavailable]]:
    """Every peer that can be imported, and the error of every one that cannot."""
    return collect(LOSS_PEERS, device)

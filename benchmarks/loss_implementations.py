"""What is compared: our loss, the naive one, chunks under torch.utils.checkpoint, and the peers that are installed.

All compute the same: PPO's clipped surrogate with a truncated importance weight, averaged over the valid tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.entrant import OURS, patched, unpatched
from benchmarks.loss_workload import CLIP_HIGH, CLIP_LOW, IS_HIGH, Batch
from muonrl_kernels import linear_policy_loss, policy_loss

__all__ = ["NAIVE", "LossImplementation", "compute_dtype", "own_losses", "plain_logp", "token_mean"]

NAIVE: Final = "naive"
_CHUNK: Final = {"cpu": 256, "cuda": 2048}
"""Rows of a chunk: what ours takes for large vocabularies suits checkpointed chunks as well."""


def compute_dtype(on_gpu: bool) -> torch.dtype:
    """Of hidden and weight: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if on_gpu else torch.float32


@dataclass(frozen=True)
class LossImplementation:
    """One way to compute the loss.

    Attributes:
        name: as printed.
        note: how it was configured, and which rows enter its products.
        compute: dtype of hidden and weight (of log-probabilities for the elementwise loss).
        call: the scalar loss of a batch, ready for backward().
        algorithm: its key in the cost model; "" for the elementwise loss.
        chunk: rows of logits that exist at once, for the cost model.
        kind: which of the two losses it computes.
        active: context in which it runs.
    """

    name: str
    note: str
    compute: torch.dtype
    call: Callable[[Batch], Tensor]
    algorithm: str
    chunk: int = 1
    kind: Literal["linear", "elementwise"] = "linear"
    active: Callable[[], AbstractContextManager[Any]] = unpatched


def token_mean(logp: Tensor, b: Batch, rows: Tensor | None = None) -> Tensor:
    """The loss of log-probabilities in plain PyTorch: of all tokens, or of the valid ones alone, whose indices are `rows`."""
    old, rollout, advantages = (
        x if rows is None else x[rows] for x in (b.old_logp, b.rollout_logp, b.advantages)
    )
    ratio = torch.exp(logp - old)
    bounded = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
    weight = torch.exp(old - rollout).clamp(max=IS_HIGH)
    terms = -torch.minimum(ratio * advantages, bounded * advantages) * weight
    if rows is not None:
        return terms.sum() / rows.numel()
    return torch.where(b.mask, terms, 0.0).sum() / b.mask.sum()


def plain_logp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """log pi_theta of the targets [N] by way of the whole logits, in fp32 from the logits on."""
    log_p = torch.log_softmax(F.linear(hidden, weight).float(), 1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1)


def _naive(b: Batch) -> Tensor:
    return token_mean(plain_logp(b.hidden, b.weight, b.targets), b)


def _checkpointed(b: Batch) -> Tensor:
    rows = b.mask.nonzero().squeeze(1)
    parts = [
        checkpoint(plain_logp, b.hidden[part], b.weight, b.targets[part], use_reentrant=False)
        for part in rows.split(_CHUNK[b.hidden.device.type])
    ]
    return token_mean(torch.cat(parts), b, rows)


def _ours(b: Batch, *, bounded: bool = False, **options: Any) -> Tensor:
    """Our linear loss; `bounded` tells it the number of valid rows, which a GPU is not asked for."""
    loss, _ = linear_policy_loss(
        b.hidden,
        b.weight,
        b.targets,
        b.old_logp,
        b.advantages,
        b.mask,
        rollout_logp=b.rollout_logp,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        is_high=IS_HIGH,
        valid_rows=b.valid if bounded else None,
        **options,
    )
    return loss


def _ours_elementwise(b: Batch) -> Tensor:
    loss, _ = policy_loss(
        b.logp,
        b.old_logp,
        b.advantages,
        b.mask,
        rollout_logp=b.rollout_logp,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        is_high=IS_HIGH,
    )
    return loss


def own_losses(device: torch.device, compute: torch.dtype) -> list[LossImplementation]:
    """Ours, plain PyTorch, and on a GPU ours in other ways as well.

    Names are unique among the linear ones and among the elementwise ones.
    """
    rows = _CHUNK[device.type]
    on_gpu = device.type == "cuda"
    how = f"linear_policy_loss, {'valid_rows given' if on_gpu else 'defaults'}; valid rows"
    ours = partial(_ours, bounded=on_gpu)
    checkpoints = f"chunks of {rows} rows under torch.utils.checkpoint; valid rows"
    plain = "F.linear, log_softmax, gather; all rows"
    found = [
        LossImplementation(OURS, how, compute, ours, "single pass", rows),
        LossImplementation(NAIVE, plain, compute, _naive, NAIVE),
        LossImplementation("checkpoint", checkpoints, compute, _checkpointed, "checkpoint", rows),
        LossImplementation(
            OURS, "policy_loss, defaults", torch.float32, _ours_elementwise, "", kind="elementwise"
        ),
        LossImplementation(
            "eager",
            "PyTorch's operations one by one",
            torch.float32,
            lambda b: token_mean(b.logp, b),
            "",
            kind="elementwise",
        ),
    ]
    return found + (_on_gpu_only(compute, rows) if on_gpu else [])


def _on_gpu_only(compute: torch.dtype, rows: int) -> list[LossImplementation]:
    """Ours in other ways: without a bound on the valid rows, in PyTorch, and with products of our own for the logits."""
    triton = importlib.import_module("muonrl_kernels.linear_triton")
    fused = {"run_loss": partial(triton.run_loss, head_path="fused")}
    ours = partial(LossImplementation, compute=compute, chunk=rows)
    return [
        ours(OURS + " unbounded", "defaults; all rows", call=_ours, algorithm="single pass all rows"),
        ours(
            OURS + " torch",
            "backend='torch'; valid rows",
            call=partial(_ours, backend="torch"),
            algorithm="single pass",
        ),
        ours(
            OURS + " fused",
            "valid_rows given, head_path='fused'; valid rows",
            call=partial(_ours, bounded=True),
            algorithm="fused",
            active=lambda: patched(triton, fused),
        ),
    ]

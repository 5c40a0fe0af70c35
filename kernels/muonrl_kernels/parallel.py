"""How the loss is spread over processes: who shares the normaliser, and who holds which part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muonrl_kernels.metrics import SUMS, LossMetrics
from muonrl_kernels.options import LossOptions
from muonrl_kernels.tokens import sequence_index, sequence_sum

__all__ = ["DataParallel", "Reduction", "VocabShard", "require_torch"]

Reduction = Literal["mean", "sum"]
_REDUCTIONS: Final = ("mean", "sum")


def _check_group(name: str, group: dist.ProcessGroup) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{name} needs torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} must hold this process, rank {dist.get_rank()}")


@dataclass(frozen=True)
class DataParallel:
    """Ranks that hold different tokens of one update.

    Attributes:
        group: those ranks. reduction: what is done to gradients over them later: "mean" (DDP, FSDP) or "sum".
    """

    group: dist.ProcessGroup
    reduction: Reduction

    @staticmethod
    def make(group: dist.ProcessGroup | None, reduction: str) -> DataParallel | None:
        """None without a group.

        Raises:
            ValueError: an unknown reduction, no initialised torch.distributed, or a group without this process.
        """
        if reduction not in _REDUCTIONS:
            raise ValueError(f"dp_reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        if group is None:
            return None
        _check_group("dp_group", group)
        return DataParallel(group, "mean" if reduction == "mean" else "sum")

    @property
    def scale(self) -> float:
        """Factor that a later mean over the ranks takes away again."""
        return float(dist.get_world_size(self.group)) if self.reduction == "mean" else 1.0

    def share(
        self,
        options: LossOptions,
        old_logp: Tensor,
        mask: Tensor,
        rollout_logp: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> LossOptions:
        """The options with the normaliser of all ranks; without one of the user's own this is a collective call."""
        if options.normalizer is not None:
            return replace(options, normalizer=options.normalizer / self.scale)
        valid = mask.reshape(-1).to(torch.bool) & old_logp.reshape(-1).isfinite()
        if rollout_logp is not None:
            valid = valid & rollout_logp.reshape(-1).isfinite()
        if options.agg == "sequence_mean":
            sequences = sequence_index(old_logp.shape, cu_seqlens, old_logp.device)
            valid = valid if sequences is None else sequence_sum(valid.to(torch.int64), *sequences) > 0
        count = valid.sum()
        dist.all_reduce(count, group=self.group)
        dtype = torch.float64 if old_logp.dtype == torch.float64 else torch.float32
        return replace(options, normalizer=count.to(dtype) / self.scale)

    def unscale_(self, metrics: LossMetrics) -> None:
        """Take the factor of a later mean off the loss among the sums, which are added up over the ranks."""
        metrics.sums[SUMS.index("loss")] /= self.scale


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns start .. start + V_local of a vocabulary of `columns`, the rest on the other ranks of `group`."""

    group: dist.ProcessGroup
    start: int
    columns: int

    @staticmethod
    def make(
        group: dist.ProcessGroup | None, rows: int, vocab_start: int | None, vocab_size: int | None
    ) -> VocabShard | None:
        """None without a group; `rows` is V_local. Without vocab_start every rank holds `rows` columns, in rank order.

        Raises:
            ValueError: vocab_start without a group or without vocab_size, a range outside of the vocabulary, no initialised
                torch.distributed, or a group without this process.
        """
        if group is None:
            if vocab_start is not None:
                raise ValueError("vocab_start goes with tp_group")
            return None
        _check_group("tp_group", group)
        if vocab_start is None:
            whole = rows * dist.get_world_size(group)
            columns = whole if vocab_size is None else vocab_size
            if not 1 <= columns <= whole:
                raise ValueError(f"vocab_size must lie in 1..{whole}, got {vocab_size}")
            return VocabShard(group, rows * dist.get_rank(group), columns)
        if vocab_size is None or vocab_size < 1 or vocab_start < 0:
            raise ValueError(
                f"vocab_start needs vocab_size >= 1 and vocab_start >= 0, got {vocab_size} and {vocab_start}"
            )
        return VocabShard(group, vocab_start, vocab_size)

    def kept(self, rows: int) -> int:
        """How many of this rank's `rows` columns are no padding."""
        return max(0, min(rows, self.columns - self.start))

    def largest_(self, x: Tensor) -> Tensor:
        """Maximum over the ranks, in place; a collective call."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def total_(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; a collective call."""
        dist.all_reduce(x, dist.ReduceOp.SUM, self.group)
        return x


def require_torch(backend: str, reason: str | None) -> str:
    """The backend to ask for where `reason`, the name of an argument, leaves PyTorch operations only; None leaves all.

    Raises:
        RuntimeError: backend is "triton" and there is a reason.
    """
    if reason is None:
        return backend
    if backend == "triton":
        raise RuntimeError(f"backend='triton' is not available with {reason}: use 'auto' or 'torch'")
    return "torch" if backend == "auto" else backend

"""From trajectories to padded micro-batches of tokens with their old log-probabilities, advantages and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muonrl.trajectory import Kind, Trajectory


@dataclass(frozen=True)
class Rollout:
    """One trajectory as flat arrays of its T tokens."""

    tokens: npt.NDArray[np.int64]  # [T]
    action: npt.NDArray[np.bool_]  # [T], True where the policy sampled the token
    logp: npt.NDArray[np.float32]  # [T], rollout log-probability, 0 elsewhere
    advantage: npt.NDArray[
        np.float32
    ]  # [T], the turn's normalised advantage on its action tokens, 0 elsewhere

    def __len__(self) -> int:
        return int(self.tokens.size)


def flatten(trajectory: Trajectory, advantages: Sequence[float]) -> Rollout:
    """Flatten a trajectory; ``advantages`` holds one normalised value a turn."""
    if len(advantages) != len(trajectory.turns):
        raise ValueError(f"advantages: received {len(advantages)} for {len(trajectory.turns)} turns")
    segments = [(s, a) for turn, a in zip(trajectory.turns, advantages, strict=True) for s in turn.segments]
    action = [np.full(len(s), s.kind is Kind.ACTION) for s, _ in segments]
    advantage = [np.full(len(s), a if s.kind is Kind.ACTION else 0.0, dtype=np.float32) for s, a in segments]
    return Rollout(
        tokens=np.concatenate([s.tokens for s, _ in segments]).astype(np.int64),
        action=np.concatenate(action),
        logp=np.concatenate([s.logp for s, _ in segments]),
        advantage=np.concatenate(advantage),
    )


@dataclass(frozen=True)
class MicroBatch:
    """``B`` rollouts right-padded to the longest. Row t of the ``targets`` side is predicted from token t.

    Padding on the right is never seen by an earlier token under causal attention, so no attention mask is needed.
    """

    input_ids: Tensor  # int64 [B, T-1]
    targets: Tensor  # int64 [B, T-1]
    mask: Tensor  # bool [B, T-1]
    rollout_logp: Tensor  # float32 [B, T-1]
    advantages: Tensor  # float32 [B, T-1]
    index: tuple[int, ...]  # which rollouts


def micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[MicroBatch]:
    """Group rollouts of similar length so that each padded group has at most ``max_tokens`` tokens (or one rollout)."""
    order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i]))
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * len(rollouts[i]) > max_tokens:
            yield _pad(rollouts, group)
            group = []
        group.append(i)
    if group:
        yield _pad(rollouts, group)


def _pad(rollouts: Sequence[Rollout], index: Sequence[int]) -> MicroBatch:
    width = max(len(rollouts[i]) for i in index)

    def stack(name: str, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(len(index), width, dtype=dtype)
        for row, i in enumerate(index):
            values = torch.from_numpy(getattr(rollouts[i], name))
            out[row, : len(values)] = values
        return out

    tokens = stack("tokens", torch.int64)
    return MicroBatch(
        input_ids=tokens[:, :-1],
        targets=tokens[:, 1:],
        mask=stack("action", torch.bool)[:, 1:],
        rollout_logp=stack("logp", torch.float32)[:, 1:],
        advantages=stack("advantage", torch.float32)[:, 1:],
        index=tuple(index),
    )

"""Small policies, trajectories and configurations for the tests of the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from muonrl.config import Config
from muonrl.training.batch import Rollout
from muonrl.trajectory import Grade, Kind, PolicyId, Segment, Trajectory, Turn

VOCAB = 50
FIRST = PolicyId(0, 0)


def config(**sections: dict[str, Any]) -> Config:
    """The default configuration with fields of some sections replaced: ``config(loss={"epochs": 2})``."""
    base = Config()
    parts = {name: dataclasses.replace(getattr(base, name), **values) for name, values in sections.items()}
    return dataclasses.replace(base, **parts)


def tiny_model(seed: int = 0, layers: int = 2, tied: bool = True) -> Qwen3ForCausalLM:
    spec = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(spec).float()


def rollouts(lengths: Sequence[int], seed: int = 0) -> list[Rollout]:
    """Random rollouts whose first two tokens are the prompt, with about half of the others sampled."""
    rng = np.random.default_rng(seed)
    result = []
    for n in lengths:
        action = rng.random(n) < 0.5
        action[:2], action[-1] = False, True
        result.append(
            Rollout(
                tokens=rng.integers(2, VOCAB, n),
                action=action,
                logp=np.where(action, -3.0 - 2.0 * rng.random(n), 0.0).astype(np.float32),
                advantage=np.where(action, rng.normal(size=n), 0.0).astype(np.float32),
            )
        )
    return result


def segment(tokens: Sequence[int], policy: PolicyId | None = None, kind: Kind = Kind.OBSERVATION) -> Segment:
    """An ACTION segment where a policy is given, else one of ``kind``."""
    ids = np.array(tokens, np.int32)
    logp = -1.0 - ids.astype(np.float32) / 100 if policy else np.zeros(len(ids), np.float32)
    return Segment(ids, logp, Kind.ACTION if policy else kind, policy)


def trajectory(
    task_id: str = "t",
    *,
    name: str = "",
    policy: PolicyId = FIRST,
    reward: int = 0,
    value: float = 0.5,
    visit: int = 0,
    replies: Sequence[Sequence[int]] = ((5, 6), (7, 1)),
) -> Trajectory:
    turns = tuple(
        Turn((segment([2, 3], kind=Kind.TEMPLATE if k == 0 else Kind.OBSERVATION), segment(reply, policy)))
        for k, reply in enumerate(replies)
    )
    grade = Grade(reward, reward, 1, 1, 1)
    return Trajectory(name or f"{task_id}#{visit}", task_id, visit, turns, grade, policy, value, seed=0)

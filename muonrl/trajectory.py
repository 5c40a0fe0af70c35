"""The data that flows through the trainer: policies, token segments, turns, trajectories and grades."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

TOOL_ERROR_KINDS = ("invalid_action", "not_found", "ambiguous", "exit_code", "timeout")
ToolErrorKind = Literal["invalid_action", "not_found", "ambiguous", "exit_code", "timeout"]


@dataclass(frozen=True, order=True)
class PolicyId:
    """Which weights produced a token. Totally ordered and never reused: a rollback starts a new epoch."""

    epoch: int
    step: int


class Kind(Enum):
    """What a token is: sampled by the policy, returned by the environment, or chat-template glue."""

    ACTION = "action"
    OBSERVATION = "observation"
    TEMPLATE = "template"


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens of one kind under one policy.

    ``tokens`` is int32 [n]; ``logp`` is float32 [n], the log-probability under the distribution really sampled from
    (0 where the token was not sampled). Only ACTION segments carry a policy.
    """

    tokens: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float32]
    kind: Kind
    policy: PolicyId | None = None

    def __post_init__(self) -> None:
        if self.tokens.shape != self.logp.shape or self.tokens.ndim != 1:
            raise ValueError(
                f"tokens {self.tokens.shape} and logp {self.logp.shape} must be equal 1-D shapes"
            )
        if (self.kind is Kind.ACTION) != (self.policy is not None):
            raise ValueError(
                f"a {self.kind.value} segment with policy {self.policy}: exactly ACTION segments carry one"
            )

    def __len__(self) -> int:
        return int(self.tokens.size)


@dataclass(frozen=True)
class ToolError:
    """A failed tool call as a value: what the tool-error penalty reads."""

    kind: ToolErrorKind
    detail: str = ""


@dataclass(frozen=True, eq=False)
class Turn:
    """One reply of the policy (``segments`` up to and including it) with what its action led to.

    ``truncated`` says that the reply hit ``max_new_tokens`` before its end-of-turn token.
    """

    segments: tuple[Segment, ...]
    tool_errors: tuple[ToolError, ...] = ()
    truncated: bool = False

    @property
    def n_action(self) -> int:
        return sum(len(s) for s in self.segments if s.kind is Kind.ACTION)


@dataclass(frozen=True)
class Grade:
    """The verdict of one grading: ``reward`` is 1 only if every fail-to-pass and pass-to-pass test passed."""

    reward: int
    f2p_passed: int
    f2p_total: int
    p2p_passed: int
    p2p_total: int
    suspicious: bool = False
    reason: str = ""
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One rollout of one task: the unit that is graded, weighed by the value tracker and trained on once."""

    id: str
    task_id: str
    visit: int
    turns: tuple[Turn, ...]
    grade: Grade
    dispatched_at: PolicyId
    value_at_dispatch: float
    seed: int
    stop: str = "finish"
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> int:
        return self.grade.reward

    @property
    def n_action(self) -> int:
        return sum(t.n_action for t in self.turns)

    @property
    def oldest_policy(self) -> PolicyId:
        return min(s.policy for t in self.turns for s in t.segments if s.policy is not None)

    def segments(self) -> list[Segment]:
        """All segments in order, over the turns."""
        return [s for t in self.turns for s in t.segments]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed as a function of its parts alone, so that scheduling never changes what is sampled."""
    text = "\x1f".join(str(p) for p in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

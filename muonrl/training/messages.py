"""What the learner's process and the rollout process tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from muonrl.trajectory import PolicyId, Trajectory


@dataclass(frozen=True)
class Publish:
    """Weights staged at ``path``; the receiver acknowledges the fingerprint of what it really holds, then flips."""

    policy: PolicyId
    path: str
    fingerprint: str


@dataclass(frozen=True)
class RolloutRequest:
    """One episode to play. ``value`` is the baseline frozen at dispatch; ``purpose`` is ``train`` or ``eval``."""

    id: str
    task_id: str
    visit: int
    seed: int
    dispatched_at: PolicyId
    value: float
    purpose: str = "train"


@dataclass(frozen=True)
class Stop:
    """Close every sandbox and end."""


@dataclass(frozen=True)
class Ready:
    """The rollout process has its sandboxes and waits for weights."""


@dataclass(frozen=True)
class Ack:
    """The weights that the sampler now holds."""

    policy: PolicyId
    fingerprint: str


@dataclass(frozen=True)
class Finished:
    """A graded rollout."""

    request: RolloutRequest
    trajectory: Trajectory


@dataclass(frozen=True)
class Dropped:
    """A rollout lost to an infrastructure fault: counted, never trained on."""

    request: RolloutRequest
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Usage:
    """Running totals of the rollout process since it began; sent with every finished rollout."""

    busy_seconds: float = 0.0  # inside the sampler's forward passes
    sampled_tokens: int = 0
    fed_tokens: int = 0
    gradings: int = 0
    gradings_cached: int = 0
    grade_seconds: float = 0.0
    sandboxes: int = 0
    sandbox_seconds: float = 0.0
    rss_mb: float = 0.0
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """The rollout process cannot go on; ``user`` marks a mistake or lack that the user can mend."""

    text: str
    user: bool


Command = Publish | RolloutRequest | Stop
Event = Ready | Ack | Finished | Dropped | Usage | Failed

"""Per-turn penalties: over-long replies and failed tool calls. The outcome reward itself is never touched.

Source: "Long-Horizon RL Needs Muon". The paper gives the length threshold, its extreme and the exemption of the last turn;
the shape between threshold and extreme is the field ``length_shape``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muonrl.config import AlgorithmConfig
from muonrl.trajectory import ToolError, Turn

# A command that the policy chose to run may exit non-zero (a failing test run): no misuse of the tool protocol.
_NO_PROTOCOL_ERROR = frozenset({"exit_code"})


@dataclass(frozen=True)
class TurnPenalty:
    """The raw terms of one turn: ``c_len`` and ``c_tool`` (each <= 0) and ``c``, their clipped sum."""

    c_len: float
    c_tool: float
    c: float


def length_penalty(n_tokens: int, is_last: bool, max_new_tokens: int, cfg: AlgorithmConfig) -> float:
    """c_len of a reply of ``n_tokens`` action tokens: 0 up to the threshold and on the last turn, else down to -strength.

    ``linear`` falls from 0 at the threshold to the extreme at ``max_new_tokens``; ``step`` is the extreme at once.
    """
    if not cfg.length_penalty or is_last or n_tokens <= cfg.length_threshold:
        return 0.0
    if cfg.length_shape == "step" or max_new_tokens <= cfg.length_threshold:
        return -cfg.length_strength
    return -cfg.length_strength * min(
        1.0, (n_tokens - cfg.length_threshold) / (max_new_tokens - cfg.length_threshold)
    )


def tool_penalty(errors: Sequence[ToolError], cfg: AlgorithmConfig) -> float:
    """c_tool of a turn: -strength, once, if its action was invalid or any of its tool calls failed.

    ``any_error`` counts every kind; ``protocol_only`` forgives the non-zero exit of a command that the policy ran.
    """
    if not cfg.tool_penalty:
        return 0.0
    if cfg.tool_error == "protocol_only":
        errors = [e for e in errors if e.kind not in _NO_PROTOCOL_ERROR]
    return -cfg.tool_strength if errors else 0.0


def turn_penalties(
    turns: Sequence[Turn], max_new_tokens: int, cfg: AlgorithmConfig
) -> tuple[TurnPenalty, ...]:
    """The penalties of a trajectory's turns: c = clip(c_len + c_tool, -penalty_clip, penalty_clip).

    Both terms are <= 0, so the upper side never binds; and with the default strength 0.5 against a clip of 0.25 one tool
    error alone saturates it.
    """
    result = []
    for k, turn in enumerate(turns):
        c_len = length_penalty(turn.n_action, k == len(turns) - 1, max_new_tokens, cfg)
        c_tool = tool_penalty(turn.tool_errors, cfg)
        c = min(cfg.penalty_clip, max(-cfg.penalty_clip, c_len + c_tool))
        result.append(TurnPenalty(c_len, c_tool, c))
    return tuple(result)

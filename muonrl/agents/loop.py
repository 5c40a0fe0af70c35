"""The built-in agent loop: reply, act in the sandbox, observe, until the policy finishes or its budget ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from muonrl.agents.actions import Action, parse_action
from muonrl.config import AgentConfig
from muonrl.errors import InfrastructureError
from muonrl.policy.tokenizer import ChatFormat
from muonrl.sandbox.protocol import Sandbox
from muonrl.trajectory import TOOL_ERROR_KINDS, Kind, Segment, ToolError, Turn


class ReplySource(Protocol):
    """What the loop needs of a sampler: a conversation that appends tokens and samples a reply."""

    @property
    def context_tokens(self) -> int: ...

    async def generate(self, tokens: list[int], *, max_new_tokens: int, seed: int) -> list[Segment]: ...


@dataclass
class Episode:
    """What came of an episode, before grading."""

    turns: list[Turn] = field(default_factory=list)
    stop: str = "max_turns"  # finish | max_turns | context
    tool_seconds: float = 0.0


async def run_episode(
    source: ReplySource,
    sandbox: Sandbox,
    chat: ChatFormat,
    statement: str,
    config: AgentConfig,
    *,
    max_context: int,
    tool_timeout: float,
    seed_of: Callable[[int], int],
) -> Episode:
    """Play one episode; ``seed_of(turn)`` gives the sampling seed of each turn.

    Tool errors are values on the turn that caused them. Infrastructure faults propagate as
    :class:`~muonrl.errors.InfrastructureError`.
    """
    episode = Episode()
    feed = chat.prompt(statement)
    for number in range(config.max_turns):
        if source.context_tokens + len(feed) + config.max_new_tokens > max_context:
            episode.stop = "context"
            break
        reply = await source.generate(feed, max_new_tokens=config.max_new_tokens, seed=seed_of(number))
        tokens = np.concatenate([s.tokens for s in reply])
        truncated = int(tokens[-1]) != chat.end_id
        action = parse_action(chat.decode(tokens))
        began = time.perf_counter()
        text, errors, done = await _act(sandbox, action, config, tool_timeout)
        episode.tool_seconds += time.perf_counter() - began
        segments = (_given(feed, Kind.TEMPLATE if number == 0 else Kind.OBSERVATION), *reply)
        episode.turns.append(Turn(segments, errors, truncated))
        if done:
            episode.stop = "finish"
            break
        feed = chat.observation(text, close_reply=truncated)
    return episode


def _given(tokens: list[int], kind: Kind) -> Segment:
    return Segment(np.array(tokens, dtype=np.int32), np.zeros(len(tokens), dtype=np.float32), kind)


async def _act(
    sandbox: Sandbox, action: Action | ToolError, config: AgentConfig, timeout: float
) -> tuple[str, tuple[ToolError, ...], bool]:
    """Run the action's tool -> (observation text, errors, whether the episode is over)."""
    if isinstance(action, ToolError):
        return f"error: {action.detail}", (action,), False
    options = {"view_lines": config.view_lines, "max_chars": config.max_observation_chars, "timeout": timeout}
    payload = json.dumps({"name": action.name, "parameters": action.parameters, "options": options}).encode()
    result = await sandbox.call("tools", payload, timeout=timeout + 5.0)
    if result.timed_out:
        error = ToolError("timeout", f"{action.name} did not end within {timeout:g} s")
        return f"error: {error.detail}", (error,), False
    if result.rc and not result.stdout:
        # The agent's own command ended the tool (``kill -9 $PPID``): its mistake, not the machine's.
        error = ToolError("exit_code", f"{action.name} was ended by its own command ({result.rc})")
        return f"error: {error.detail}", (error,), False
    try:
        answer = json.loads(result.stdout)
        error = answer["error"]
        errors = () if error is None else (ToolError(error["kind"], str(error["detail"])),)
        # JSON can hold half a surrogate pair, which is no text.
        text = str(answer["text"]).encode("utf-8", "replace").decode()
        done = bool(answer["done"])
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise InfrastructureError("tool_protocol", f"rc {result.rc}: {result.stderr[-200:]!r}") from fault
    if any(e.kind not in TOOL_ERROR_KINDS for e in errors):
        raise InfrastructureError("tool_protocol", f"unknown tool error {errors}")
    return text, errors, done

"""Continuous batching over cache slots: many episodes share one forward pass, each keeps its cache between turns."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from muonrl.sampling.decoder import Feed, Shape, SlotCache, Weights, forward
from muonrl.trajectory import Kind, PolicyId, Segment


@dataclass
class _Slot:
    """One episode's place in the cache."""

    index: int
    policy: PolicyId
    context: list[int] = field(default_factory=list)  # every token of the episode so far
    cached: int = 0  # how many of them have keys and values


@dataclass
class _Request:
    """One reply being sampled."""

    slot: _Slot
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    done: asyncio.Future[list[Segment]]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    policies: list[PolicyId] = field(default_factory=list)

    def segments(self) -> list[Segment]:
        """The reply as runs of tokens under one policy each."""
        runs: list[Segment] = []
        start = 0
        for end in range(1, len(self.tokens) + 1):
            if end == len(self.tokens) or self.policies[end] != self.policies[start]:
                tokens = np.array(self.tokens[start:end], dtype=np.int32)
                logp = np.array(self.logps[start:end], dtype=np.float32)
                runs.append(Segment(tokens, logp, Kind.ACTION, self.policies[start]))
                start = end
        return runs


class Session:
    """One episode's conversation with the policy. Close it to free its slot."""

    def __init__(self, engine: Engine, slot: _Slot) -> None:
        self._engine, self._slot = engine, slot

    @property
    def context_tokens(self) -> int:
        return len(self._slot.context)

    async def generate(self, tokens: list[int], *, max_new_tokens: int, seed: int) -> list[Segment]:
        """Append ``tokens`` to the context and sample a reply of at most ``max_new_tokens``.

        The reply ends with the end-of-turn token unless it was cut off. Returned ACTION segments carry, per token, the
        log-probability under the distribution really sampled from and the policy that sampled it. The result depends on
        the context, the weights and ``seed`` alone, not on what else is in the batch.
        """
        return await self._engine.sample(self._slot, tokens, max_new_tokens, seed)

    def close(self) -> None:
        self._engine.release(self._slot)


class Engine:
    """Holds the weights of the current policy (and of older ones that still have open episodes) and the slots.

    ``mode="drain"``: an episode keeps the policy it began with, new episodes take the newest; old weights go when their
    last episode closes. ``mode="in_flight"``: new weights apply at once, and open episodes recompute their caches, which
    are never mixed between policies.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        end_id: int,
        slots: int,
        max_context: int,
        mode: str = "drain",
        temperature: float = 1.0,
    ) -> None:
        if mode not in ("drain", "in_flight"):
            raise ValueError(f"mode {mode!r}: allowed are 'drain' and 'in_flight'")
        if temperature <= 0:
            raise ValueError(f"temperature {temperature}: must be positive")
        self.shape, self.end_id, self.mode, self.temperature = shape, end_id, mode, temperature
        self.cache = SlotCache(shape, slots, max_context)
        self.max_context = max_context
        self.policy: PolicyId | None = None
        self._weights: dict[PolicyId, Weights] = {}
        self._free = list(range(slots))[::-1]
        self._open: dict[int, _Slot] = {}
        self._waiting: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self._requests: list[_Request] = []
        self._work = asyncio.Event()
        self.busy_seconds, self.sampled_tokens, self.fed_tokens = 0.0, 0, 0

    def publish(self, policy: PolicyId, weights: Weights) -> None:
        """Make ``weights`` current. ``policy`` must be newer than every policy before it."""
        if self.policy is not None and policy <= self.policy:
            raise ValueError(f"policy {policy} is not newer than {self.policy}")
        self._weights[policy] = weights
        self.policy = policy
        if self.mode == "in_flight":
            for slot in self._open.values():
                slot.policy, slot.cached = policy, 0
        self._forget()

    def _forget(self) -> None:
        used = {slot.policy for slot in self._open.values()} | {self.policy}
        self._weights = {p: w for p, w in self._weights.items() if p in used}

    async def open(self) -> Session:
        """A session in a free slot under the newest policy; waits where all slots are taken."""
        while not self._free:
            ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            await self._waiting.put(ticket)
            try:
                await ticket
            except asyncio.CancelledError:
                if ticket.done() and not ticket.cancelled():
                    self._wake()  # the slot that this one was woken for is for the next
                raise
        if self.policy is None:
            raise RuntimeError("no policy has been published")
        slot = _Slot(self._free.pop(), self.policy)
        self._open[slot.index] = slot
        return Session(self, slot)

    def release(self, slot: _Slot) -> None:
        """Free a slot; a reply still being sampled for it is cancelled."""
        if self._open.get(slot.index) is not slot:
            return
        del self._open[slot.index]
        for request in [r for r in self._requests if r.slot is slot]:
            self._requests.remove(request)
            request.done.cancel()
        self._free.append(slot.index)
        self._forget()
        self._wake()

    def _wake(self) -> None:
        while not self._waiting.empty():
            ticket = self._waiting.get_nowait()
            if not ticket.done():
                ticket.set_result(None)
                break

    async def sample(self, slot: _Slot, tokens: list[int], max_new_tokens: int, seed: int) -> list[Segment]:
        if self._open.get(slot.index) is not slot:
            raise RuntimeError("the session is closed")
        if any(r.slot is slot and not r.done.done() for r in self._requests):
            raise RuntimeError("the session is sampling a reply already")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens}: must be at least 1")
        if not tokens and slot.cached == len(slot.context):
            raise ValueError("tokens: received none, and the context has no token that was not fed yet")
        room = self.max_context - len(slot.context) - len(tokens)
        budget = min(max_new_tokens, room)
        if budget < 1:
            raise ValueError(
                f"context of {len(slot.context) + len(tokens)} tokens leaves no room in {self.max_context}"
            )
        slot.context.extend(tokens)
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(budget)
        request = _Request(slot, uniforms, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._work.set()
        return await request.done

    async def run(self) -> None:
        """Step for ever while there is work; yields to the event loop between steps. Cancel to stop."""
        while True:
            if not self._requests:
                self._work.clear()
                await self._work.wait()
            self.step()
            await asyncio.sleep(0)

    def step(self) -> None:
        """One token for every reply being sampled."""
        began = time.perf_counter()
        # A caller that was cancelled leaves a request that nobody waits for.
        self._requests = [r for r in self._requests if not r.done.done()]
        by_policy: dict[PolicyId, list[_Request]] = {}
        for request in self._requests:
            by_policy.setdefault(request.slot.policy, []).append(request)
        for policy, requests in by_policy.items():
            self._step_policy(policy, requests)
        self._requests = [r for r in self._requests if not r.done.done()]
        self.busy_seconds += time.perf_counter() - began

    def _step_policy(self, policy: PolicyId, requests: list[_Request]) -> None:
        feeds = [Feed(r.slot.index, r.slot.cached, r.slot.context[r.slot.cached :]) for r in requests]
        logits = forward(self._weights[policy], self.cache, feeds)
        logp = torch.log_softmax(logits / self.temperature, dim=-1)
        # Inverse-CDF sampling: one uniform a token, so a reply depends on its own seed alone.
        cdf = logp.double().exp().cumsum(-1)
        u = torch.tensor([r.uniforms[len(r.tokens)] for r in requests], dtype=torch.float64)
        chosen = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).clamp_(max=cdf.shape[-1] - 1)
        picked = logp.gather(1, chosen)[:, 0].tolist()
        for request, feed, token, value in zip(requests, feeds, chosen[:, 0].tolist(), picked, strict=True):
            slot = request.slot
            slot.cached += len(feed.tokens)
            slot.context.append(token)
            request.tokens.append(token)
            request.logps.append(value)
            request.policies.append(policy)
            self.fed_tokens += len(feed.tokens)
            if token == self.end_id or len(request.tokens) == len(request.uniforms):
                self.sampled_tokens += len(request.tokens)
                request.done.set_result(request.segments())

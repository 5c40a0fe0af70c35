"""An engine on small models, stepped by hand or by itself, and the check of what it returns."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from muonrl.sampling.engine import Engine
from muonrl.trajectory import Kind, PolicyId
from tests.sampling.cases import CONTEXT, exact_logits, random_model, weights_of

P1, P2, P3 = PolicyId(0, 1), PolicyId(0, 2), PolicyId(1, 0)
MODELS = {P1: random_model(seed=11), P2: random_model(seed=12), P3: random_model(seed=13)}
WEIGHTS = {policy: weights_of(model) for policy, model in MODELS.items()}
END = 3


def make_engine(slots=4, *, end_id=END, mode="drain", temperature=1.0, policy=P1, max_context=CONTEXT):
    engine = Engine(
        WEIGHTS[P1].shape,
        end_id=end_id,
        slots=slots,
        max_context=max_context,
        mode=mode,
        temperature=temperature,
    )
    if policy is not None:
        engine.publish(policy, WEIGHTS[policy])
    return engine


def play(engine, body):
    """Run ``body`` with the engine stepping beside it; a stuck one fails."""

    async def main():
        steps, task = asyncio.ensure_future(engine.run()), asyncio.ensure_future(body)
        try:
            done, _ = await asyncio.wait({steps, task}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert done, "the replies do not end"
            return done.pop().result()
        finally:
            steps.cancel()
            task.cancel()
            await asyncio.gather(steps, task, return_exceptions=True)

    return asyncio.run(main())


def run(body):
    """Run a test that steps the engine by hand; one that waits for ever fails."""
    return asyncio.run(asyncio.wait_for(body, 30))


async def settle():
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def finish(engine, *tasks):
    """Step by hand until the tasks are done."""
    for _ in range(200):
        await settle()
        if all(task.done() for task in tasks):
            return [task.result() for task in tasks]
        engine.step()
    raise AssertionError("the replies do not end")


def generate(session, tokens, *, n=12, seed=0):
    return asyncio.create_task(session.generate(tokens, max_new_tokens=n, seed=seed))


def ids_of(segments):
    return np.concatenate([s.tokens for s in segments]).tolist()


def check_logps(context, segments, temperature=1.0):
    """Each token's log-probability is that of the policy it names, given the whole context; returns the new context."""
    context = list(context)
    for segment in segments:
        assert segment.kind is Kind.ACTION
        start, context = len(context), context + segment.tokens.tolist()
        logits = exact_logits(MODELS[segment.policy], context)[start - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1)[range(len(segment)), segment.tokens.tolist()]
        assert np.abs(segment.logp - expected.numpy()).max() < 1e-4, segment.policy
        assert (segment.logp < 0).all() and np.isfinite(segment.logp).all()
    return context


def runs(segments):
    return [(s.policy, len(s)) for s in segments]

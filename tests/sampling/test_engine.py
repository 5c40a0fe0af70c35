"""Exact log-probabilities, and replies that depend on context, weights and seed alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests.sampling.cases import exact_logits
from tests.sampling.driving import (
    END,
    MODELS,
    P1,
    check_logps,
    finish,
    generate,
    ids_of,
    make_engine,
    play,
    run,
    runs,
)


async def _conversation(engine, seed, *, turns=3, check=True, temperature=1.0):
    """A session of several turns -> its replies."""
    session = await engine.open()
    context, replies = [], []
    for turn in range(turns):
        feed = [(seed * 5 + turn * 3 + i) % 23 for i in range(1 + (seed + turn * 4) % 7)]
        reply = await session.generate(feed, max_new_tokens=9, seed=100 * seed + turn)
        context += feed
        if check:
            check_logps(context, reply, temperature)
        context += ids_of(reply)
        assert session.context_tokens == len(context)
        replies.append(reply)
    session.close()
    return replies


def _together(engine, seeds, **options):
    async def body():
        return await asyncio.gather(*(_conversation(engine, seed, **options) for seed in seeds))

    return play(engine, body())


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logps_over_several_turns_are_exact(temperature):
    replies = _together(make_engine(temperature=temperature), range(9), temperature=temperature)
    flat = [ids_of(reply) for session in replies for reply in session]
    assert any(ids[-1] == END for ids in flat) and any(ids[-1] != END for ids in flat)
    for ids in flat:
        assert END not in ids[:-1] and (ids[-1] == END or len(ids) == 9)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_follow_the_distribution(temperature):
    engine = make_engine(64, temperature=temperature)
    context = [18, 21, 17]  # leaves the next token open

    async def one(seed):
        session = await engine.open()
        (segment,) = await session.generate(context, max_new_tokens=1, seed=seed)
        session.close()
        return int(segment.tokens[0])

    async def body():
        return await asyncio.gather(*(one(seed) for seed in range(1500)))

    drawn = play(engine, body())
    p = torch.softmax(exact_logits(MODELS[P1], context)[-1] / temperature, -1).numpy()
    expected, seen = 1500 * p, np.bincount(drawn, minlength=23)
    common = expected >= 5
    assert common.sum() >= 15 and p.max() < 0.25
    # Chi-square over the common tokens and the rest as one class; its 99.99 % point is below k + 35 for up to 23 classes.
    rest = (seen[~common].sum() - expected[~common].sum()) ** 2 / max(expected[~common].sum(), 1.0)
    distance = ((seen - expected)[common] ** 2 / expected[common]).sum() + rest
    assert distance < common.sum() + 35
    sharper = torch.softmax(exact_logits(MODELS[P1], context)[-1] / temperature * 1.5, -1).numpy() * 1500
    assert ((seen - sharper)[common] ** 2 / sharper[common]).sum() > common.sum() + 35


# --- what a reply depends on ------------------------------------------------------------------------------------------


def test_a_session_does_not_depend_on_the_batch_or_its_slot():
    alone = {seed: _together(make_engine(1), [seed], check=False)[0] for seed in range(6)}
    crowded = _together(make_engine(8), [*range(6), 7, 8], check=False)
    queued = _together(make_engine(3), [9, 8, 5, 4, 3, 2, 1, 0], check=False)
    for seed, expected in alone.items():
        for replies in (crowded[seed], queued[7 - seed]):
            for one, two in zip(expected, replies, strict=True):
                assert ids_of(one) == ids_of(two)
                np.testing.assert_allclose(one[0].logp, two[0].logp, atol=1e-5)


def test_a_slot_keeps_nothing_of_its_last_session():
    engine = make_engine(1)
    first, second, again = _together(engine, [2, 3, 2], check=False)
    assert [ids_of(r) for r in first] == [ids_of(r) for r in again] != [ids_of(r) for r in second]


def test_the_seed_decides():
    def reply(seed):
        async def body():
            session = await engine.open()
            made = await session.generate([1, 2], max_new_tokens=10, seed=seed)
            session.close()
            return ids_of(made)

        engine = make_engine(end_id=-1)
        return play(engine, body())

    assert reply(5) == reply(5)
    assert len({tuple(reply(seed)) for seed in range(6)}) == 6
    assert reply(2**63 - 1) != reply(0)


def test_a_reply_goes_on_where_the_last_one_was_cut():
    async def body():
        session = await engine.open()
        context = check_logps([1, 2], await session.generate([1, 2], max_new_tokens=4, seed=1))
        more = await session.generate([], max_new_tokens=4, seed=2)
        assert len(check_logps(context, more)) == 10

    engine = make_engine(end_id=-1)
    play(engine, body())


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_reply_ends_where_the_context_does():
    async def body():
        engine = make_engine(1, end_id=-1, max_context=12)
        session = await engine.open()
        (reply,) = await finish(engine, generate(session, list(range(7)), n=50))
        assert len(check_logps(range(7), reply)) == 12 == session.context_tokens
        with pytest.raises(ValueError, match="no room in 12"):
            await session.generate([], max_new_tokens=1, seed=0)

    run(body())


def test_a_prompt_without_room_is_refused_and_changes_nothing():
    async def body():
        engine = make_engine(1, end_id=-1, max_context=12)
        session = await engine.open()
        for count in (12, 13, 40):
            with pytest.raises(ValueError, match=f"context of {count} tokens leaves no room in 12"):
                await session.generate([1] * count, max_new_tokens=4, seed=0)
        assert session.context_tokens == 0 and not engine._requests
        (reply,) = await finish(engine, generate(session, [1] * 11, n=4))
        assert runs(reply) == [(P1, 1)]
        check_logps([1] * 11, reply)

    run(body())


def test_a_call_that_cannot_sample_is_refused():
    async def body():
        session = await make_engine(1).open()
        with pytest.raises(ValueError, match="tokens"):
            await session.generate([], max_new_tokens=4, seed=0)
        with pytest.raises(ValueError, match="max_new_tokens 0"):
            await session.generate([1], max_new_tokens=0, seed=0)

    run(body())


@pytest.mark.parametrize(
    ("options", "word"), [({"mode": "flow"}, "'drain'"), ({"temperature": 0.0}, "positive")]
)
def test_options_that_make_no_sense_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        make_engine(**options)


def test_tokens_are_counted():
    async def body():
        engine = make_engine(2, end_id=-1)
        one, two = await engine.open(), await engine.open()
        await finish(engine, generate(one, [1, 2, 3], n=4), generate(two, [1], n=2))
        # The last token of a reply is not fed before the next turn.
        assert (engine.sampled_tokens, engine.fed_tokens) == (6, 3 + 3 + 1 + 1)
        assert engine.busy_seconds > 0

    run(body())

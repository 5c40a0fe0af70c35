"""Which policy samples what, and who gets a slot."""

from __future__ import annotations

import asyncio

import pytest

from muonrl.trajectory import PolicyId
from tests.sampling.driving import (
    P1,
    P2,
    P3,
    WEIGHTS,
    check_logps,
    finish,
    generate,
    make_engine,
    run,
    runs,
    settle,
)

# --- policies ---------------------------------------------------------------------------------------------------------


def test_drain_keeps_the_policy_of_an_open_session():
    async def body():
        engine = make_engine(end_id=-1)
        old = await engine.open()
        task = generate(old, [1, 2, 3], n=6)
        for _ in range(3):
            await settle()
            engine.step()
        engine.publish(P2, WEIGHTS[P2])
        new = await engine.open()
        first, second = await finish(engine, task, generate(new, [4, 5], n=6))
        assert runs(first) == [(P1, 6)] and runs(second) == [(P2, 6)]
        context = check_logps([1, 2, 3], first)
        check_logps([4, 5], second)
        engine.publish(P3, WEIGHTS[P3])
        # The next turn, too, is sampled under the policy that the session began with.
        (third,) = await finish(engine, generate(old, [7], n=4))
        assert runs(third) == [(P1, 4)]
        check_logps([*context, 7], third)

    run(body())


def test_drain_drops_weights_with_their_last_session():
    async def body():
        engine = make_engine()
        one, two = await engine.open(), await engine.open()
        engine.publish(P2, WEIGHTS[P2])
        one.close()
        assert set(engine._weights) == {P1, P2}
        two.close()
        assert set(engine._weights) == {P2}
        engine.publish(P3, WEIGHTS[P3])
        assert set(engine._weights) == {P3}

    run(body())


def test_in_flight_changes_the_policy_within_a_reply():
    async def body():
        engine = make_engine(end_id=-1, mode="in_flight")
        session, idle = await engine.open(), await engine.open()
        (opening,) = await finish(engine, generate(idle, [9, 8], n=3))
        task = generate(session, [1, 2, 3], n=9)
        for count, policy in ((4, P2), (2, P3)):
            for _ in range(count):
                await settle()
                engine.step()
            engine.publish(policy, WEIGHTS[policy])
        assert set(engine._weights) == {P3}
        (reply,) = await finish(engine, task)
        assert runs(reply) == [(P1, 4), (P2, 2), (P3, 3)]
        # Exact under each policy given the whole context: no key or value of an older policy is left.
        context = check_logps([1, 2, 3], reply)
        (following,) = await finish(engine, generate(session, [6, 7], n=3))
        check_logps([*context, 6, 7], following)
        # A session that was between two turns takes the new policy for its next one.
        (later,) = await finish(engine, generate(idle, [5], n=3))
        assert runs(opening) == [(P1, 3)] and runs(later) == [(P3, 3)]
        check_logps([*check_logps([9, 8], opening), 5], later)

    run(body())


def test_the_policies_differ_enough_to_tell_them_apart():
    async def body():
        engine = make_engine(end_id=-1)
        (reply,) = await finish(engine, generate(await engine.open(), [1, 2, 3], n=6))
        wrong = [type(s)(s.tokens, s.logp, s.kind, P2) for s in reply]
        with pytest.raises(AssertionError):
            check_logps([1, 2, 3], wrong)

    run(body())


@pytest.mark.parametrize("mode", ["drain", "in_flight"])
def test_only_a_newer_policy_is_published(mode):
    engine = make_engine(mode=mode, policy=P2)
    for old in (P2, P1, PolicyId(0, 0)):
        with pytest.raises(ValueError, match="not newer"):
            engine.publish(old, WEIGHTS[P1])
    assert engine.policy == P2 and engine._weights == {P2: WEIGHTS[P2]}
    engine.publish(P3, WEIGHTS[P3])  # a new epoch is newer, whatever its step
    assert engine.policy == P3


def test_nothing_opens_before_a_policy_is_published():
    with pytest.raises(RuntimeError, match="no policy"):
        run(make_engine(policy=None).open())


# --- slots ------------------------------------------------------------------------------------------------------------


def test_opening_waits_for_a_slot_and_takes_the_newest_policy():
    async def body():
        engine = make_engine(2)
        held = [await engine.open(), await engine.open()]
        waiting = [asyncio.create_task(engine.open()) for _ in range(2)]
        await settle()
        assert not any(task.done() for task in waiting)
        engine.publish(P2, WEIGHTS[P2])
        held[0].close()
        await settle()
        assert [task.done() for task in waiting] == [True, False], "first come, first served"
        assert waiting[0].result()._slot.policy == P2
        held[1].close()
        await settle()
        assert waiting[1].done()

    run(body())


def test_a_waiter_that_gives_up_does_not_keep_the_slot():
    async def body():
        engine = make_engine(1)
        held = await engine.open()
        one, two, three = (asyncio.create_task(engine.open()) for _ in range(3))
        await settle()
        one.cancel()
        await settle()
        held.close()
        two.cancel()  # it has been woken and has not run yet
        await settle()
        assert two.cancelled() and three.done(), "the slot is free and somebody waits for it"
        return three.result()

    run(body())


def test_closing_cancels_a_reply():
    async def body():
        engine = make_engine(2, end_id=-1)
        one, two = await engine.open(), await engine.open()
        first, second = generate(one, [1], n=9), generate(two, [2], n=9)
        await settle()
        engine.step()
        one.close()
        await settle()
        assert first.cancelled()
        (reply,) = await finish(engine, second)
        check_logps([2], reply)
        assert engine._requests == []

    run(body())


def test_closing_twice_frees_the_slot_once():
    async def body():
        engine = make_engine(1)
        first = await engine.open()
        first.close()
        second = await engine.open()
        first.close()
        third = asyncio.create_task(engine.open())
        await settle()
        assert not third.done(), "two sessions share a slot"
        (reply,) = await finish(engine, generate(second, [1, 2]))
        check_logps([1, 2], reply)
        second.close()
        await third

    run(body())


def test_a_closed_session_samples_nothing():
    async def body():
        engine = make_engine(1)
        session = await engine.open()
        session.close()
        await engine.open()
        with pytest.raises(RuntimeError, match="closed"):
            await session.generate([1], max_new_tokens=2, seed=0)

    run(body())


def test_a_session_samples_one_reply_at_a_time():
    async def body():
        engine = make_engine(1, end_id=-1)
        session = await engine.open()
        task = generate(session, [1, 2], n=3)
        await settle()
        with pytest.raises(RuntimeError, match="already"):
            await session.generate([1], max_new_tokens=2, seed=0)
        (reply,) = await finish(engine, task)
        check_logps([1, 2], reply)

    run(body())


def test_a_caller_that_gives_up_leaves_the_session_usable():
    async def body():
        engine = make_engine(1, end_id=-1)
        session = await engine.open()
        task = generate(session, [1, 2], n=9)
        await settle()
        engine.step()
        task.cancel()
        await settle()
        context = list(session._slot.context)
        assert context[:2] == [1, 2] and len(context) == 3
        (reply,) = await finish(engine, generate(session, [4], n=3))
        assert len(check_logps([*context, 4], reply)) == 7 == session.context_tokens

    run(body())

"""Admission and the hard check: nothing older than eta is trained on, and nothing is lost without being counted."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl.config import StalenessConfig
from muonrl.training.staleness import Admission, select, staleness, staleness_histogram
from muonrl.trajectory import Grade, Kind, PolicyId, Segment, Trajectory, Turn

DROP = StalenessConfig(eta=1, action="drop")


def action(n, step, epoch=0):
    return Segment(np.zeros(n, np.int32), np.zeros(n, np.float32), Kind.ACTION, PolicyId(epoch, step))


def rollout(name, step, n=10, epoch=0, later=()):
    observed = Segment(np.zeros(5, np.int32), np.zeros(5, np.float32), Kind.OBSERVATION)
    turn = Turn((action(n, step, epoch), observed, *later))
    return Trajectory(
        name, f"task-{name}", 0, (turn,), Grade(1, 1, 1, 1, 1), PolicyId(epoch, step), 0.5, seed=0
    )


def ids(trajectories):
    return [t.id for t in trajectories]


def test_staleness_counts_publications_within_a_lineage():
    assert staleness(PolicyId(0, 7), PolicyId(0, 5)) == 2
    assert staleness(PolicyId(0, 7), PolicyId(0, 8)) is None
    assert staleness(PolicyId(1, 7), PolicyId(0, 7)) is None


def test_admission_by_hand():
    admission = Admission(rollouts_per_update=4, eta=1)
    assert admission.capacity() == 8
    assert [admission.admit() for _ in range(9)] == [True] * 8 + [False]
    admission.publish()
    assert admission.capacity() == 4
    admission.release(2)
    assert admission.capacity() == 6 and admission.dispatched == 6
    with pytest.raises(ValueError, match="release of 7 out of 6"):
        admission.release(7)
    other = Admission(4, 1)
    other.load_state_dict(json.loads(json.dumps(admission.state_dict())))
    assert other.capacity() == 6


def test_synchronous_admission_gives_one_batch_at_a_time():
    admission = Admission(rollouts_per_update=3, eta=0)
    assert sum(admission.admit() for _ in range(10)) == 3
    admission.publish()
    assert sum(admission.admit() for _ in range(10)) == 3


def test_what_is_too_old_is_dropped_or_requeued():
    finished = [rollout("old", 2), rollout("ok", 3), rollout("new", 4), rollout("lost", 4, epoch=1)]
    now = PolicyId(0, 4)
    chosen = select(finished, [], now, 2, DROP)
    assert (ids(chosen.batch), ids(chosen.dropped), chosen.requeued) == (["ok", "new"], ["old", "lost"], ())
    chosen = select(finished, [], now, 2, StalenessConfig(1, "requeue"))
    assert (ids(chosen.batch), chosen.dropped, ids(chosen.requeued)) == (["ok", "new"], (), ["old", "lost"])
    assert ids(select(finished, [], now, 2, StalenessConfig(2, "drop")).batch) == ["old", "ok"]


def test_the_oldest_token_counts_not_the_dispatch_or_the_newest():
    mixed = rollout("mixed", 2, later=[action(9, 4)])
    assert ids(select([mixed], [], PolicyId(0, 4), 1, DROP).dropped) == ["mixed"]
    assert (
        ids(select([mixed], [], PolicyId(0, 3), 1, DROP).batch) == []
    )  # it has tokens of policy 4, but 2 is 1 old


def test_too_few_make_no_batch_and_all_are_kept():
    chosen = select([rollout("a", 4), rollout("x", 0)], [], PolicyId(0, 4), 2, DROP)
    assert (chosen.batch, ids(chosen.kept), ids(chosen.dropped)) == ((), ["a"], ["x"])


def test_collection_order_and_its_bias():
    finished = [rollout("c", 4, n=2), rollout("b", 4, n=4), rollout("a", 3, n=30)]
    first = select(finished, [], PolicyId(0, 4), 2, DROP, "first_finished")
    assert (ids(first.batch), ids(first.kept)) == (["c", "b"], ["a"])
    assert first.selection_bias == pytest.approx(3 - 12)
    oldest = select(finished, [], PolicyId(0, 4), 2, DROP, "oldest_first")
    assert (ids(oldest.batch), ids(oldest.kept)) == (["a", "c"], ["b"])
    assert oldest.selection_bias == pytest.approx(16 - 12)


def test_wait_holds_the_batch_for_rollouts_at_their_last_chance():
    wait = StalenessConfig(1, "wait")
    finished = [rollout("a", 4), rollout("b", 4), rollout("c", 3)]
    now = PolicyId(0, 4)
    held = select(finished, [PolicyId(0, 4), PolicyId(0, 3)], now, 2, wait)
    assert (held.batch, ids(held.kept), held.waiting) == ((), ["a", "b", "c"], 1)
    free = select(finished, [PolicyId(0, 4)], now, 2, wait)
    assert (ids(free.batch), ids(free.kept), free.waiting) == (["c", "a"], ["b"], 0)
    assert ids(select([rollout("x", 1)], [], now, 1, wait).dropped) == ["x"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    eta=st.integers(0, 3),
    how=st.sampled_from(["drop", "requeue", "wait"]),
    order=st.sampled_from(["first_finished", "oldest_first"]),
    seed=st.integers(0, 2**32),
)
def test_a_simulated_run_never_trains_too_old_and_loses_nothing(eta, how, order, seed):
    cfg, per_update = StalenessConfig(eta, how), 3
    admission, now = Admission(per_update, eta), PolicyId(0, 0)
    rng = np.random.default_rng(seed)
    flying, buffer, consumed, gone, made = [], [], 0, 0, 0
    for _ in range(60):
        while admission.admit():
            flying.append(rollout(str(made), now.step))
            made += 1
        if flying:
            buffer.append(flying.pop(int(rng.integers(len(flying)))))
        chosen = select(buffer, [t.oldest_policy for t in flying], now, per_update, cfg, order)
        buffer = list(chosen.kept)
        lost = len(chosen.dropped) + len(chosen.requeued)
        gone += lost
        admission.release(lost)
        assert all(now.step - t.oldest_policy.step <= eta for t in chosen.batch)
        if chosen.batch:
            consumed += len(chosen.batch)
            now = PolicyId(0, now.step + 1)
            admission.publish()
        assert made == len(flying) + len(buffer) + consumed + gone
        assert made - gone <= per_update * (now.step + eta + 1)
    assert now.step >= 8
    if how == "wait":
        assert gone == 0


def test_histogram_is_per_action_token():
    trajectories = [rollout("a", 4, n=6), rollout("b", 3, n=2, later=[action(4, 4)]), rollout("c", 2, n=4)]
    shares, mean = staleness_histogram(trajectories, PolicyId(0, 4))
    assert shares == {"0": 10 / 16, "1": 2 / 16, "2": 4 / 16}
    assert mean == pytest.approx(10 / 16)
    assert staleness_histogram([], PolicyId(0, 4)) == ({}, 0.0)
    with pytest.raises(ValueError, match="trajectory a: tokens of"):
        staleness_histogram(trajectories, PolicyId(0, 1))

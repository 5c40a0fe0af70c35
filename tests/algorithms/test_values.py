"""The value trackers against hand-computed numbers and the properties that the recipe promises."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl.algorithms.values import SpoTracker, SppTracker, make_tracker, prior_counts, spo_rho
from muonrl.config import AlgorithmConfig
from muonrl.errors import CheckpointError
from muonrl.trajectory import PolicyId

CFG = AlgorithmConfig()
TASKS = ("a", "b", "c")
quick = settings(max_examples=40, deadline=None, derandomize=True)


def spp(offline=None, tasks=TASKS):
    return SppTracker(tasks, CFG, offline)


def publish(tracker, upto):
    while tracker.policy.step < upto:
        tracker.publish(PolicyId(0, tracker.policy.step + 1))


def test_prior_from_offline_outcomes():
    # N0 = 1 / (1 - 0.875) = 8; 3 successes of 7: 8 * 3.5 / 8 and 8 * 4.5 / 8.
    assert prior_counts(3, 7, 0.875) == (3.5, 4.5)
    assert prior_counts(0, 0, 0.875) == (0.5, 0.5)
    assert spp({"b": (3, 7)}).value("b") == 0.4375
    assert spp({"b": (3, 7)}).value("a") == 0.5
    with pytest.raises(ValueError, match="4 successes in 3 attempts"):
        prior_counts(4, 3, 0.875)


def test_spopp_by_hand():
    tracker = spp({"a": (3, 7)})
    assert tracker.dispatch("a") == 0.4375
    publish(tracker, 1)
    assert tracker.observe("a", 1) == 0.4375
    # The outcome belongs to policy 0, where alpha = 3.5 + 1 and beta = 4.5.
    assert tracker.value("a") == 0.5
    assert tracker.n_eff("a") == pytest.approx(0.875 * 9.0)
    assert tracker.dispatch("a") == 0.5
    assert tracker.observe("a", 0) == 0.5
    assert tracker.value("a") == pytest.approx((0.875 * 4.5) / (0.875 * 9.0 + 1.0))
    publish(tracker, 3)
    assert tracker.n_eff("a") == pytest.approx(0.875**2 * (0.875 * 9.0 + 1.0))
    assert tracker.n_eff() == pytest.approx((tracker.n_eff("a") + 2 * 0.875**3) / 3)


def test_value_is_frozen_at_dispatch_while_the_tracker_moves_on():
    tracker = spp()
    frozen = tracker.dispatch("a")
    publish(tracker, 2)
    assert tracker.observe("a", 1) == frozen == 0.5
    assert tracker.value("a") > 0.5


def test_coordinate_advances_by_minus_ln_rho_per_publication():
    tracker = spp()
    assert tracker.z == 0.0
    tracker.publish(PolicyId(0, 1))
    tracker.publish(PolicyId(0, 5))  # a gap in step numbers is still one publication
    tracker.publish(PolicyId(1, 2))  # and so is a rollback's new epoch
    assert tracker.z == pytest.approx(-3 * math.log(0.875))
    for old in (PolicyId(1, 2), PolicyId(0, 9)):
        with pytest.raises(ValueError, match="published"):
            tracker.publish(old)


@quick
@given(k=st.integers(0, 30))
def test_an_outcome_k_policies_old_weighs_rho_to_the_k(k):
    tracker = spp()
    tracker.dispatch("a")
    tracker.observe("a", 1)
    publish(tracker, k)
    tracker.dispatch("a")
    tracker.observe("a", 0)
    alpha, beta = 0.875**k * 1.5, 0.875**k * 0.5 + 1.0
    assert tracker.value("a") == pytest.approx(alpha / (alpha + beta), rel=1e-12)
    assert tracker.n_eff("a") == pytest.approx(alpha + beta, rel=1e-12)


def test_an_outcome_belongs_to_the_policy_that_played_it_not_to_that_of_the_dispatch():
    early, late = spp(), spp()
    for tracker in (early, late):
        tracker.dispatch("a")
        publish(tracker, 3)
    assert early.observe("a", 1) == late.observe("a", 1, policy=late.policy) == 0.5
    assert early.n_eff("a") == pytest.approx(0.875**3 * 2, rel=1e-12)
    assert late.n_eff("a") == pytest.approx(0.875**3 * 1 + 1, rel=1e-12)
    late.dispatch("a")
    with pytest.raises(ValueError, match="never published"):
        late.observe("a", 1, policy=PolicyId(9, 9))


# Powers of 7/8 are exact in double precision up to about the 18th: only longer histories could show an order of summation.
LAST = 40
histories = st.lists(
    st.tuples(st.sampled_from(TASKS), st.integers(0, LAST), st.integers(0, 1)), min_size=1, max_size=20
)


@quick
@given(history=histories, data=st.data())
def test_value_does_not_depend_on_the_order_of_arrival(history, data):
    trackers = []
    for order in (history, data.draw(st.permutations(history))):
        tracker = spp({"a": (1, 4)})
        publish(tracker, LAST)
        for task, step, reward in order:
            tracker.adopt(task, PolicyId(0, step), 0.5)
            tracker.observe(task, reward)
        trackers.append(tracker)
    first, second = trackers
    assert first.state_dict() == second.state_dict()
    assert [first.value(t) for t in TASKS] == [second.value(t) for t in TASKS]
    assert first.n_eff() == second.n_eff()


@quick
@given(history=histories)
def test_value_is_the_discounted_sum_of_the_definition(history):
    tracker = spp()
    publish(tracker, LAST)
    for task, step, reward in history:
        tracker.adopt(task, PolicyId(0, step), 0.5)
        tracker.observe(task, reward)
    unit = -math.log(0.875)
    for task in TASKS:
        alpha = beta = 0.5 * math.exp(-LAST * unit)
        for name, step, reward in history:
            if name == task:
                alpha += math.exp(-(LAST - step) * unit) * reward
                beta += math.exp(-(LAST - step) * unit) * (1 - reward)
        assert tracker.value(task) == pytest.approx(alpha / (alpha + beta), rel=1e-9)


def test_a_value_survives_thousands_of_idle_policies():
    tracker = spp()
    tracker.dispatch("a")
    tracker.observe("a", 1)
    publish(tracker, 6000)  # 0.875^6000 underflows to 0
    assert tracker.value("a") == 0.75


def test_spo_by_hand():
    assert spo_rho(0.0, CFG) == 0.96
    assert spo_rho(0.006, CFG) == pytest.approx(2**-0.1)
    assert spo_rho(0.06, CFG) == 0.875
    tracker = SpoTracker(TASKS, CFG, {"a": (3, 7)})
    tracker.dispatch("a")
    assert tracker.observe("a", 1, d=0.006) == 0.4375
    rho = 2**-0.1
    assert tracker.value("a") == pytest.approx((rho * 3.5 + 1) / (rho * 8 + 1))
    assert tracker.n_eff("a") == pytest.approx(rho * 8 + 1)


def test_spo_reads_its_value_at_the_update():
    tracker = SpoTracker(TASKS, CFG)
    state = tracker.state_dict()
    state["tasks"]["a"] = [3.0, 1.0]
    assert tracker.dispatch("a") == 0.5
    state["outstanding"] = {"a": [0, 0.5]}
    tracker.load_state_dict(state)
    assert tracker.observe("a", 1) == 0.75


def test_sampling_weights_and_choice():
    tracker = spp({"a": (7, 7)})  # alpha, beta = 7.5, 0.5
    v = 7.5 / 8
    np.testing.assert_allclose(
        tracker.sampling_weights(), [math.sqrt(v * (1 - v)) + 0.05, 0.55, 0.55], rtol=1e-12
    )
    tracker.dispatch("b")
    assert tracker.sampling_weights()[1] == 0.0
    w = tracker.sampling_weights()
    edge = w[0] / w.sum()
    assert [tracker.choose(u) for u in (0.0, edge - 1e-9, edge + 1e-9, 1 - 2**-53)] == ["a", "a", "c", "c"]
    tracker.dispatch("a")
    assert {tracker.choose(u) for u in (0.0, 0.5, 1.0)} == {"c"}
    tracker.dispatch("c")
    assert tracker.choose(0.5) is None


def test_one_outstanding_request_per_task():
    tracker = spp()
    tracker.dispatch("a")
    with pytest.raises(ValueError, match="already has a request outstanding"):
        tracker.dispatch("a")
    assert tracker.outstanding == ("a",)
    tracker.cancel("a")
    before = tracker.value("a")
    with pytest.raises(ValueError, match="no request outstanding"):
        tracker.observe("a", 1)
    with pytest.raises(ValueError, match="unknown task x"):
        tracker.dispatch("x")
    with pytest.raises(ValueError, match="never published"):
        tracker.adopt("a", PolicyId(0, 3), 0.5)
    tracker.dispatch("a")
    with pytest.raises(ValueError, match=r"reward 1.5 is outside"):
        tracker.observe("a", 1.5)
    assert tracker.value("a") == before and tracker.outstanding == ("a",)
    with pytest.raises(ValueError, match="distinct"):
        SppTracker(["a", "a"], CFG)


@pytest.mark.parametrize("baseline", ["spopp", "spo", "none"])
def test_state_goes_through_json_and_continues_alike(baseline):
    cfg = replace(CFG, baseline=baseline)

    def use(tracker, offset):
        for i in range(12):
            task = tracker.choose((0.37 * (i + offset)) % 1.0)
            tracker.dispatch(task)
            tracker.publish(PolicyId(0, tracker.policy.step + 1))
            tracker.observe(task, (i + offset) % 2, d=0.01 * i)

    one = make_tracker(TASKS, cfg, {"a": (1, 3)})
    use(one, 0)
    one.dispatch("b")
    two = make_tracker(TASKS, cfg)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for tracker in (one, two):
        tracker.observe("b", 1)
        use(tracker, 5)
    assert one.state_dict() == two.state_dict()
    assert [one.value(t) for t in TASKS] == [two.value(t) for t in TASKS]
    assert one.n_eff() == two.n_eff() and one.z == two.z


def test_foreign_state_is_refused():
    state = spp().state_dict()
    with pytest.raises(CheckpointError, match="of kind 'spopp', this run uses 'spo'"):
        SpoTracker(TASKS, CFG).load_state_dict(state)
    with pytest.raises(CheckpointError, match="other tasks: 1 differ, first c"):
        spp(tasks=("a", "b")).load_state_dict(state)
    del state["published"]
    with pytest.raises(CheckpointError, match="lacks published"):
        spp().load_state_dict(state)


def test_no_baseline_is_zero_and_samples_uniformly():
    tracker = make_tracker(TASKS, replace(CFG, baseline="none"), {"a": (3, 3)})
    assert tracker.dispatch("a") == 0.0
    assert tracker.observe("a", 1) == 0.0
    assert tracker.value("a") == 0.0
    assert tracker.n_eff("a") == 1.0
    assert len(set(tracker.sampling_weights())) == 1

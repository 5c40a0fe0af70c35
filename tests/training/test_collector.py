"""The collector against a rollout process that is a list: dispatch, staleness, faults, evaluation, and what it remembers."""

import itertools
import json
import math
from collections import Counter

import pytest

from muonrl.algorithms.values import make_tracker
from muonrl.errors import InfrastructureError
from muonrl.training import collector as collector_module
from muonrl.training.collector import Collector
from muonrl.training.messages import Dropped, Finished, Usage
from muonrl.training.rollout_client import Interrupted
from muonrl.trajectory import PolicyId
from tests.training.cases import config, trajectory


class FakeClient:
    """Answers requests in order when asked for an event; ``drop`` says which to lose, ``reward`` what they earn."""

    def __init__(self, drop=lambda request: False, reward=lambda request: 1, hold=()):
        self.sent, self.waiting, self.published = [], [], []
        self.drop, self.reward, self.hold = drop, reward, set(hold)
        self.running, self.most_at_once = Counter(), 0

    def send(self, request):
        self.sent.append(request)
        self.waiting.append(request)
        if request.purpose == "train":
            self.running[request.task_id] += 1
            self.most_at_once = max(self.most_at_once, *self.running.values())

    def event(self, timeout):
        ready = [r for r in self.waiting if r.id not in self.hold]
        if not ready:
            return None
        request = ready[0]
        self.waiting.remove(request)
        self.running[request.task_id] -= 1
        if self.drop(request):
            return Dropped(request, "sandbox_died", "made to")
        return Finished(request, self.play(request))

    def play(self, request):
        return trajectory(
            request.task_id,
            name=request.id,
            policy=request.dispatched_at,
            reward=self.reward(request),
            value=request.value,
            visit=request.visit,
        )

    def publish(self, policy, state):
        self.published.append(policy)


TASKS = [f"task-{i}" for i in range(12)]


@pytest.fixture(autouse=True)
def short_silence(monkeypatch):
    """A collector that waits for what never comes fails in seconds."""
    monkeypatch.setattr(collector_module, "QUIET_DEADLINE", 2.0)


def make(client, tasks=TASKS, interrupted=lambda: False, **sections):
    run = {"rollouts_per_update": 4, "updates": 5, "seed": 3} | sections.pop("run", {})
    cfg = config(run=run, **sections)
    return Collector(client, make_tracker(tasks, cfg.algorithm), cfg, PolicyId(0, 0), interrupted)


def advance(collector):
    now = collector.policy
    collector.publish(PolicyId(now.epoch, now.step + 1), {})


def test_a_whole_run_dispatches_exactly_what_it_needs():
    """5 updates of 4: with nothing lost, 20 requests, each once, never two of a task at a time."""
    client = FakeClient()
    collector = make(client)
    seen = []
    for _ in range(5):
        selection = collector.collect()
        assert len(selection.batch) == 4
        seen += [t.id for t in selection.batch]
        for t in selection.batch:
            assert collector.baselines.pop(t.id) == t.value_at_dispatch  # frozen at dispatch
        advance(collector)
        collector.dispatch()
    assert len(client.sent) == len(set(seen)) == 20
    assert client.most_at_once == 1
    assert not collector.finished and not collector.in_flight and not collector.baselines
    assert collector.visits.total() == 20
    assert client.published == [PolicyId(0, s) for s in range(1, 6)]


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_admission_bounds_what_is_out(eta):
    client = FakeClient()
    collector = make(client, tasks=[f"t{i}" for i in range(50)], staleness={"eta": eta})
    collector.dispatch()
    assert len(client.sent) == 4 * (eta + 1)
    assert len({r.task_id for r in client.sent}) == len(client.sent)
    collector.dispatch()
    assert len(client.sent) == 4 * (eta + 1)
    advance(collector)
    collector.dispatch()
    assert len(client.sent) == min(20, 4 * (eta + 2))


def test_fewer_tasks_than_room_means_fewer_requests():
    client = FakeClient()
    collector = make(client, tasks=TASKS[:3])
    collector.dispatch()
    assert sorted(r.task_id for r in client.sent) == TASKS[:3]
    assert len(collector.collect().batch) == 4  # a task is asked again once it has answered
    assert client.most_at_once == 1


def test_requests_carry_their_visit_seed_value_and_policy():
    client = FakeClient()
    collector = make(client, tasks=TASKS[:4])
    for _ in range(3):
        collector.collect()
        advance(collector)
    by_task = {t: [r for r in client.sent if r.task_id == t] for t in TASKS[:4]}
    for requests in by_task.values():
        assert [r.visit for r in requests] == list(range(len(requests)))
    seeds = [r.seed for r in client.sent]
    assert len(set(seeds)) == len(seeds)
    again = FakeClient()
    make(again, tasks=TASKS[:4]).dispatch()
    assert [(r.id, r.seed) for r in again.sent] == [(r.id, r.seed) for r in client.sent[: len(again.sent)]]
    other = FakeClient()
    make(other, tasks=TASKS[:4], run={"seed": 4}).dispatch()
    assert {r.seed for r in other.sent}.isdisjoint(seeds)
    assert client.sent[0].value == 0.5 and client.sent[-1].value > 0.5  # every reward was 1


def hold_then_age(action, **sections):
    """Four rollouts of the first policy are held back until they are two publications old."""
    client = FakeClient()
    collector = make(client, staleness={"eta": 1, "action": action}, **sections)
    collector.dispatch()
    held = [r.id for r in client.sent[:4]]
    client.hold = set(held)
    for _ in range(2):
        collector.collect()
        advance(collector)
    client.hold = set()
    return client, collector, held


@pytest.mark.parametrize("action", ["drop", "requeue"])
def test_too_old_rollouts_are_counted_and_replaced(action):
    client, collector, held = hold_then_age(action)
    before = len(client.sent)
    batches = []
    for _ in range(3):
        batches.append([t.id for t in collector.collect().batch])
        advance(collector)
    assert collector.drops == {"stale": 4}
    assert not set(held) & set(itertools.chain(*batches))
    assert [len(b) for b in batches] == [4, 4, 4]
    assert len(client.sent) == 20 + 4  # each lost one is replaced, and no more
    assert not set(held) & set(collector.baselines)
    if action == "requeue":
        replayed = [r.task_id for r in client.sent[before:]]
        assert {name.split("#")[0] for name in held} <= set(replayed)


def test_wait_trains_on_old_rollouts_before_they_are_too_old():
    client = FakeClient()
    collector = make(client, staleness={"eta": 1, "action": "wait"})
    collector.dispatch()
    held = {r.id for r in client.sent[:4]}
    client.hold = set(held)
    collector.collect()
    advance(collector)
    released = []
    inner = client.event

    def event(timeout):
        answer = inner(timeout)
        if answer is None:  # nothing else is left to take: the collector waits for the held ones
            released.append(True)
            client.hold = set()
        return answer

    client.event = event
    batch = {t.id for t in collector.collect().batch}
    assert released and batch == held
    assert not collector.drops


def test_a_fault_is_counted_replaced_and_never_a_reward():
    lost = []

    def drop(request):
        lose = len(client.sent) <= 8 and len(lost) < 3
        if lose:
            lost.append(request)
        return lose

    client = FakeClient(drop=drop)
    collector = make(client, algorithm={"baseline": "none"})  # this tracker counts outcomes
    trained = []
    for _ in range(5):
        trained += collector.collect().batch
        advance(collector)
    assert collector.drops == {"sandbox_died": 3}
    assert len(client.sent) == 23 and len(trained) == 20
    assert all(t.reward == 1 for t in trained)
    assert not {r.id for r in lost} & {t.id for t in trained}
    seen = {t: collector.tracker.n_eff(t) for t in TASKS}
    assert seen == {t: sum(x.task_id == t for x in trained) for t in TASKS}  # no outcome was made up


def test_nothing_but_faults_ends_the_run():
    client = FakeClient(drop=lambda request: True)
    with pytest.raises(InfrastructureError, match=r"sandbox_died: \d+ rollouts in a row were lost.*made to"):
        make(client, sandbox={"concurrency": 2}).collect()
    assert len(client.sent) < 40


def test_silence_ends_the_run_and_says_what_was_awaited(monkeypatch):
    monkeypatch.setattr(collector_module, "QUIET_DEADLINE", 0.05)
    client = FakeClient(hold={f"{t}#0" for t in TASKS})
    with pytest.raises(InfrastructureError, match="deadline: waited 0.05 s for rollouts for the next update"):
        make(client).collect()


@pytest.mark.parametrize("finished", [True, False])
def test_an_interrupt_is_seen_whether_or_not_a_batch_is_ready(finished):
    client = FakeClient(hold=() if finished else {f"{t}#0" for t in TASKS})
    asked = []
    collector = make(client, interrupted=lambda: bool(asked))
    collector.dispatch()
    collector.drain()
    asked.append(True)
    with pytest.raises(Interrupted):
        collector.collect()
    assert len(collector.finished) == (8 if finished else 0)


def test_spo_gets_the_drift_of_the_previous_trajectory():
    client = FakeClient()
    collector = make(client, tasks=TASKS[:4], algorithm={"baseline": "spo"})
    heard = []
    observe = collector.tracker.observe

    def listen(task_id, reward, d, policy):
        heard.append((task_id, d))
        return observe(task_id, reward, d, policy)

    collector.tracker.observe = listen
    collector.collect()
    assert {d for _, d in heard} == {0.0}
    collector.drift = {TASKS[1]: 0.07, TASKS[2]: 0.02}
    del heard[:]
    advance(collector)
    collector.collect()
    assert heard and all(d == {TASKS[1]: 0.07, TASKS[2]: 0.02}.get(t, 0.0) for t, d in heard)
    assert any(d for _, d in heard)


def test_oldest_first_collection_is_passed_on():
    client = FakeClient()
    collector = make(client, algorithm={"collection": "oldest_first"})
    collector.dispatch()
    late = client.sent[0].id
    client.hold = {late}
    collector.collect()
    advance(collector)
    collector.dispatch()
    collector.drain()  # rollouts of the new policy finish first, then the old one
    client.hold = set()
    collector.drain()
    assert collector.finished[-1].id == late
    assert late in {t.id for t in collector.collect().batch}


def test_usage_is_kept():
    client = FakeClient()
    collector = make(client)
    collector._take(Usage(sampled_tokens=7))
    assert collector.usage.sampled_tokens == 7


class Task:
    def __init__(self, task_id):
        self.task_id = task_id


def test_evaluation_is_the_mean_reward_and_retries_a_fault_once():
    lost = set()

    def drop(request):
        lose = request.id == "before/b#1" and request.id not in lost
        lost.add(request.id)
        return lose

    client = FakeClient(drop=drop, reward=lambda request: int(request.task_id == "a"))
    collector = make(client)
    value = collector.evaluate([Task("a"), Task("b"), Task("c")], 2, "before")
    assert value == pytest.approx(1 / 3)
    assert [r.id for r in client.sent if r.id == "before/b#1"] == ["before/b#1"] * 2
    assert len(client.sent) == 7 and {r.purpose for r in client.sent} == {"eval"}
    assert collector.drops == {"sandbox_died": 1}
    # Nothing of it reaches training: no visit, no dispatch, no outcome.
    assert not collector.visits and not collector.finished and collector.admission.dispatched == 0
    assert collector.tracker.outstanding == ()
    other = FakeClient()
    make(other).evaluate([Task("a"), Task("b"), Task("c")], 2, "after")
    assert [r.seed for r in other.sent] == [
        r.seed for i, r in enumerate(client.sent) if r.id not in {s.id for s in client.sent[:i]}
    ]  # before and after training are asked with the same seeds


def test_evaluation_gives_up_on_a_second_fault():
    client = FakeClient(drop=lambda request: request.task_id == "b")
    with pytest.raises(InfrastructureError, match="held-out b failed twice: made to"):
        make(client).evaluate([Task("a"), Task("b")], 1, "before")


def test_evaluation_of_nothing_is_nan():
    assert math.isnan(make(FakeClient()).evaluate([], 2, "x"))


@pytest.mark.parametrize("baseline", ["spopp", "spo", "none"])
def test_a_restored_collector_goes_on_as_the_uninterrupted_one(baseline):
    """At a moment when nothing is out (eta 0), stop, restore from JSON, and compare every request that follows."""
    sections = {"staleness": {"eta": 0}, "algorithm": {"baseline": baseline}}

    def rewarded(request):
        return request.seed % 2

    def play(collector, updates):
        for _ in range(updates):
            for t in collector.collect().batch:
                collector.baselines.pop(t.id)
                collector.drift[t.task_id] = (t.visit + 1) / 100
            advance(collector)

    whole = FakeClient(reward=rewarded)
    collector = make(whole, **sections)
    play(collector, 2)
    state = json.loads(json.dumps(collector.state_dict()))
    play(collector, 3)
    rest = FakeClient(reward=rewarded)
    other = make(rest, **sections)
    other.load_state_dict(state)
    assert other.policy == PolicyId(0, 2)
    play(other, 3)
    assert rest.sent == whole.sent[8:]
    assert json.dumps(other.state_dict()) == json.dumps(collector.state_dict())


def test_what_is_out_at_a_stop_is_lost_counted_and_asked_for_again():
    client = FakeClient()
    collector = make(client, staleness={"eta": 1})
    collector.collect()
    advance(collector)
    collector.dispatch()
    for _ in range(2):  # two more finish, the others are in flight
        collector._take(client.event(0.0))
    out = len(collector.in_flight) + len(collector.finished)
    assert collector.in_flight and collector.finished and out == 8
    state = json.loads(json.dumps(collector.state_dict()))
    assert state["lost_on_resume"] == out
    rest = FakeClient()
    other = make(rest, staleness={"eta": 1})
    other.load_state_dict(state)
    assert other.drops == {"interrupted": out}
    assert other.tracker.outstanding == () and other.admission.dispatched == 4
    for _ in range(4):
        assert len(other.collect().batch) == 4
        advance(other)
    assert len(rest.sent) == 16
    known = {r.id for r in client.sent}
    assert not known & {r.id for r in rest.sent}  # visits go on: no rollout's name or seed is used twice
    assert collector.tracker.outstanding  # taking the state changed nothing


def test_requeued_tasks_survive_a_stop():
    client, collector, held = hold_then_age("requeue")
    collector.again = ["task-7", "task-2"]
    other = make(FakeClient())
    other.load_state_dict(json.loads(json.dumps(collector.state_dict())))
    assert other.again == ["task-7", "task-2"]

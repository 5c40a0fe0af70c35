"""Taking turns, spreads, plans, memory."""

import types

import pytest
import torch

from benchmarks.cases import CASES, Case, flops_of
from benchmarks.entrant import OURS
from benchmarks.implementations import Implementation
from benchmarks.machine import busy_warning, extra_memory
from benchmarks.measure import Contender, interleave, ratio, spread
from benchmarks.muon_suite import plan_case, run_case
from benchmarks.run import MIN_ROUNDS
from benchmarks.workload import Workload

CPU = torch.device("cpu")


class Step(torch.optim.Optimizer):
    """Subtracts the gradient, then does something else."""

    def __init__(self, params, after=lambda p: None):
        super().__init__(params, {})
        self.after = after

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad)
                self.after(p)


def implementation(name, after=lambda p: None, make=None):
    return Implementation(
        name, "", torch.float32, make or (lambda params, lr, decay: Step(params, after)), "torch"
    )


def test_implementations_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in "ABC"}
    samples = interleave(calls, 3)
    assert "".join(order) == "ABCABCABC"
    assert samples == {"A": [1.0] * 3, "B": [1.0] * 3, "C": [1.0] * 3}


def test_a_deadline_ends_between_rounds_only():
    now = [0.0]

    def call():
        now[0] += 1.0
        return 1.0

    samples = interleave({"A": call, "B": call}, 10, deadline=5.0, at_least=2, clock=lambda: now[0])
    assert [len(s) for s in samples.values()] == [3, 3]
    now[0] = 100.0
    samples = interleave({"A": call, "B": call}, 10, deadline=5.0, at_least=2, clock=lambda: now[0])
    assert [len(s) for s in samples.values()] == [2, 2], "at_least goes before the deadline"


def test_spread_by_hand():
    s = spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (s.median, s.lower, s.upper, s.minimum, s.count) == (3.0, 2.0, 4.0, 1.0, 5)


def test_ratios_are_formed_round_by_round():
    # A machine that slows down by 10 within the run leaves the ratio as it is.
    r = ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (r.lower, r.median, r.upper) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="2 samples cannot be compared with 3"):
        ratio([1.0, 1.0], [1.0, 1.0, 1.0])


def test_gradients_are_whole_again_before_each_step():
    workload = Workload(((4, 6, 2),), CPU)
    seen = []

    def after(p):
        seen.append(p.grad.clone())
        p.grad.zero_()
        p.grad = None

    contender = Contender(implementation("spoils", after), workload, workload.shapes)
    for _ in range(3):
        assert contender.seconds() > 0
    assert len(seen) == 6
    assert (
        torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[5]) and not torch.equal(seen[0], seen[1])
    )


def test_a_subset_uses_the_same_matrices():
    workload = Workload(((4, 6, 3), (5, 5, 2)), CPU)
    pairs = workload.parameters(((4, 6, 1), (5, 5, 2)))
    assert [tuple(p.shape) for p, _ in pairs] == [(4, 6), (5, 5), (5, 5)]
    again = workload.parameters(((4, 6, 1),))
    assert pairs[0][0].data_ptr() == again[0][0].data_ptr()


def test_a_step_that_does_nothing_is_no_measurement():
    class Idle(Step):
        def step(self):
            if not self.state:
                self.state[self.param_groups[0]["params"][0]]["done"] = True
                super().step()

    workload = Workload(((4, 6, 2),), CPU)
    contender = Contender(implementation("idle", make=lambda ps, lr, wd: Idle(ps)), workload, workload.shapes)
    contender.seconds()
    with pytest.raises(RuntimeError, match="left 2 of 2 matrices as they were"):
        contender.memory()
    result = run_case(
        Case("c", "c", ((4, 6, 2),)),
        [implementation("idle", make=lambda ps, lr, wd: Idle(ps))],
        {"idle": 1e9},
        CPU,
        0.2,
    )
    assert not result.measurements and "as they were" in result.left_out["idle"]


def test_an_implementation_that_fails_is_named_and_the_others_go_on():
    def fail(p):
        raise FloatingPointError("division")

    result = run_case(
        Case("c", "c", ((4, 6, 2),)),
        [implementation(OURS), implementation("bad", fail)],
        {OURS: 1e9, "bad": 1e9},
        CPU,
        0.2,
    )
    assert [m.implementation for m in result.measurements] == [OURS]
    assert result.left_out == {"bad": "FloatingPointError: division"}


def test_memory_that_the_allocator_kept_is_counted():
    megabyte = 1 << 20

    def call():
        torch.ones(24 * megabyte, dtype=torch.uint8)

    call()  # what it freed may still belong to the process
    assert 22 * megabyte < extra_memory(call, CPU) < 40 * megabyte
    assert extra_memory(lambda: None, CPU) < 2 * megabyte


def test_everything_is_measured_whole_where_time_allows():
    (plan,) = plan_case(CASES["small"], {OURS: 1e11, "torch": 5e10}, 60.0)
    assert plan.shapes == CASES["small"].shapes and set(plan.names) == {OURS, "torch"}


def test_the_slow_get_a_subset_of_their_own_with_ours():
    case = CASES["qwen3-60m"]
    fast, slow = plan_case(case, {OURS: 2e11, "torch fp32": 1e11, "torch": 2e9}, 200.0)
    assert fast.names == (OURS, "torch fp32") and slow.names == (OURS, "torch")
    assert flops_of(slow.shapes) < flops_of(fast.shapes) == flops_of(case.shapes)
    # All rounds, the warm-up and the memory step fit the share of the time.
    step = flops_of(slow.shapes) * (1 / 2e11 + 1 / 2e9)
    assert step * (MIN_ROUNDS + 2) <= 200.0 * slow.share


def test_the_slow_stay_with_the_others_where_everything_fits():
    rates = {OURS: 2e11, "torch fp32": 1e11, "torch": 2e9}
    (plan,) = plan_case(CASES["small"], rates, 60.0)
    assert plan.names == tuple(rates) and plan.shapes == CASES["small"].shapes


def test_torch_as_shipped_is_kept_where_the_slow_cannot_all_be_afforded():
    slow = {"torch": 1e9, "peer": 1e9, "another": 1e9}
    rates = {OURS: 2e11, **slow}
    _, plan = plan_case(CASES["square"], rates, 450.0)
    assert plan.names == (OURS, "torch") and plan.shapes == CASES["square"].shapes
    (only,) = plan_case(CASES["square"], rates, 40.0)
    assert only.names == (OURS,)


def test_memory_limits_the_subset_as_well():
    case = CASES["qwen3-60m"]
    whole = sum(rows * columns * count for rows, columns, count in case.shapes)
    # Weights, gradients, their copy, two momenta and 16 bytes of the step: 36 bytes a parameter.
    (plan,) = plan_case(case, {OURS: 1e12, "torch": 1e12}, 1e6, room=36 * whole / 0.85 + 1)
    assert plan.shapes == case.shapes
    (plan,) = plan_case(case, {OURS: 1e12, "torch": 1e12}, 1e6, room=36 * whole * 0.75 / 0.85)
    assert plan.shapes == tuple((rows, columns, count // 2) for rows, columns, count in case.shapes)


def test_an_error_in_a_later_round_is_reported():
    steps = []

    def late(p):
        steps.append(1)
        if len(steps) > 4:
            raise MemoryError("no room")

    case = Case("c", "c", ((4, 6, 1),))
    result = run_case(
        case, [implementation(OURS), implementation("late", late)], {OURS: 1e9, "late": 1e9}, CPU, 0.2
    )
    assert [m.implementation for m in result.measurements] == [OURS]
    assert len(result.measurements[0].samples) >= MIN_ROUNDS
    assert result.left_out == {"late": "MemoryError: no room"}


def test_a_case_that_cannot_be_afforded_is_skipped_with_the_reason():
    result = run_case(CASES["qwen3.5-4b"], [implementation(OURS)], {OURS: 1e9}, CPU, 1.0)
    assert not result.measurements
    assert (
        result.skipped
        == "one step on (1024, 2560) x 1 alone would exceed the 1 s (or the memory) left for this case"
    )


def test_a_busy_machine_is_named():
    assert busy_warning(0.5, 2) == ""
    assert busy_warning(3.8, 2).startswith(
        "WARNING: the machine was busy when the run began (load 3.8 on 2 cores)"
    )
    assert busy_warning(3.8, 64) == ""


def test_a_gpu_is_asked_for_its_own_peak(monkeypatch):
    state = types.SimpleNamespace(now=100, peak=100)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: state.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(state, "peak", state.now))
    assert extra_memory(lambda: setattr(state, "peak", 160), torch.device("cuda")) == 60

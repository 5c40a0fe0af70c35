"""Plans, contenders and whole runs of the loss suite."""

import dataclasses

import pytest
import torch

from benchmarks.cli import main
from benchmarks.entrant import OURS
from benchmarks.loss_cases import LOSS_CASES, LossCase
from benchmarks.loss_implementations import NAIVE, LossImplementation, plain_logp, token_mean
from benchmarks.loss_suite import LOSS, Cost, LossContender, batch_of, fit_cost, plan_rows, run_loss_case
from benchmarks.loss_workload import draw
from benchmarks.results import load
from muonrl_kernels import linear_policy_loss

CPU = torch.device("cpu")
TINY = LossCase("tiny", "a tiny case", 64, 8, 31, 0.3)
LARGE = LOSS_CASES["h512-30"]
COSTS = {OURS: Cost(0, 1e-3), NAIVE: Cost(0, 7e-3), "checkpoint": Cost(0, 2e-3), "trl": Cost(0, 8e-3)}


def plain(b):
    return token_mean(plain_logp(b.hidden, b.weight, b.targets), b)


def implementation(name, call=plain, algorithm="naive"):
    return LossImplementation(name, "", torch.float32, call, algorithm, 16)


def rows(plan):
    return plan.shapes[0][2]


def test_everybody_takes_turns_on_all_rows_where_one_round_fits():
    # 4096 rows x 18 ms = 73.7 s
    (plan,) = plan_rows(LARGE, COSTS, 74.0)
    assert plan.names == tuple(COSTS) and rows(plan) == 4096 and plan.at_least == 1
    assert plan.round_seconds == pytest.approx(4096 * 18e-3)


def test_ours_and_naive_keep_more_rows_where_time_is_short():
    core, others = plan_rows(LARGE, COSTS, 70.0)
    assert core.names == (OURS, NAIVE) and others.names == (OURS, "checkpoint", "trl")
    # 35 s each: 4096 rows x 8 ms fit, 4096 x 11 ms do not.
    assert (rows(core), rows(others)) == (4096, 2048)
    assert core.group != others.group and core.share + others.share == 1.0
    for plan in (core, others):
        assert plan.round_seconds <= 70.0 * plan.share


def test_nothing_fits_no_time():
    assert plan_rows(LARGE, COSTS, 1e-4) == []
    (plan,) = plan_rows(LARGE, {OURS: Cost(0, 1e-3)}, 1.1)
    assert plan.names == (OURS,) and rows(plan) == 1024


def test_a_cost_that_does_not_depend_on_the_rows_is_counted_once():
    assert fit_cost((10, 2.0), (30, 4.0)) == Cost(1.0, 0.1)
    assert Cost(1.0, 0.1).seconds(100) == 11.0
    # Noise: more rows in less time, or a line that starts below zero.
    assert fit_cost((10, 2.0), (20, 1.0)) == Cost(0.0, 0.05)
    assert fit_cost((10, 0.1), (20, 2.0)) == Cost(0.0, 0.1)
    assert fit_cost((1, 2.0), (1, 2.0)) == Cost(0.0, 2.0)
    # 1 s and 4096 ms fit 5.2 s; 16 times a probe of 256 rows would be 20 s.
    (plan,) = plan_rows(LARGE, {OURS: Cost(1.0, 1e-3)}, 5.2)
    assert rows(plan) == 4096


def test_the_logits_of_the_naive_path_must_fit_the_memory():
    head = 16 * 512 * 151936
    logits = 16 * 4096 * 151936
    (plan,) = plan_rows(LARGE, COSTS, 1e6, room=(head + logits) / 0.85 + 100)
    assert rows(plan) == 4096
    core, others = plan_rows(LARGE, COSTS, 1e6, room=(head + 0.6 * logits) / 0.85)
    assert (rows(core), rows(others)) == (2048, 4096), "only the naive path needs the room"


def test_a_pass_starts_without_gradients_and_must_leave_all_of_them():
    batch = draw(16, 4, 7, 5, CPU, torch.float32)
    seen = []

    def call(b):
        seen.append([x.grad for x in b.leaves])
        return plain(b)

    contender = LossContender(implementation("x", call), batch, lambda: seen.append("filled"))
    assert contender.memory() is None
    assert contender.seconds() > 0 and contender.seconds() > 0
    assert seen == ["filled", [None, None]] * 2
    assert contender.memory() is not None
    frozen = implementation("y", lambda b: plain(dataclasses.replace(b, weight=b.weight.detach())))
    with pytest.raises(RuntimeError, match="left 1 of 2 gradients out"):
        LossContender(frozen, batch, lambda: None).seconds()


def test_memory_of_a_pass_is_that_of_its_logits():
    batch = draw(512, 8, 20000, 512, CPU, torch.float32)
    logits = 512 * 20000 * 4

    def memory(call):
        # The first pass of a process also loads code, as the probe does in a run.
        first, contender = (LossContender(implementation("x", call), batch, lambda: None) for _ in range(2))
        first.seconds()
        contender.seconds()
        return contender.memory()

    def ours(b):
        return linear_policy_loss(
            b.hidden, b.weight, b.targets, b.old_logp, b.advantages, b.mask, chunk_rows=32
        )[0]

    naive = memory(plain)
    assert 2 * logits < naive < 6 * logits
    # Three chunks of 32 rows, and the gradients.
    assert 0 < memory(ours) < 0.25 * naive


def test_a_case_has_its_share_of_valid_rows_at_any_size():
    for n in (64, 16, 2):
        batch = batch_of(TINY, n, CPU, torch.float32)
        assert batch.hidden.shape == (n, 8) and int(batch.mask.sum()) == max(1, round(0.3 * n))


def test_measurements_say_what_the_model_says_of_the_rows_measured():
    result = run_loss_case(
        TINY, [implementation(OURS, algorithm="single pass"), implementation(NAIVE)], {}, CPU, 2.0
    )
    by_name = {m.implementation: m for m in result.measurements}
    # 64 rows, 19 of them valid, H 8, V 31
    assert by_name[NAIVE].flops == 6 * 64 * 8 * 31
    assert by_name[OURS].flops == by_name[OURS].floor == by_name[NAIVE].floor == 6 * 19 * 8 * 31
    assert all(m.memory is not None and len(m.samples) >= 1 for m in result.measurements)
    assert result.ratio(by_name[NAIVE]).count == len(by_name[OURS].samples)
    assert by_name[OURS].what == "64 of 64 rows, 19 of them valid"


def test_an_implementation_that_fails_is_named_and_the_others_go_on():
    def fail(b):
        raise RuntimeError("out of memory")

    result = run_loss_case(TINY, [implementation(OURS), implementation("bad", fail)], {}, CPU, 1.0)
    assert [m.implementation for m in result.measurements] == [OURS]
    assert result.left_out == {"bad": "RuntimeError: out of memory"}
    nothing = run_loss_case(LOSS_CASES["tokens"], [implementation(OURS)], {}, CPU, 1.0)
    assert not nothing.measurements and "no implementation of it" in nothing.skipped


def test_small_cases_get_time_for_rounds():
    cases = LOSS.choose(None, "cpu")
    weights = {case.name: LOSS.weight(case) for case in cases}
    assert weights["h512-100"] > weights["h512-30"] > weights["h512-10"] > weights["trainer"]
    assert 440.0 * weights["trainer"] / sum(weights.values()) > 5.0


def test_a_run_leaves_json_table_and_plot(tmp_path, capsys):
    words = [
        "run",
        "loss",
        "--cases",
        "tokens,trainer",
        "--implementations",
        "naive,eager",
        "--device",
        "cpu",
    ]
    assert main([*words, "--threads", "1", "--budget", "2", "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Policy loss times") and "ESTIMATE from the cost model" in text
    report = load(tmp_path / "loss.json")
    assert {case.case: {m.implementation for m in case.measurements} for case in report.cases} == {
        "tokens": {OURS, "eager"},
        "trainer": {OURS, NAIVE},
    }
    assert (tmp_path / "loss.md").read_text() == text.rstrip("\n") + "\n"
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "loss", "--cases", "small"], "cases must be among tokens, trainer"),
        (["run", "loss", "--device", "cpu", "--implementations", "torch"], "implementations must be among"),
        (["compare", "HEAD", "--suite", "loss", "--cases", "small"], "cases must be among tokens, trainer"),
        (["estimate", "loss", "--cases", "square"], "cases must be among tokens, trainer"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: error: ") and message in error and error.count("\n") == 1

"""A micro run from end to end in this process: what it writes, and what a resumed run makes of it."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from muonrl.config import load_recipe
from muonrl.errors import InfrastructureError
from muonrl.reporting.metrics import read_metrics
from muonrl.reporting.summary import read_summary
from muonrl.training import loop
from muonrl.training.checkpoint import latest_checkpoint, load_optimizer, read_json, verify_checkpoint
from muonrl.training.rollout_client import Interrupted
from muonrl.training.run import REQUIRED
from muonrl.trajectory import derive_seed
from tests.training.micro import arguments, copy_run, finished_run, muonrl, needs_bwrap

pytestmark = needs_bwrap

METRIC_NAMES = """
update success success_ema rollouts entropy loss clip_low clip_high clip_share tis_truncated tis_mean ess k3_theta_old
k3_old_rollout staleness staleness_mean tokens_action tokens_total tokens_per_s idle_sampler idle_learner sync_s grade_s
gradings gradings_cached sandboxes sandbox_s drops tool_error_rate length_rate truncation_rate turns_mean
adv_mean_weighted adv_quantiles tracker_n_eff groups ns_residual wall_s update_s eta_s policy rss_mb
"""


def trainer_state(run, step=None):
    folder = run / "checkpoints" / f"step-{step:06d}" if step is not None else None
    return read_json((folder or latest_checkpoint(run / "checkpoints")) / "trainer.json")


def assert_books_balance(state, config, published):
    """What a checkpoint remembers of dispatching agrees with itself and with the random stream."""
    collector = state["collector"]
    rng = np.random.Generator(np.random.PCG64(derive_seed(config.run.seed, "tasks")))
    dispatched = sum(collector["visits"].values())
    rng.random(dispatched)  # one draw a request
    assert collector["rng"] == rng.bit_generator.state
    assert collector["tracker"]["outstanding"] == {}
    assert collector["tracker"]["published"] == published
    assert collector["policy"] == published[-1]
    assert collector["admission"]["dispatched"] == state["update"] * config.run.rollouts_per_update
    assert collector["admission"]["published"] == state["update"]
    assert state["learner_updates"] == state["update"]
    return dispatched


def test_metrics_say_what_happened():
    records = read_metrics(finished_run())
    assert [r["update"] for r in records] == [1, 2, 3]
    for record in records:
        assert not set(METRIC_NAMES.split()) - set(record)
        assert record["rollouts"] == 4
        assert sum(record["staleness"].values()) == pytest.approx(1.0)
        assert set(record["staleness"]) <= {"0", "1"}  # the bound, eta = 1
        assert 0 < record["tokens_action"] < record["tokens_total"]
        assert set(record["groups"]) == {"hidden", "other"}
        assert set(record["groups"]["hidden"]) == {"grad_norm", "update_rms", "update_spectral", "lr"}
        assert 0 <= record["idle_sampler"] <= 1 and 0 <= record["idle_learner"] <= 1
        assert record["adv_mean_weighted"] == pytest.approx(0, abs=1e-6)
        assert record["dropped_rows"] == 0 and not record["suspicious"]
        assert record["policy"] == [0, record["update"] - 1]
    assert records[0]["staleness"] == {"0": 1.0}
    # Sampling went on during the first update, under the policy before it.
    assert records[1]["staleness"].get("1", 0) > 0 and records[1]["staleness_mean"] > 0
    assert records[1]["k3_old_rollout"] > records[0]["k3_old_rollout"]  # and its TIS weights show it
    assert abs(records[0]["tis_mean"] - 1) < 1e-5  # sampler and learner agree on the same weights
    assert sum(r["gradings"] for r in records) > 0 and sum(r["grade_s"] for r in records) > 0
    assert [r["eta_s"] > 0 for r in records] == [True, True, False]


def test_summary_curve_and_provenance():
    run = finished_run()
    summary = read_summary(run)
    assert summary["updates"] == 3 and summary["rollouts"] == 12
    assert summary["recipe"] == "micro" and summary["seed"] == 0 and summary["optimizer"] == "muon"
    for key in ("success_first10", "success_last10", "heldout_before", "heldout_after"):
        assert 0 <= summary[key] <= 1
    assert summary["wall_s"] > 0 and summary["peak_rss_mb"] > 50
    assert (run / "success.png").read_bytes().startswith(b"\x89PNG")
    assert load_recipe(run / "config.toml").run.updates == 3
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["versions"]["torch"] == torch.__version__ and provenance["cpu"]
    assert not (run / "weights").exists()  # staged weights are no part of a run


def test_the_checkpoint_is_whole_and_transformers_load_it():
    run = finished_run()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    last = latest_checkpoint(run / "checkpoints")
    verify_checkpoint(last, REQUIRED)
    model = AutoModelForCausalLM.from_pretrained(last / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(last / "model", local_files_only=True)
    ids = tokenizer("def f(x):\n    return x\n", return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert model.config.model_type == "qwen3"
    state = trainer_state(run)
    assert state["heldout_before"] is not None and state["heldout_after"] is not None


def test_the_books_of_an_uninterrupted_run_balance():
    run = finished_run()
    config = load_recipe(run / "config.toml")
    for step in (2, 3):
        state = trainer_state(run, step)
        assert_books_balance(state, config, [[0, s] for s in range(step + 1)])
    assert state["collector"]["lost_on_resume"] == 0  # nothing was dispatched that the run did not need


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Stop in the second update, resume: numbering, tracker, visits, random stream and optimizer go on."""
    run = tmp_path / "run"
    step = loop.Trainer.step

    def stop_in_the_second(self):
        if self.update == 1:
            raise Interrupted
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_in_the_second)
        assert muonrl(*arguments(run)) == 130
    assert f"stopped; continue with: muonrl resume {run}" in capsys.readouterr().out
    config = load_recipe(run / "config.toml")
    stopped = trainer_state(run)
    assert stopped["update"] == 1 and stopped["collector"]["lost_on_resume"] > 0
    dispatched = assert_books_balance(stopped, config, [[0, 0], [0, 1]])
    assert muonrl("resume", run) == 0
    records = read_metrics(run)
    assert [r["update"] for r in records] == [1, 2, 3]
    assert [r["policy"] for r in records] == [[0, 0], [0, 1], [0, 2]]  # a clean stop is no rollback
    assert records[1]["drops"] == {"interrupted": stopped["collector"]["lost_on_resume"]}
    assert records[1]["wall_s"] > stopped["wall_s"]
    done = trainer_state(run)
    assert done["heldout_before"] == stopped["heldout_before"]
    assert assert_books_balance(done, config, [[0, s] for s in range(4)]) > dispatched
    for task, visits in stopped["collector"]["visits"].items():
        assert done["collector"]["visits"][task] >= visits
    assert read_summary(run)["updates"] == 3
    moments = load_optimizer(latest_checkpoint(run / "checkpoints"))["state"].values()
    assert {float(m["step"]) for m in moments if "step" in m} == {3.0}


def test_falling_back_never_reuses_a_policy(tmp_path, monkeypatch, capsys):
    """Metrics beyond the checkpoint: those updates are lost, cut off, and done again in a new epoch."""
    run = copy_run(tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000003")

    def broken(self):
        raise InfrastructureError("rollout_process", "gone")

    with monkeypatch.context() as patch:  # the resumed run fails before it has anything to show
        patch.setattr(loop.Trainer, "step", broken)
        assert muonrl("resume", run) == 1
    assert capsys.readouterr().err == "muonrl: fault: rollout_process: gone\n"
    assert len(read_metrics(run)) == 2
    for epoch in (1, 5):
        assert muonrl("resume", run) == 0
        records = read_metrics(run)
        assert [r["update"] for r in records] == [1, 2, 3]
        assert [r["policy"] for r in records] == [[0, 0], [0, 1], [epoch, 2]]
        assert records[2]["staleness"].keys() == {"0"}  # only rollouts of the new epoch are trained on
        published = trainer_state(run)["collector"]["tracker"]["published"]
        assert published == sorted(published) and published[-2:] == [[epoch, 2], [epoch, 3]]
        # Fall back once more, behind work of a later epoch than the checkpoint knows.
        shutil.rmtree(run / "checkpoints" / "step-000003")
        records[2]["policy"] = [4, 2]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_a_run_that_never_reached_a_checkpoint_begins_anew(tmp_path):
    run = copy_run(tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert muonrl("resume", run) == 0
    records = read_metrics(run)
    assert [r["update"] for r in records] == [1, 2, 3]
    assert [r["policy"] for r in records] == [[1, 0], [1, 1], [1, 2]]

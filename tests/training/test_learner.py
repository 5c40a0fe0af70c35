"""One update equals the recipe written down by hand in fp64, whatever the micro-batches."""

import copy
import math

import numpy as np
import pytest
import torch

from muonrl.training import learner as learner_module
from muonrl.training.learner import Learner, build_optimizer, spectral_norm
from tests.numerics import relative_error
from tests.training.cases import config, rollouts, tiny_model

LENGTHS = [12, 7, 20, 9, 16]
SILENT = {"lr_muon": 0.0, "lr_adamw": 0.0, "max_grad_norm": 0.0}  # gradients can be read, weights stay


def make_learner(model=None, **sections):
    learner = Learner(copy.deepcopy(model or tiny_model()), config(**sections))
    for group in learner.optimizer.param_groups:
        group["compute_dtype"] = torch.float32  # the same on every machine
    return learner


def token_logps(model, rollout, temperature=1.0):
    """fp64 log-probabilities of the action tokens of one rollout, unpadded."""
    ids = torch.from_numpy(rollout.tokens)[None]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].double() / temperature
    logp = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return logp[torch.from_numpy(rollout.action[1:])]


def reference_loss(model, batch, *, agg="token_mean", proximal="batch", cap=2.0, old=None, temperature=1.0):
    """The loss of the recipe: -w min(r A, clip(r, 0.8, 1.28) A), aggregated over the whole update."""
    rows = []
    for i, rollout in enumerate(batch):
        logp = token_logps(model, rollout, temperature)
        chosen = rollout.action
        sampled, a = (torch.from_numpy(x[chosen]).double() for x in (rollout.logp, rollout.advantage))
        pi_old = old[i] if old is not None else sampled if proximal == "rollout" else logp.detach()
        w = torch.exp(pi_old - sampled).clamp(max=cap) if cap else torch.ones_like(a)
        r = torch.exp(logp - pi_old)
        rows.append(-w * torch.minimum(r * a, r.clamp(0.8, 1.28) * a))
    if agg == "token_mean":
        return torch.cat(rows).sum() / sum(len(row) for row in rows)
    return sum(row.mean() for row in rows) / len(rows)


def reference_gradients(model, loss):
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_gradients(learner, model, loss, tolerance=2e-5):
    for name, truth in reference_gradients(model, loss).items():
        grad = learner.model.get_parameter(name).grad
        assert relative_error(grad, truth) < tolerance, name


CASES = {
    "token_mean": ({}, {}),
    "sequence_mean": ({"agg": "sequence_mean"}, {"agg": "sequence_mean"}),
    "proximal_publish": ({"proximal": "publish"}, {}),
    "proximal_rollout": ({"proximal": "rollout"}, {"proximal": "rollout"}),
    "no_tis": ({"is_mode": "none"}, {"cap": None}),
    "other_cap": ({"is_high": 1.2}, {"cap": 1.2}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_recipe_in_fp64(case):
    options, by_hand = CASES[case]
    model, batch = tiny_model(), rollouts(LENGTHS)
    learner = make_learner(model, loss=options, optimizer=SILENT)
    truth_model = copy.deepcopy(model).double()
    report = learner.step(batch)
    loss = reference_loss(truth_model, batch, **by_hand)
    assert_gradients(learner, truth_model, loss)
    assert report.losses == [pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)]
    assert report.metrics["n"] == sum(int(r.action.sum()) for r in batch)


def test_the_cases_differ_from_each_other():
    """Otherwise the test above would not tell the settings apart."""
    model, batch = tiny_model().double(), rollouts(LENGTHS)
    sizes = set()
    for _, by_hand in CASES.values():
        gradients = reference_gradients(model, reference_loss(model, batch, **by_hand))
        sizes.add(round(sum(float(g.norm()) for g in gradients.values()), 6))
    assert len(sizes) == len(CASES) - 1  # "publish" is "batch" where each batch is published


def test_temperature_divides_the_logits():
    model, batch = tiny_model(), rollouts(LENGTHS)
    learner = make_learner(model, agent={"temperature": 0.7}, optimizer=SILENT)
    learner.step(batch)
    truth_model = copy.deepcopy(model).double()
    assert_gradients(learner, truth_model, reference_loss(truth_model, batch, temperature=0.7))


@pytest.mark.parametrize("agg", ["token_mean", "sequence_mean"])
def test_micro_batches_do_not_change_the_update(agg, monkeypatch):
    """The mean is over the whole update: weights after it are equal with 1 and with 5 micro-batches."""
    results = []
    for budget in (8192, 20):
        monkeypatch.setattr(learner_module, "MICRO_BATCH_TOKENS", budget)
        learner = make_learner(loss={"agg": agg}, optimizer={"lr_muon": 0.02, "lr_adamw": 0.01})
        report = learner.step(rollouts(LENGTHS))
        results.append((learner.model.state_dict(), report))
    (one, report), (many, other) = results
    for name in one:
        torch.testing.assert_close(one[name], many[name], atol=2e-5, rtol=1e-3, msg=name)
    assert other.losses == [pytest.approx(report.losses[0], rel=1e-5, abs=1e-7)]
    assert other.drift == pytest.approx(report.drift, rel=1e-5)


def newton_schulz(g):
    x = g / g.norm()
    x = x if g.shape[0] <= g.shape[1] else x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if g.shape[0] <= g.shape[1] else x.T


def test_two_steps_are_muon_on_hidden_matrices_and_adamw_elsewhere():
    """By hand from zero state: nesterov momentum, weight decay, Muon's rate scaled by 0.2 sqrt(max(m, n))."""
    options = {"lr_muon": 0.02, "lr_adamw": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.05}
    learner = make_learner(optimizer=options)
    truth = tiny_model().double()
    momentum = {n: torch.zeros_like(p) for n, p in truth.named_parameters()}
    square = {n: torch.zeros_like(p) for n, p in truth.named_parameters()}
    for step in (1, 2):
        batch = rollouts(LENGTHS, seed=step)
        truth.load_state_dict(learner.model.state_dict())  # errors of the first step are not to add up
        before = {n: p.detach().clone() for n, p in truth.named_parameters()}
        gradients = reference_gradients(truth, reference_loss(truth, batch))
        learner.step(batch)
        total = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values()))
        assert total > 0.05  # clipping is at work
        for name, p in before.items():
            g = gradients[name] * 0.05 / (total + 1e-6)
            if name.endswith("_proj.weight"):
                momentum[name] += 0.05 * (g - momentum[name])
                update = newton_schulz(g + 0.95 * (momentum[name] - g)) * 0.2 * math.sqrt(max(p.shape))
                expected = -0.02 * 0.1 * p - 0.02 * update
                steady = torch.ones_like(p, dtype=torch.bool)
            else:
                momentum[name] += 0.1 * (g - momentum[name])
                square[name] += 0.05 * (g * g - square[name])
                root = (square[name] / (1 - 0.95**step)).sqrt()
                expected = -0.01 * 0.1 * p - 0.01 * momentum[name] / (1 - 0.9**step) / (root + 1e-8)
                steady = root > 1e-6  # where all gradients are near zero, rounding decides
                assert steady.float().mean() > 0.4, name
            moved = learner.model.get_parameter(name).double() - p
            assert relative_error(moved[steady], expected[steady]) < 3e-3, (step, name)


def test_adamw_twin_has_the_same_groups_with_adamw_on_both():
    model = tiny_model()
    muon, adamw = (build_optimizer(model, config(optimizer={"name": n}).optimizer) for n in ("muon", "adamw"))
    assert isinstance(adamw, torch.optim.AdamW)
    names = {id(p): n for n, p in model.named_parameters()}
    for mine, theirs in zip(muon.param_groups, adamw.param_groups, strict=True):
        assert mine["name"] == theirs["name"]
        assert [id(p) for p in mine["params"]] == [id(p) for p in theirs["params"]]
        hidden = mine["name"] == "hidden"
        assert all(names[id(p)].endswith("_proj.weight") is hidden for p in mine["params"])
    counted = [p for g in muon.param_groups for p in g["params"]]
    assert len({id(p) for p in counted}) == len(counted) == len(list(model.parameters()))
    assert {g["lr"] for g in adamw.param_groups} == {config().optimizer.lr_adamw}


def test_two_epochs_make_clipping_bite():
    """The second pass sees the ratio to the first pass's policy; by hand, its gradient too."""
    model, batch = tiny_model(), rollouts(LENGTHS)
    rates = {"lr_muon": 0.05, "lr_adamw": 0.05, "max_grad_norm": 0.0, "weight_decay": 0.0}
    once = make_learner(model, optimizer=rates)
    first = once.step(batch)
    assert first.metrics["clip_low"] == first.metrics["clip_high"] == 0.0
    twice = make_learner(model, optimizer=rates, loss={"epochs": 2})
    report = twice.step(batch)
    assert report.metrics["clip_low"] + report.metrics["clip_high"] > 0.05
    assert report.metrics["abs_delta"] > 0
    assert len(report.losses) == 2 and twice.updates == 1
    truth_model = copy.deepcopy(once.model).double()
    with torch.no_grad():
        old = [token_logps(copy.deepcopy(model).double(), r) for r in batch]
    loss = reference_loss(truth_model, batch, old=old)
    assert report.losses[1] == pytest.approx(float(loss.detach()), rel=1e-3)
    assert_gradients(twice, truth_model, loss, tolerance=2e-3)


def test_tis_weights_and_drift_are_reported():
    model, batch = tiny_model(), rollouts(LENGTHS)
    report = make_learner(model, optimizer=SILENT).step(batch)
    with torch.no_grad():
        logps = [token_logps(copy.deepcopy(model).double(), r).numpy() for r in batch]
    delta = [p - r.logp[r.action] for p, r in zip(logps, batch, strict=True)]
    raw = np.exp(np.concatenate(delta))
    assert 0.05 < (raw > 2).mean() < 0.95  # some weights are cut, some are not
    assert report.metrics["mean_w"] == pytest.approx(np.minimum(raw, 2).mean(), rel=1e-4)
    assert report.metrics["w_truncated"] == pytest.approx((raw > 2).mean(), rel=1e-6)
    assert report.drift == pytest.approx([np.abs(d).mean() for d in delta], rel=1e-4)


@pytest.mark.parametrize(("baseline", "moves"), [("spo", True), ("spopp", False)])
def test_spo_sees_drift_under_the_rollout_proximal(baseline, moves):
    sections = {"loss": {"proximal": "rollout"}, "algorithm": {"baseline": baseline}, "optimizer": SILENT}
    report = make_learner(**sections).step(rollouts(LENGTHS))
    batch_proximal = make_learner(optimizer=SILENT).step(rollouts(LENGTHS))
    assert report.drift == (pytest.approx(batch_proximal.drift) if moves else [0.0] * len(LENGTHS))


def residual(update):
    """||X X^T - I||_F / sqrt(r) of the update scaled to mean squared singular value 1; its rank is r."""
    x = update if update.shape[0] <= update.shape[1] else update.T
    r = x.shape[0]
    x = x * math.sqrt(r) / x.norm()
    return float((x @ x.T - torch.eye(r)).norm()) / math.sqrt(r)


def test_group_reports_equal_direct_computation():
    model = tiny_model()
    learner = make_learner(model, optimizer={"lr_muon": 0.02, "lr_adamw": 0.01, "warmup_updates": 4})
    report = learner.step(rollouts(LENGTHS))
    silent = make_learner(model, optimizer=SILENT)
    silent.step(rollouts(LENGTHS))
    for group, quiet in zip(learner.optimizer.param_groups, silent.optimizer.param_groups, strict=True):
        mine = report.groups[group["name"]]
        names = {id(p): n for n, p in learner.model.named_parameters()}
        change = [(p - model.get_parameter(names[id(p)])).detach().double() for p in group["params"]]
        flat = torch.cat([c.flatten() for c in change])
        assert mine.update_rms == pytest.approx(float(flat.square().mean().sqrt()), rel=1e-4)
        top = max(float(torch.linalg.matrix_norm(c, 2)) for c in change if c.ndim == 2)
        assert 0.9 * top <= mine.update_spectral <= top * (1 + 1e-5)
        gradient = torch.cat([p.grad.flatten() for p in quiet["params"]])
        assert mine.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-4)  # before clipping
        assert mine.lr == pytest.approx({"hidden": 0.02, "other": 0.01}[group["name"]] / 4)
        if group["name"] == "hidden":
            before = [model.get_parameter(names[id(p)]).detach().double() for p in group["params"]]
            by_hand = [residual(c + 0.005 * 0.1 * b) for c, b in zip(change, before, strict=True)]
    assert report.ns_residual == pytest.approx(np.mean(by_hand), rel=1e-3)


def test_learning_rates_warm_up_and_stay():
    learner = make_learner(optimizer={"lr_muon": 0.03, "lr_adamw": 0.01, "warmup_updates": 2})
    seen = [learner.step(rollouts([6, 8])).groups["other"].lr for _ in range(3)]
    assert seen == pytest.approx([0.005, 0.01, 0.01])


def test_without_any_gradient_the_residual_is_no_rounding_noise():
    batch = rollouts(LENGTHS)
    for rollout in batch:
        rollout.advantage[:] = 0
    report = make_learner(optimizer={"lr_muon": 1e-3}).step(batch)
    assert report.ns_residual == 0.0
    assert report.groups["hidden"].grad_norm == 0.0
    assert report.groups["hidden"].update_rms > 0  # weight decay


def test_spectral_norm_is_an_estimate_from_below():
    torch.manual_seed(1)
    for shape in ((8, 30), (30, 8), (1, 5)):
        matrix = torch.randn(shape)
        truth = float(torch.linalg.matrix_norm(matrix.double(), 2))
        assert 0.9 * truth <= spectral_norm(matrix) <= truth * (1 + 1e-5)
    rank_one = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 4))
    assert spectral_norm(rank_one) == pytest.approx(float(rank_one.norm()), rel=1e-6)
    assert spectral_norm(torch.zeros(3, 4)) == 0.0

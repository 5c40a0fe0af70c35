"""A wrong loss gets no speed; the data that everything is measured on is what it says it is."""

import dataclasses
import re

import pytest
import torch

from benchmarks.entrant import OURS
from benchmarks.loss_cost import ALGORITHMS
from benchmarks.loss_gate import LOSS_FLOOR, check_loss
from benchmarks.loss_implementations import LossImplementation, own_losses, plain_logp, token_mean
from benchmarks.loss_peers import LOSS_PEERS, loss_peers
from benchmarks.loss_suite import LOSS
from benchmarks.loss_workload import draw, draw_logp
from benchmarks.run import passing
from muonrl_kernels import linear_policy_loss

CPU = torch.device("cpu")
FP32 = torch.float32


def implementation(call, name="plain", dtype=FP32, kind="linear"):
    return LossImplementation(name, "for this test", dtype, call, "naive", 1, kind)


def plain(b):
    return token_mean(plain_logp(b.hidden, b.weight, b.targets), b)


def all_tokens(b):
    return plain(dataclasses.replace(b, mask=torch.ones_like(b.mask)))


def normalized_by_rows(b):
    return plain(b) * (b.valid / b.mask.numel())


def unclipped(b):
    logp = plain_logp(b.hidden, b.weight, b.targets)
    terms = -torch.exp(logp - b.old_logp) * b.advantages
    weight = torch.exp(b.old_logp - b.rollout_logp).clamp(max=2.0)
    return torch.where(b.mask, terms * weight, 0.0).sum() / b.mask.sum()


def half_of_d_weight(b):
    # The right loss, with half of the gradient of the weight missing.
    return plain(b) * 0.5 + plain(dataclasses.replace(b, weight=b.weight.detach())) * 0.5


def hidden_in_half(b):
    return plain(dataclasses.replace(b, hidden=b.hidden.bfloat16().float()))


def not_finite(b):
    return plain(b) * float("nan")


def test_the_right_loss_passes():
    verdict = check_loss(implementation(plain), CPU)
    assert verdict.passed and not verdict.reason and 0 < verdict.error <= verdict.bound


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (all_tokens, "error .* of loss with 307 of 1023"),
        (normalized_by_rows, "error .* of loss with 307 of 1023"),
        (unclipped, "error .* of loss"),
        (lambda b: plain(b).neg(), "error 2.00e.00 of loss"),
        (lambda b: plain(b).detach() + 0.0 * plain(b), "of d hidden"),
        (half_of_d_weight, "of d weight"),
        (hidden_in_half, "error"),
        (not_finite, "error inf of loss"),
    ],
)
def test_a_wrong_loss_or_gradient_fails(wrong, reason):
    verdict = check_loss(implementation(wrong), CPU)
    assert not verdict.passed
    assert re.search(reason, verdict.reason), verdict.reason


def test_a_mistake_in_the_last_column_fails():
    def call(b):
        weight = torch.cat([b.weight[:-1], b.weight[-1:].detach()])
        return plain(dataclasses.replace(b, weight=weight))

    verdict = check_loss(implementation(call), CPU)
    assert not verdict.passed and "d weight" in verdict.reason


def test_an_elementwise_loss_is_judged_by_its_own_problems():
    right = implementation(lambda b: token_mean(b.logp, b), kind="elementwise")
    assert check_loss(right, CPU).passed
    wrong = implementation(lambda b: token_mean(b.logp, b) * 1.001, kind="elementwise")
    assert "of loss with 5016 of 5016" in check_loss(wrong, CPU).reason


def test_an_exception_is_a_verdict():
    def call(b):
        raise NotImplementedError("no kernel\nfor this")

    verdict = check_loss(implementation(call), CPU)
    assert not verdict.passed and verdict.reason == "NotImplementedError: no kernel"


def test_half_precision_has_a_bound_of_its_own():
    half = check_loss(implementation(plain, dtype=torch.bfloat16), CPU)
    assert half.passed and half.bound > 100 * LOSS_FLOOR


def test_only_what_passes_is_measured():
    wrong = implementation(all_tokens, "wrong")
    good, gates = passing([implementation(plain), wrong], CPU, lambda _: None, LOSS.check)
    assert [item.name for item in good] == ["plain"]
    assert {gate.name: gate.passed for gate in gates} == {"plain": True, "wrong": False}


def test_everything_that_ships_passes():
    found = own_losses(CPU, FP32)
    assert [item.name for item in found if item.kind == "linear"] == [OURS, "naive", "checkpoint"]
    assert [item.name for item in found if item.kind == "elementwise"] == [OURS, "eager"]
    for item in found:
        verdict = check_loss(item, CPU)
        assert verdict.passed, (item.name, verdict)


def test_a_gpu_gets_every_way_that_ours_has():
    from muonrl_kernels import linear_triton

    found = {
        item.name: item for item in own_losses(torch.device("cuda"), torch.bfloat16) if item.kind == "linear"
    }
    ours = [name for name in found if name.startswith(OURS)]
    assert ours == [OURS, "muonrl unbounded", "muonrl torch", "muonrl fused"]
    assert all(item.algorithm in ALGORITHMS and item.compute == torch.bfloat16 for item in found.values())
    before = linear_triton.run_loss
    with found["muonrl fused"].active():
        assert linear_triton.run_loss.keywords == {"head_path": "fused"}
        assert linear_triton.run_loss.func is before
    assert linear_triton.run_loss is before


def test_every_peer_is_found_or_named_with_its_error(monkeypatch):
    def broken(on_gpu):
        raise AttributeError("no such loss")

    def absent(on_gpu):
        raise ModuleNotFoundError("No module named 'trl'")

    assert set(LOSS_PEERS) == {"trl", "liger"}
    monkeypatch.setitem(LOSS_PEERS, "liger", broken)
    monkeypatch.setitem(LOSS_PEERS, "trl", absent)
    found, missing = loss_peers(CPU)
    assert found == []
    assert {m.name: m.reason for m in missing} == {
        "liger": "AttributeError: no such loss",
        "trl": "not installed (No module named 'trl')",
    }


@pytest.mark.parametrize("valid", [1024, 307, 1])
def test_a_batch_has_exactly_the_valid_rows_that_were_asked_for(valid):
    b = draw(1024, 16, 97, valid, CPU, FP32)
    assert int(b.mask.sum()) == b.valid == valid
    assert int(draw_logp(1024, valid, CPU).mask.sum()) == valid


def test_the_data_is_near_its_policy():
    # log pi_old comes from an approximation of the logsumexp; the ratio is what the loss sees.
    b = draw(512, 64, 4001, 512, CPU, FP32, spread=0.1)
    delta = plain_logp(b.hidden, b.weight, b.targets).detach() - b.old_logp
    assert abs(float(delta.mean())) < 0.02 and 0.09 < float(delta.std()) < 0.11
    _, metrics = linear_policy_loss(
        b.hidden, b.weight, b.targets, b.old_logp, b.advantages, b.mask, rollout_logp=b.rollout_logp
    )
    found = metrics.as_dict()
    assert found["n"] == 512 and found["dropped"] == 0


def test_rows_of_a_sequence_share_their_advantage():
    b = draw(1024, 4, 11, 10, CPU, FP32)
    assert b.sequence_advantages.shape == (2,)
    assert torch.equal(b.advantages, b.sequence_advantages.repeat_interleave(512))
    assert draw(1023, 4, 11, 10, CPU, FP32).sequence_advantages.shape == (1,)
    same = draw(1024, 4, 11, 10, CPU, FP32)
    assert torch.equal(b.hidden, same.hidden) and torch.equal(b.mask, same.mask)

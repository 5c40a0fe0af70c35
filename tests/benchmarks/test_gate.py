"""A wrong implementation gets no speed."""

import dataclasses

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.entrant import patched
from benchmarks.gate import FACTOR, SHAPES, check
from benchmarks.implementations import (
    Implementation,
    own_implementations,
    rewritten,
)
from benchmarks.muon_suite import run_case
from benchmarks.peers import PEERS, peer_implementations
from benchmarks.run import passing
from muonrl_kernels import reference
from muonrl_kernels.coefficients import KJ, YOU

CPU = torch.device("cpu")


class Plain(torch.optim.Optimizer):
    """The reference iteration as an optimizer, with a way to spoil the update."""

    def __init__(self, params, lr, spoil=lambda x: x, dtype=torch.float32):
        super().__init__(params, {"lr": lr})
        self.spoil, self.dtype = spoil, dtype

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            update = reference.newton_schulz(p.grad.to(self.dtype), KJ.coefficients).float()
            ratio = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.sub_(self.spoil(update), alpha=self.param_groups[0]["lr"] * ratio)


def implementation(name="plain", spoil=lambda x: x, dtype=torch.float32, **changes):
    made = Implementation(
        name, "for this test", dtype, lambda params, lr, decay: Plain(params, lr, spoil, dtype), "torch"
    )
    return dataclasses.replace(made, **changes)


def test_a_right_implementation_passes():
    verdict = check(implementation(), CPU)
    assert verdict.passed and not verdict.reason
    assert 0 < verdict.error <= verdict.bound


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), "error"),
        (lambda x: -x, "does not point along"),
        (lambda x: torch.zeros_like(x), "does not point along"),
        (lambda x: x * 1.1, "1.1 times as large"),
        (lambda x: x * float("nan"), "does not point along"),
        (lambda x: x.flip(0), "error|does not point along"),
    ],
    ids=["noise", "sign", "zero", "size", "nan", "rows"],
)
def test_a_wrong_update_fails(spoil, reason):
    verdict = check(implementation(spoil=spoil), CPU)
    assert not verdict.passed
    import re

    assert re.search(reason, verdict.reason)


def test_one_wrong_shape_is_enough():
    tall = next(shape for shape in SHAPES if shape[0] > shape[1])
    verdict = check(implementation(spoil=lambda x: x.sign() if tuple(x.shape) == tall else x), CPU)
    assert not verdict.passed and str(tall) in verdict.reason


def test_other_coefficients_than_declared_fail():
    assert not check(implementation(coefficients=YOU.coefficients), CPU).passed


def test_the_bound_follows_the_dtype():
    # What bf16 may do is refused to an implementation that says it iterates in fp32.
    half = check(implementation(dtype=torch.bfloat16), CPU)
    assert half.passed and half.bound > FACTOR * 1e-3
    claimed = dataclasses.replace(implementation(dtype=torch.bfloat16), compute=torch.float32)
    assert not check(claimed, CPU).passed


def test_an_exception_is_a_verdict():
    def make(params, lr, decay):
        raise ImportError("no such\nkernel")

    verdict = check(dataclasses.replace(implementation(), make=make), CPU)
    assert not verdict.passed and verdict.reason == "ImportError: no such"


def test_no_speed_for_a_wrong_result():
    wrong = implementation("wrong", spoil=lambda x: x * 2)
    good, gates = passing([implementation(), wrong], CPU, lambda _: None, check)
    assert [item.name for item in good] == ["plain"]
    assert {g.name: g.passed for g in gates} == {"plain": True, "wrong": False}
    case = Case("tiny", "tiny", ((16, 32, 2),))
    result = run_case(case, good, {"plain": 1e9}, CPU, 0.5)
    assert [m.implementation for m in result.measurements] == ["plain"]


def test_ours_and_torch_pass():
    found = own_implementations(CPU)
    assert {"muonrl", "torch", "torch fp32"} <= {item.name for item in found}
    for item in found:
        verdict = check(item, CPU)
        assert verdict.passed, (item.name, verdict)


def test_torch_in_fp32_is_torch_but_for_the_cast():
    by_name = {item.name: item for item in own_implementations(CPU)}
    grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(3))
    steps = {}
    for name in ("torch", "torch fp32"):
        p = torch.nn.Parameter(torch.zeros(24, 40))
        p.grad = grad.clone()
        with by_name[name].active():
            by_name[name].make([p], 1.0, 0.0).step()
        steps[name] = p.detach()
        assert torch.equal(p.grad, grad), "the copy keeps the gradient whole"
    truth = reference.newton_schulz(grad.double(), KJ.coefficients)
    errors = {name: float((-p.double() - truth).norm() / truth.norm()) for name, p in steps.items()}
    assert errors["torch fp32"] < 1e-5 < 1e-3 < errors["torch"]


def test_a_patch_is_undone_even_after_an_error():
    import torch.optim._muon as module

    before = module._zeropower_via_newtonschulz
    with pytest.raises(KeyError), patched(module, {"_zeropower_via_newtonschulz": None}):
        assert module._zeropower_via_newtonschulz is None
        raise KeyError
    assert module._zeropower_via_newtonschulz is before


def test_a_source_that_changed_is_not_rewritten_silently():
    import torch.optim._muon as module

    with pytest.raises(RuntimeError, match="no longer contains 'no such text'"):
        rewritten(module, "_adjust_lr", {"no such text": ""})


def test_every_peer_is_found_or_named_with_its_error(monkeypatch):
    found, missing = peer_implementations(CPU)
    assert {m.name for m in missing} | {
        name for name in PEERS if any(f.name.startswith(name) for f in found)
    } == set(PEERS)

    def broken(on_gpu):
        raise AttributeError("module has no attribute Muon")

    monkeypatch.setitem(PEERS, "dion", broken)
    _, missing = peer_implementations(CPU)
    assert {m.name: m.reason for m in missing}["dion"] == "AttributeError: module has no attribute Muon"

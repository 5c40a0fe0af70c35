"""Presets fix conventions, explicit options override them, and the modules hold both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from muonrl_kernels import (
    LinearPolicyLoss,
    LossOptions,
    PolicyLoss,
    linear_policy_loss,
    policy_loss,
    presets,
    reference,
)
from muonrl_kernels.options import choose_options
from tests.kernels.cases import cast, linear_inputs, token_inputs, values_and_grads
from tests.numerics import assert_exactly, relative_error


def test_what_the_presets_fix() -> None:
    trl, verl = choose_options("trl", {}), choose_options("verl", {})
    assert (trl.clip_low, trl.clip_high, trl.dual_clip) == (0.2, 0.2, None)
    assert (trl.is_mode, trl.is_level, trl.is_high, trl.is_low) == ("icepop", "sequence", 3.0, None)
    assert (verl.clip_low, verl.clip_high, verl.dual_clip) == (0.2, 0.2, 3.0)
    assert (verl.is_mode, verl.is_level, verl.is_high) == ("tis", "sequence", 2.0)
    assert trl.kl_weighted and not verl.kl_weighted
    assert choose_options(None, {}) == LossOptions()


def test_presets_are_immutable_and_say_where_they_are_from() -> None:
    assert {k: (p.source.split(",")[0], p.version) for k, p in presets.items()} == {
        "trl": ("trl", "1.16.0"),
        "verl": ("verl", "0.9.1"),
    }
    entry: Any = presets["trl"]
    for change in (
        lambda: presets.update({}),  # type: ignore[attr-defined]
        lambda: entry.options.__setitem__("beta", 1.0),
        lambda: entry.names["loss_type"].__setitem__("dapo", {}),
        lambda: entry.names["loss_type"]["dapo"].__setitem__("agg", "constant"),
        lambda: setattr(entry, "version", "0"),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()


@pytest.mark.parametrize(("preset", "field"), [(p, f) for p in presets for f in presets[p].names])
def test_every_foreign_name_is_understood(preset: str, field: str) -> None:
    for name, meaning in presets[preset].names[field].items():
        chosen = choose_options(preset, {field: name, "normalizer": 7.0})  # type: ignore[misc]
        for key, value in meaning.items():
            assert key == "normalizer" or getattr(chosen, key) == value, name
        assert chosen.normalizer == 7.0
        if name != meaning.get(field):
            with pytest.raises(ValueError, match=f"{field} must be one of"):
                choose_options(None, {field: name, "normalizer": 7.0})  # type: ignore[misc]


def test_explicit_options_win() -> None:
    chosen = choose_options("verl", {"clip_high": 0.5, "is_mode": "none", "dual_clip": None})
    assert (chosen.clip_high, chosen.is_mode, chosen.dual_clip, chosen.clip_low) == (0.5, "none", None, 0.2)
    both = choose_options("trl", {"agg": "constant", "loss_type": "grpo", "normalizer": 3.0})
    assert (both.loss_type, both.agg) == ("ppo", "constant")


@pytest.mark.parametrize("bound", [0.2, 5.0])
def test_cispo_with_a_bound_on_the_ratio_itself(bound: float) -> None:
    inputs = token_inputs(4, 30, spread=1.0)
    ours = values_and_grads(
        policy_loss, inputs, ("logp",), preset="trl", loss_type="cispo", clip_high=bound, is_mode="none"
    )
    logp = inputs["logp"].clone().requires_grad_()
    ratio = (logp - inputs["old_logp"]).exp().clamp(max=bound).detach()
    term = torch.where(inputs["mask"], -ratio * inputs["advantages"] * logp, 0.0)
    truth = term.sum() / inputs["mask"].sum()
    truth.backward()
    assert relative_error(ours[0], truth.detach()) < 1e-12 and relative_error(ours[1], logp.grad) < 1e-12
    assert choose_options("verl", {"loss_type": "cispo", "clip_high": 0.3}).clip_high == 0.3


def test_tokens_whose_weight_is_zero_stay_in_the_denominator() -> None:
    inputs = token_inputs(6, 9, spread=1.5)
    del inputs["ref_logp"]
    ours = values_and_grads(policy_loss, inputs, ("logp",), preset="trl", is_mode="token_mask")
    options: dict[str, Any] = {"is_mode": "icepop", "is_high": 3.0, "clip_high": 0.2}
    options["normalizer"] = float(inputs["mask"].sum())
    truth = values_and_grads(reference.policy_loss, inputs, ("logp",), **options)
    assert policy_loss(**inputs, **options)[1].as_dict()["w_truncated"] > 0
    for a, b in zip(ours, truth, strict=True):
        assert relative_error(a, b) < 1e-12


def test_the_linear_loss_takes_presets_too() -> None:
    inputs = linear_inputs(50, 8, 21)
    bounds = torch.tensor([0, 20, 50])
    ours, _ = linear_policy_loss(**inputs, preset="verl", loss_type="gspo", cu_seqlens=bounds)
    options: dict[str, Any] = {"clip_high": 0.2, "is_level": "sequence", "log_ratio_clamp": 10.0}
    truth = reference.linear_policy_loss(**inputs, loss_type="gspo", cu_seqlens=bounds, **options)
    assert relative_error(ours, truth) < 1e-12


def test_an_unknown_preset() -> None:
    row = torch.zeros(4)
    with pytest.raises(ValueError, match="preset must be one of trl, verl, or None; got 'openrlhf'"):
        policy_loss(row, row, row, row.bool(), preset="openrlhf")
    with pytest.raises(ValueError, match="give normalizer"):
        policy_loss(row, row, row, row.bool(), preset="verl", agg="seq-mean-token-sum")


@pytest.mark.parametrize("bad", [{"clip_high": -0.1}, {"loss_type": "cispo", "clip_high": -1.5}], ids=str)
def test_bounds_below_zero(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="clip_high"):
        LossOptions(**bad)


def test_modules_are_the_functions_with_their_options_fixed() -> None:
    tokens = cast(token_inputs(3, 10), torch.float32)
    options: dict[str, Any] = {"clip_high": 0.4, "beta": 0.1, "agg": "sequence_mean"}
    module = PolicyLoss(preset="verl", **options)
    assert_exactly(module(**tokens)[0], policy_loss(**tokens, preset="verl", **options)[0])
    again = module(**tokens, normalizer=17.0)[0]
    assert_exactly(again, policy_loss(**tokens, preset="verl", normalizer=17.0, **options)[0])
    rows = cast(linear_inputs(40, 8, 21), torch.float32)
    linear = LinearPolicyLoss(temperature=0.7, softcap=4.0, vocab_size=21, chunk_rows=9, clip_low=0.1)
    whole = linear_policy_loss(**rows, temperature=0.7, softcap=4.0, chunk_rows=9, clip_low=0.1)
    found = linear(**rows)
    assert_exactly(found[0], whole[0])
    assert_exactly(found[1].sums, whole[1].sums)
    assert not list(module.parameters()) and not module.state_dict()
    assert "clip_high=0.4" in repr(module) and "clip_low=0.1" in repr(linear)


@pytest.mark.parametrize("kind", [PolicyLoss, LinearPolicyLoss])
def test_modules_refuse_when_they_are_made(kind: Any) -> None:
    with pytest.raises(ValueError, match="agg must be one of"):
        kind(agg="mean")
    with pytest.raises(ValueError, match="preset must be one of"):
        kind(preset="nemo")
    kind(agg="constant")  # the constant may come with each call

"""Every entry of the metric vectors against a definition written out with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from muonrl_kernels import LossMetrics, policy_loss
from muonrl_kernels.metrics import EXTREMA, SUMS
from tests.kernels.cases import cast, token_inputs


def test_against_definitions() -> None:
    inputs = token_inputs(7, 11, spread=0.6)
    inputs["rollout_logp"][0, inputs["mask"][0].nonzero()[0]] = -math.inf
    options = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 2.0, "is_high": 1.2, "beta": 0.1}
    loss, metrics = policy_loss(**cast(inputs, torch.float32), **options)
    x = {k: v.numpy() for k, v in inputs.items()}
    valid = x["mask"] & np.isfinite(x["rollout_logp"])
    logp, old, rollout, ref, a, entropy = (
        x[k][valid] for k in ("logp", "old_logp", "rollout_logp", "ref_logp", "advantages", "entropy")
    )
    delta, drift, away = logp - old, old - rollout, ref - logp
    r, raw = np.exp(delta), np.exp(drift)
    w = np.minimum(raw, 1.2)
    expected = {
        "n": len(r),
        "loss": loss.item(),
        "clip_low": ((a < 0) & (r < 0.9)).mean(),
        "clip_high": ((a > 0) & (r > 1.2)).mean(),
        "clip_dual": ((a < 0) & (r > 2.0)).mean(),
        "w_truncated": (raw > 1.2).mean(),
        "mean_w": w.mean(),
        "mean_ratio": r.mean(),
        "ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "entropy": entropy.mean(),
        "abs_delta": np.abs(delta).mean(),
        "dropped": 1,
        "min_ratio": r.min(),
        "max_ratio": r.max(),
    }
    for name, z in (("theta_old", delta), ("old_rollout", drift), ("ref", away)):
        expected[f"k1_{name}"] = -z.mean()
        expected[f"k2_{name}"] = (z**2 / 2).mean()
        expected[f"k3_{name}"] = (np.exp(z) - 1 - z).mean()
    assert all(0 < expected[k] < 1 for k in ("clip_low", "clip_high", "clip_dual", "w_truncated"))
    values = metrics.as_dict()
    assert set(values) == set(expected)
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=2e-5), name


def test_icepop_counts_what_it_masks() -> None:
    old, rollout = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, -2.0, 0.1])
    row = torch.ones(4)
    values = policy_loss(old, old, row, row.bool(), rollout_logp=rollout, is_mode="icepop", is_low=0.5)[
        1
    ].as_dict()
    assert values["w_truncated"] == 0.5
    assert values["mean_w"] == pytest.approx((1 + math.exp(-0.1)) / 4)


def test_the_vectors_are_reducible() -> None:
    inputs = cast(token_inputs(8, 9), torch.float32)
    normalizer = float(inputs["mask"].sum())
    whole = policy_loss(**inputs, normalizer=normalizer)[1].as_dict()
    halves = [
        policy_loss(**{k: v[s] for k, v in inputs.items()}, normalizer=normalizer)[1]
        for s in (slice(0, 5), slice(5, 8))
    ]
    together = (halves[0] + halves[1]).as_dict()
    assert together == pytest.approx(whole, rel=1e-5)
    assert halves[0].sums.shape == (len(SUMS),) and halves[0].extrema.shape == (len(EXTREMA),)
    assert halves[0].sums.dtype == halves[0].extrema.dtype == torch.float32


def test_without_entropy_and_rollout() -> None:
    row = torch.zeros(3)
    values = policy_loss(row, row, row, row.bool() | True)[1].as_dict()
    assert math.isnan(values["entropy"])
    assert (values["mean_w"], values["ess"], values["k3_old_rollout"]) == (1.0, 1.0, 0.0)


def test_nothing_measured() -> None:
    nothing = LossMetrics(torch.zeros(len(SUMS)), torch.full((2,), -math.inf))
    values = nothing.as_dict()
    assert values["min_ratio"] == values["max_ratio"] == 1.0 and values["ess"] == 0.0
    assert all(math.isfinite(v) for v in values.values())

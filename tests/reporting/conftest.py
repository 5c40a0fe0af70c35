"""Made-up records of a run, with every key of the metrics file."""

import math

import numpy as np
import pytest


def _records(updates=24, seed=0, start=0.2, end=0.7):
    rng = np.random.default_rng(seed)
    rows = []
    for update in range(1, updates + 1):
        p = start + (end - start) * update / updates
        rows.append(
            {
                "update": update,
                "success": float(rng.binomial(48, p) / 48),
                "rollouts": 48,
                "entropy": math.exp(-update / 50),
                "loss": float(rng.normal() * 0.01),
                "clip_low": 0.001,
                "clip_high": 0.002,
                "clip_share": 0.003,
                "tis_truncated": 0.0,
                "tis_mean": 1.01,
                "ess": 0.97,
                "k3_theta_old": 0.0,
                "k3_old_rollout": 1e-4,
                "staleness": {"0": 0.25, "1": 0.75},
                "staleness_mean": 0.75,
                "tokens_action": 6000,
                "tokens_total": 30000,
                "tokens_per_s": 3456.7,
                "idle_sampler": 0.125,
                "idle_learner": 0.25,
                "sync_s": 0.05,
                "grade_s": 2.0,
                "gradings": 40,
                "gradings_cached": 8,
                "sandboxes": 96,
                "drops": {"sandbox_died": 1} if update % 8 == 0 else {},
                "groups": {
                    "muon": {"grad_norm": 0.3, "update_rms": 2e-4, "update_spectral": 1e-3, "lr": 1e-3},
                    "adamw": {"grad_norm": 0.1, "update_rms": 3e-4, "update_spectral": 4e-3, "lr": 3e-4},
                },
                "wall_s": 10.0 * update,
                "update_s": 10.0,
                "eta_s": 10.0 * (updates - update),
                "policy": [0, update],
                "rss_mb": 1500.0 + update,
            }
        )
    return rows


@pytest.fixture
def make_records():
    return _records

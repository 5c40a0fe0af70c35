"""Flattening and padding: every token is there once, and only sampled tokens carry weight."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl.training.batch import Rollout, flatten, micro_batches
from muonrl.trajectory import PolicyId
from tests.training.cases import rollouts, trajectory


def test_flatten_by_hand():
    flat = flatten(trajectory(replies=[(5, 6), (7,)], policy=PolicyId(0, 3)), [0.5, -2.0])
    assert flat.tokens.tolist() == [2, 3, 5, 6, 2, 3, 7]
    assert flat.action.tolist() == [False, False, True, True, False, False, True]
    assert flat.advantage.tolist() == [0, 0, 0.5, 0.5, 0, 0, -2.0]
    np.testing.assert_allclose(flat.logp, [0, 0, -1.05, -1.06, 0, 0, -1.07], rtol=1e-6)
    assert (flat.tokens.dtype, flat.logp.dtype, flat.advantage.dtype) == (np.int64, np.float32, np.float32)


def test_one_advantage_a_turn():
    with pytest.raises(ValueError, match="received 1 for 2 turns"):
        flatten(trajectory(), [0.5])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 40), min_size=1, max_size=12),
    budget=st.integers(1, 200),
    seed=st.integers(0, 5),
)
def test_every_action_token_is_in_exactly_one_micro_batch(lengths, budget, seed):
    given_rollouts = rollouts(lengths, seed)
    batches = list(micro_batches(given_rollouts, budget))
    assert sorted(i for b in batches for i in b.index) == list(range(len(lengths)))
    for batch in batches:
        rows, width = batch.input_ids.shape
        assert rows == 1 or rows * (width + 1) <= budget
        for row, i in enumerate(batch.index):
            _check_row(batch, row, given_rollouts[i])


def _check_row(batch, row: int, rollout: Rollout) -> None:
    n = len(rollout)
    whole = torch.cat([batch.input_ids[row, :1], batch.targets[row]])
    assert whole[:n].tolist() == rollout.tokens.tolist()
    # Position t predicts token t + 1.
    assert batch.input_ids[row, 1:].tolist() == batch.targets[row, :-1].tolist()
    assert batch.mask[row].tolist() == rollout.action[1:].tolist() + [False] * (batch.mask.shape[1] - n + 1)
    for name, field in (("rollout_logp", "logp"), ("advantages", "advantage")):
        values = getattr(batch, name)[row]
        assert values[: n - 1].tolist() == getattr(rollout, field)[1:].tolist()
        assert not values[n - 1 :].any()


def test_rollouts_of_similar_length_share_a_micro_batch():
    batches = list(micro_batches(rollouts([30, 5, 29, 6]), max_tokens=60))
    assert [b.index for b in batches] == [(1, 3), (2, 0)]

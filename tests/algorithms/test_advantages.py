"""Normalised advantages against hand-computed numbers and their invariant."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl.algorithms import advantages
from muonrl.algorithms.advantages import compute_advantages

quick = settings(max_examples=60, deadline=None, derandomize=True)


def test_action_token_by_hand():
    # A = 0.5 on 2 tokens, 0.25 on 1, -0.5 on 3: mu = -0.25 / 6; sum L (A - mu)^2 = 1.3125 - 0.0625 / 6.
    result = compute_advantages([1, 0], [0.5, 0.5], [[0, -0.25], [0]], [[2, 1], [3]])
    mu, sigma = -0.25 / 6, math.sqrt((1.3125 - 0.0625 / 6) / 5)
    assert result.mu == pytest.approx(mu)
    assert result.sigma == pytest.approx(sigma)
    np.testing.assert_allclose(result.raw[0], [0.5, 0.25])
    np.testing.assert_allclose(result.turns[0], [(0.5 - mu) / (sigma + 1e-8), (0.25 - mu) / (sigma + 1e-8)])
    np.testing.assert_allclose(result.turns[1], [(-0.5 - mu) / (sigma + 1e-8)])
    assert abs(result.weighted_mean) < 1e-12


def test_trajectory_by_hand():
    # One scalar each: (2 * 0.5 + 1 * 0.2) / 3 = 0.4 and -0.5; mean -0.05, sd (n - 1) = 0.9 / sqrt 2.
    result = compute_advantages([1, 0], [0.5, 0.5], [[0, -0.3], [0]], [[2, 1], [3]], "trajectory")
    sigma = 0.9 / math.sqrt(2)
    assert (result.mu, result.sigma) == (pytest.approx(-0.05), pytest.approx(sigma))
    np.testing.assert_allclose(result.turns[0], [0.45 / (sigma + 1e-8)] * 2)
    np.testing.assert_allclose(result.turns[1], [-0.45 / (sigma + 1e-8)])


def test_the_two_normalisations_weigh_a_long_trajectory_differently():
    args = ([1, 0], [0.5, 0.5], [[0], [0]], [[90], [10]])
    by_token, by_trajectory = compute_advantages(*args), compute_advantages(*args, "trajectory")
    assert by_token.turns[0][0] == pytest.approx(0.1 / by_token.sigma)
    assert by_trajectory.turns[0][0] == pytest.approx(1 / math.sqrt(2))
    assert by_trajectory.weighted_mean == pytest.approx(0.8 / math.sqrt(2))


@st.composite
def updates(draw):
    n = draw(st.integers(1, 12))
    turns = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    rewards = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    values = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    penalties = [draw(st.lists(st.floats(-0.25, 0), min_size=k, max_size=k)) for k in turns]
    lengths = [draw(st.lists(st.integers(1, 4000), min_size=k, max_size=k)) for k in turns]
    return rewards, values, penalties, lengths


@quick
@given(update=updates())
def test_weighted_mean_is_zero_and_variance_one(update):
    result = compute_advantages(*update)
    weight, a = np.concatenate(update[3]), np.concatenate(result.turns)
    assert result.weighted_mean == pytest.approx((weight * a).sum() / weight.sum(), abs=1e-12)
    assert abs(result.weighted_mean) < 1e-6
    if result.sigma > 1e-3:
        assert (weight * a**2).sum() / max(weight.sum() - 1, 1) == pytest.approx(1.0, rel=1e-4)


@quick
@given(update=updates())
def test_action_token_equals_plain_statistics_over_tokens(update):
    rewards, values, penalties, lengths = update
    rows = zip(rewards, values, penalties, lengths, strict=True)
    tokens = np.concatenate([np.repeat(r - v + np.array(c), n) for r, v, c, n in rows])
    result = compute_advantages(*update)
    assert result.mu == pytest.approx(tokens.mean(), abs=1e-9)
    if tokens.size > 1:
        assert result.sigma == pytest.approx(tokens.std(ddof=1), rel=1e-6, abs=1e-9)


@quick
@given(update=updates())
def test_trajectory_mean_is_zero(update):
    result = compute_advantages(*update, "trajectory")
    assert abs(np.mean([t[0] for t in result.turns])) < 1e-6
    assert all(np.ptp(t) == 0 for t in result.turns)


@pytest.mark.parametrize("normalization", ["action_token", "trajectory"])
def test_equal_outcomes_and_a_lone_trajectory_give_no_signal(normalization):
    same = compute_advantages([1, 1], [0.3, 0.3], [[0], [0]], [[5], [7]], normalization)
    alone = compute_advantages([1], [0.3], [[0]], [[1]], normalization)
    for result in (same, alone):
        assert all(np.abs(t).max() < 1e-6 for t in result.turns)


def test_a_turn_without_action_tokens_has_no_weight():
    with_empty = compute_advantages([1, 0], [0.5, 0.5], [[0, -0.25], [0]], [[4, 0], [4]])
    assert (with_empty.mu, with_empty.raw[0][1]) == (0.0, 0.25)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (([], [], [], []), "0 rewards"),
        (([1], [0.5, 0.5], [[0]], [[1]]), "1 rewards, 2 values"),
        (([1], [0.5], [[0, 0]], [[1]]), "trajectory 0 has 2 penalties for 1 turns"),
        (([1], [math.nan], [[0]], [[1]]), "trajectory 0: advantages"),
        (([1], [0.5], [[0]], [[0]]), "trajectory 0: advantages"),
    ],
)
def test_input_that_does_not_fit_is_refused(args, text):
    with pytest.raises(ValueError, match=text):
        compute_advantages(*args)


def test_the_invariant_is_asserted(monkeypatch):
    monkeypatch.setattr(advantages, "_moments", lambda a, weight: (0.0, 1.0))
    with pytest.raises(FloatingPointError, match="expected 0"):
        compute_advantages([1, 1], [0.5, 0.5], [[0], [0]], [[1], [1]])


def test_quantiles():
    result = compute_advantages([1, 0], [0.5, 0.5], [[0], [0]], [[4], [4]])
    top = result.turns[0][0]
    assert result.quantiles() == pytest.approx([-top, -top / 2, 0.0, top / 2, top])

"""The moving average: span 5, from the first observation."""

import pytest

from muonrl.algorithms.ema import ema, ema_step


def test_by_hand():
    # With span 5 the new value weighs one third.
    assert ema([0.3, 0.6, 0.0]) == pytest.approx([0.3, 0.4, 0.8 / 3])
    assert ema([1.0, 0.0], span=1) == [1.0, 0.0]
    assert ema([]) == []
    assert ema_step(None, 1) == 1.0

"""The penalties against the paper's figures."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonrl.algorithms.shaping import TurnPenalty, length_penalty, tool_penalty, turn_penalties
from muonrl.config import AlgorithmConfig
from muonrl.trajectory import TOOL_ERROR_KINDS, Kind, PolicyId, Segment, ToolError, Turn

CFG = AlgorithmConfig()  # threshold 2048, strengths 0.5, clip 0.25


def turn(n, *kinds):
    observed = Segment(np.zeros(7, np.int32), np.zeros(7, np.float32), Kind.OBSERVATION)
    acted = Segment(np.zeros(n, np.int32), np.zeros(n, np.float32), Kind.ACTION, PolicyId(0, 0))
    return Turn((observed, acted), tuple(ToolError(k) for k in kinds))


@pytest.mark.parametrize(
    ("n", "shape", "expected"),
    [
        (2048, "linear", 0.0),
        (2049, "linear", -0.5 / 6144),
        (2048 + 3072, "linear", -0.25),
        (8192, "linear", -0.5),
        (9000, "linear", -0.5),
        (2048, "step", 0.0),
        (2049, "step", -0.5),
    ],
)
def test_length_penalty(n, shape, expected):
    cfg = replace(CFG, length_shape=shape)
    assert length_penalty(n, False, 8192, cfg) == pytest.approx(expected)
    assert length_penalty(n, True, 8192, cfg) == 0.0
    assert length_penalty(n, False, 8192, replace(cfg, length_penalty=False)) == 0.0


def test_length_penalty_without_room_above_the_threshold_is_the_extreme():
    assert length_penalty(2049, False, 2048, CFG) == -0.5
    assert length_penalty(64, False, 64, CFG) == 0.0


@pytest.mark.parametrize("kind", TOOL_ERROR_KINDS)
def test_tool_penalty(kind):
    assert tool_penalty([ToolError(kind)], CFG) == -0.5
    assert tool_penalty([ToolError(kind)] * 3, CFG) == -0.5
    protocol = tool_penalty([ToolError(kind)], replace(CFG, tool_error="protocol_only"))
    assert protocol == (0.0 if kind == "exit_code" else -0.5)
    assert tool_penalty([ToolError(kind)], replace(CFG, tool_penalty=False)) == 0.0


def test_protocol_only_still_sees_the_other_error_of_the_turn():
    errors = [ToolError("exit_code"), ToolError("not_found")]
    assert tool_penalty(errors, replace(CFG, tool_error="protocol_only")) == -0.5
    assert tool_penalty([], CFG) == 0.0


def test_turns_by_hand():
    turns = [turn(10), turn(56), turn(64, "invalid_action"), turn(40, "exit_code"), turn(64)]
    cfg = replace(CFG, length_threshold=48, penalty_clip=0.6)
    assert turn_penalties(turns, 64, cfg) == (
        TurnPenalty(0.0, 0.0, 0.0),
        TurnPenalty(-0.25, 0.0, -0.25),
        TurnPenalty(-0.5, -0.5, -0.6),
        TurnPenalty(0.0, -0.5, -0.5),
        TurnPenalty(0.0, 0.0, 0.0),  # the last turn is exempt from the length penalty
    )


def test_one_tool_error_already_saturates_the_clip():
    long_too = turn_penalties([turn(4096, "timeout"), turn(1)], 4096, CFG)[0]
    short = turn_penalties([turn(1, "timeout"), turn(1)], 4096, CFG)[0]
    assert short.c == long_too.c == -0.25
    assert (short.c_len, long_too.c_len) == (0.0, -0.5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    failed=st.integers(0, 63),
    shape=st.sampled_from(["linear", "step"]),
    clip=st.floats(0, 2),
)
def test_penalties_are_bounded_and_never_positive(lengths, failed, shape, clip):
    cfg = replace(CFG, length_shape=shape, penalty_clip=clip)
    turns = [turn(n, *(["not_found"] if failed >> k & 1 else [])) for k, n in enumerate(lengths)]
    for k, p in enumerate(turn_penalties(turns, 4096, cfg)):
        assert -0.5 <= p.c_len <= 0 and p.c_tool == (-0.5 if failed >> k & 1 else 0.0)
        assert p.c == max(-clip, p.c_len + p.c_tool) <= 0

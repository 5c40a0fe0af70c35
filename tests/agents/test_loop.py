"""Episodes with scripted replies on real tools: how they end, and which mistakes are whose."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from muonrl.agents import guest_tools
from muonrl.agents.actions import Action
from muonrl.agents.loop import run_episode
from muonrl.config import AgentConfig
from muonrl.errors import InfrastructureError
from muonrl.policy.tokenizer import ChatFormat
from muonrl.sandbox import ProcessProvider
from muonrl.sandbox.protocol import ExecResult
from muonrl.trajectory import Kind, PolicyId, Segment
from tests.policy.cases import small_tokenizer

CHAT = ChatFormat(small_tokenizer())
FILES = {"pkg/mod.py": b"def clamp(x):\n    return x + 1\n\n\ndef other(x):\n    return x + 1\n"}
STATEMENT = "clamp(1) returned 2, expected 1"
ROOM = 100_000

VIEW = Action("file_editor", {"command": "view", "path": "pkg/mod.py"}).text()
FINISH = Action("finish", {"command": "submit"}).text()


def bash(command):
    return Action("execute_bash", {"cmd": command}).text()


def replace(old, new):
    parameters = {"command": "str_replace", "path": "pkg/mod.py", "old_str": old, "new_str": new}
    return Action("file_editor", parameters).text()


class Script:
    """A reply source that says what it was told to; a reply given as a tuple is cut off."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.context: list[int] = []
        self.fed: list[list[int]] = []
        self.asked: list[tuple[int, int]] = []

    @property
    def context_tokens(self):
        return len(self.context)

    async def generate(self, tokens, *, max_new_tokens, seed):
        reply = self.replies[len(self.fed)]
        said = CHAT.encode(reply[0]) if isinstance(reply, tuple) else [*CHAT.encode(reply), CHAT.end_id]
        self.fed.append(list(tokens))
        self.asked.append((max_new_tokens, seed))
        self.context += [*tokens, *said]
        half = len(said) // 2
        # As from a sampler whose weights changed within the reply.
        return [
            Segment(np.array(part, np.int32), np.full(len(part), -0.5, np.float32), Kind.ACTION, policy)
            for part, policy in ((said[:half], PolicyId(0, 1)), (said[half:], PolicyId(0, 2)))
            if part
        ]


class Answering:
    """A sandbox whose every call ends in the same way."""

    def __init__(self, result):
        self.result, self.payloads = result, []

    async def call(self, script, payload, *, timeout=30.0, max_bytes=1_000_000):
        self.payloads.append((script, json.loads(payload), timeout))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def result(stdout=b"", *, rc=0, timed_out=False):
    return ExecResult(stdout, b"why", rc, timed_out, False)


def answer(text="fine", error=None, done=False):
    return result(json.dumps({"text": text, "error": error, "done": done}).encode())


def play(source, sandbox=None, *, room=ROOM, timeout=10.0, **config):
    """An episode, in ``sandbox`` or in a new folder -> (episode, files afterwards)."""

    async def inside(box):
        return await run_episode(
            source,
            box,
            CHAT,
            STATEMENT,
            AgentConfig(**{"max_new_tokens": 64} | config),
            max_context=room,
            tool_timeout=timeout,
            seed_of=lambda turn: 1000 + turn,
        )

    async def main():
        if sandbox is not None:
            return await inside(sandbox), {}
        provider = ProcessProvider({"tools": Path(guest_tools.__file__)}, allow_unsandboxed=True)
        try:
            box = await provider.acquire()
            await box.put(FILES)
            return await inside(box), await box.snapshot()
        finally:
            await provider.close()

    return asyncio.run(main())


def kinds(episode):
    return [[error.kind for error in turn.tool_errors] for turn in episode.turns]


def seen(source, number):
    """The text that the policy read before reply ``number``."""
    return CHAT.tokenizer.decode(source.fed[number], skip_special_tokens=False)


# --- an episode -------------------------------------------------------------------------------------------------------


def test_an_episode_acts_and_finishes():
    source = Script(
        VIEW, "So: " + replace("def clamp(x):\n    return x + 1", "def clamp(x):\n    return x"), FINISH, VIEW
    )
    episode, files = play(source)
    assert episode.stop == "finish" and kinds(episode) == [[], [], []]
    assert files["pkg/mod.py"] == FILES["pkg/mod.py"].replace(b"return x + 1", b"return x", 1)
    assert seen(source, 0) == f"<|user|>{STATEMENT}<|end|><|assistant|>"
    assert seen(source, 1).startswith("<|tool|>1 def clamp(x):\n2     return x + 1\n")
    assert seen(source, 2) == "<|tool|>edited pkg/mod.py<|end|><|assistant|>"
    assert source.asked == [(64, 1000), (64, 1001), (64, 1002)]
    assert episode.tool_seconds > 0


def test_the_turns_hold_every_token_once():
    source = Script(VIEW, "nothing", FINISH)
    episode, _ = play(source)
    segments = [s for turn in episode.turns for s in turn.segments]
    assert np.concatenate([s.tokens for s in segments]).tolist() == source.context
    assert [s.kind for s in segments] == [
        *(Kind.TEMPLATE, Kind.ACTION, Kind.ACTION),
        *(Kind.OBSERVATION, Kind.ACTION, Kind.ACTION),
        *(Kind.OBSERVATION, Kind.ACTION, Kind.ACTION),
    ]
    for segment in segments:
        assert (segment.logp == (-0.5 if segment.kind is Kind.ACTION else 0.0)).all()
    assert [s.policy for s in segments[:3]] == [None, PolicyId(0, 1), PolicyId(0, 2)]
    assert episode.turns[0].n_action == len(CHAT.encode(VIEW)) + 1


def test_the_turn_limit_ends_an_episode():
    source = Script(*["hm"] * 9)
    episode, _ = play(source, Answering(answer()), max_turns=3)
    assert episode.stop == "max_turns" and len(episode.turns) == 3 == len(source.fed)


def test_an_episode_stops_where_a_reply_might_not_fit():
    opening = len(CHAT.prompt(STATEMENT))
    reply = len(CHAT.encode(VIEW)) + 1
    second = opening + reply + len(CHAT.observation("fine"))
    for room, turns in ((opening + 63, 0), (opening + 64, 1), (second + 63, 1), (second + 64, 2)):
        episode, _ = play(Script(VIEW, FINISH), Answering(answer(done=False)), room=room, max_turns=2)
        assert len(episode.turns) == turns
        assert episode.stop == ("max_turns" if turns == 2 else "context")


def test_a_reply_that_was_cut_off_is_closed_for_the_next_turn():
    source = Script(("<function=search><parameter=sea",), FINISH)
    episode, _ = play(source)
    assert [turn.truncated for turn in episode.turns] == [True, False]
    assert kinds(episode)[0] == ["invalid_action"]
    assert seen(source, 1).startswith("<|end|><|tool|>error: ")
    assert episode.stop == "finish"


def test_a_whole_call_counts_even_if_its_end_token_is_missing():
    source = Script((VIEW,), FINISH)
    episode, _ = play(source)
    assert episode.turns[0].truncated and kinds(episode)[0] == []
    assert seen(source, 1).startswith("<|end|><|tool|>1 def clamp")


def test_the_tools_get_their_limits():
    box = Answering(answer())
    play(Script(VIEW), box, timeout=3.0, max_turns=1, view_lines=7, max_observation_chars=99)
    ((script, payload, deadline),) = box.payloads
    assert script == "tools" and deadline > 3.0
    assert payload == {
        "name": "file_editor",
        "parameters": {"command": "view", "path": "pkg/mod.py"},
        "options": {"view_lines": 7, "max_chars": 99, "timeout": 3.0},
    }


def test_role_marks_in_an_observation_stay_text():
    source = Script(bash("echo '<|end|><|assistant|>'"), FINISH)
    play(source)
    assert source.fed[1].count(CHAT.end_id) == 1
    assert "<|end|><|assistant|><|end|><|assistant|>" in seen(source, 1)


# --- mistakes of the policy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        ("no call", "invalid_action", "error: expected one <function=NAME>...</function>, found 0"),
        ("", "invalid_action", "error: expected one <function=NAME>...</function>, found 0"),
        ("<function=rm></function>", "invalid_action", "error: unknown tool 'rm'"),
        (replace("return y", "x"), "not_found", "error: old_str is not in pkg/mod.py"),
        (replace("return x + 1", "x"), "ambiguous", "error: old_str is 2 times in pkg/mod.py"),
        (bash("echo a; exit 3"), "exit_code", "a\n[exit code 3]"),
        (bash("kill -9 $PPID"), "exit_code", "error: execute_bash was ended by its own command"),
        (bash("kill -TERM $PPID; sleep 5"), "exit_code", "error: execute_bash was ended by its own command"),
        (bash("kill -9 $$"), "exit_code", "[exit code -9]"),
    ],
)
def test_a_mistake_is_an_error_that_the_policy_reads(reply, kind, text):
    source = Script(reply, FINISH)
    episode, files = play(source)
    assert kinds(episode) == [[kind], []] and episode.turns[0].tool_errors[0].detail
    assert seen(source, 1).startswith(f"<|tool|>{text}")
    assert not any(turn.truncated for turn in episode.turns)
    assert episode.stop == "finish" and files == FILES


def test_a_command_without_end_times_out():
    source = Script(bash("echo begun; sleep 60"), FINISH)
    episode, _ = play(source, timeout=0.3)
    assert kinds(episode) == [["timeout"], []] and episode.stop == "finish"
    assert seen(source, 1) == "<|tool|>begun\n[timed out after 0.3 s]<|end|><|assistant|>"
    assert 0.3 <= episode.tool_seconds < 5


def test_a_tool_that_was_stopped_from_outside_times_out():
    source = Script(bash("kill -STOP $PPID"), FINISH)
    episode, _ = play(source, Answering(result(rc=137, timed_out=True)), timeout=2.0, max_turns=2)
    assert kinds(episode)[0] == ["timeout"]
    assert "execute_bash did not end within 2 s" in seen(source, 1)


def test_a_wrong_finish_does_not_end_the_episode():
    wrong = Action("finish", {"command": "give up"}).text()
    episode, _ = play(Script(wrong, FINISH))
    assert kinds(episode) == [["invalid_action"], []] and episode.stop == "finish"


# --- faults of the machine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        result(b""),
        result(b"Segmentation fault", rc=139),
        result(b"null"),
        result(b"[]"),
        result(b'"text"'),
        result(b"{}"),
        result(b'{"text": "", "error": null}'),
        result(b'{"text": "", "error": "bad", "done": false}'),
        result(b'{"text": "", "error": {"kind": "exit_code"}, "done": false}'),
        result(b'{"text": "", "error": {"kind": "odd", "detail": ""}, "done": false}'),
        result(b'{"text": "", "error": {"kind": ["exit_code"], "detail": ""}, "done": false}'),
        result(b"\xff\xfe{"),
        result(b"[" * 200_000),
    ],
    ids=lambda r: repr(r.stdout[:60]),
)
def test_an_answer_outside_the_protocol_is_a_fault(outcome):
    with pytest.raises(InfrastructureError) as caught:
        play(Script(VIEW), Answering(outcome))
    assert caught.value.reason == "tool_protocol"


def test_a_fault_of_the_sandbox_passes_through():
    with pytest.raises(InfrastructureError, match="sandbox_died"):
        play(Script(VIEW), Answering(InfrastructureError("sandbox_died")))


def test_half_a_surrogate_pair_is_replaced():
    source = Script(VIEW, FINISH)
    play(source, Answering(answer("a\ud800b")), max_turns=2)
    assert seen(source, 1) == "<|tool|>a?b<|end|><|assistant|>"

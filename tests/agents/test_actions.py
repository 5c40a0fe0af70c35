"""The text form of an action: what parses, what is refused and why."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muonrl.agents import guest_tools
from muonrl.agents.actions import TOOLS, Action, parse_action
from muonrl.trajectory import ToolError

quick = settings(max_examples=150, deadline=None, derandomize=True)

TAGS = ["</function>", "</parameter>", "<function=", "<parameter=", ">", "<", "="]
TAGS += [f"<function={name}>" for name in (*TOOLS, "rm")]
TAGS += [f"<parameter={key}>" for key in ("cmd", "path", "command", "x")]
MESS = st.lists(st.sampled_from(TAGS) | st.text(max_size=6), max_size=10).map("".join)
VALUE = MESS.filter(lambda v: "</parameter>" not in v and "</function>" not in v)


@st.composite
def actions(draw):
    name = draw(st.sampled_from(sorted(TOOLS)))
    keys = draw(st.lists(st.sampled_from(sorted(TOOLS[name])), unique=True))
    return Action(name, {key: draw(VALUE) for key in keys})


@quick
@given(MESS)
@example("")
@example("<function=search></function><function=search></function>")
@example("<function=\n></function>")
def test_any_reply_is_an_action_or_an_error(reply):
    parsed = parse_action(reply)
    if isinstance(parsed, ToolError):
        assert parsed.kind == "invalid_action" and parsed.detail
    else:
        assert set(parsed.parameters) <= set(TOOLS[parsed.name])
        assert f"<function={parsed.name}>" in reply and reply.rstrip().endswith("</function>")


@quick
@given(
    actions(), st.text(st.characters(exclude_characters="<"), max_size=10), st.sampled_from(["", "\n", "  "])
)
@example(Action("execute_bash", {"cmd": "x</parameter"}), "", "")
@example(Action("file_editor", {"old_str": "\n  a\n", "new_str": ""}), "thought", "\n")
def test_an_action_comes_back_from_its_text(action, before, after):
    assert parse_action(before + action.text() + after) == action


def test_the_text_form():
    action = Action("file_editor", {"command": "view", "path": "a b.py"})
    assert action.text() == (
        "<function=file_editor><parameter=command>view</parameter><parameter=path>a b.py</parameter></function>"
    )
    assert parse_action("<function=finish></function>") == Action("finish", {})


def test_values_are_verbatim():
    text = "<function=execute_bash><parameter=cmd>\n echo 'a > b' \n\n</parameter></function>"
    assert parse_action(text) == Action("execute_bash", {"cmd": "\n echo 'a > b' \n\n"})


def test_white_space_between_the_tags_is_allowed():
    text = "<function=search>\n  <parameter=search_term>x</parameter>\n <parameter=path>.</parameter>\n</function>\n"
    assert parse_action(text) == Action("search", {"search_term": "x", "path": "."})


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ("", "found 0"),
        ("I am done.", "found 0"),
        ("<function=finish>", "found 0"),
        ("<function=finish></function><function=finish></function>", "found 2"),
        ("<function=finish></function> bye", "text after </function>"),
        ("<function=rm></function>", "unknown tool 'rm'; tools: file_editor"),
        ("<function=></function>", "unknown tool ''"),
        (
            "<function=finish><parameter=path>x</parameter></function>",
            "finish has no parameter 'path'",
        ),
        (
            "<function=execute_bash><parameter=cmd>a</parameter><parameter=cmd>b</parameter></function>",
            "'cmd' given twice",
        ),
        ("<function=execute_bash>ls</function>", "text between parameters"),
        ("<function=execute_bash><parameter=cmd>ls</function>", "text between parameters"),
        ("<function=execute_bash>a<parameter=cmd>ls</parameter></function>", "text between parameters"),
        ("<function=execute_bash><parameter=cmd>ls</parameter>b</function>", "text between parameters"),
    ],
)
def test_what_is_wrong_is_said(reply, detail):
    error = parse_action(reply)
    assert isinstance(error, ToolError) and error.kind == "invalid_action"
    assert detail in error.detail


@pytest.mark.parametrize(
    "form", ["<function={}></function>", "<function=finish><parameter={}>1</parameter></function>"]
)
def test_a_long_name_is_not_repeated_in_full(form):
    error = parse_action(form.format("x" * 5000))
    assert isinstance(error, ToolError) and len(error.detail) < 150


def test_the_sandbox_has_the_same_tools():
    assert set(guest_tools._TOOLS) == set(TOOLS)

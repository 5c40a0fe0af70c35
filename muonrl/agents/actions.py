"""The text form of an action, and its parser.

``<function=NAME><parameter=K>V</parameter>...</function>``, exactly one a reply (R2E-Gym's format). Text before the call
is allowed (thoughts); anything after it is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from muonrl.policy.tokenizer import TOOLS
from muonrl.trajectory import ToolError

_CALL = re.compile(r"<function=([^<>\n]*)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>(.*?)</parameter>", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """A well-formed tool call."""

    name: str
    parameters: dict[str, str]

    def text(self) -> str:
        body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in self.parameters.items())
        return f"<function={self.name}>{body}</function>"


def parse_action(reply: str) -> Action | ToolError:
    """The action in a reply, or an ``invalid_action`` error that says what is wrong with it."""
    calls = list(_CALL.finditer(reply))
    if len(calls) != 1:
        return _invalid(f"expected one <function=NAME>...</function>, found {len(calls)}")
    call = calls[0]
    if reply[call.end() :].strip():
        return _invalid("text after </function>")
    name, body = call.group(1), call.group(2)
    if name not in TOOLS:
        return _invalid(f"unknown tool {name[:40]!r}; tools: {', '.join(TOOLS)}")
    parameters: dict[str, str] = {}
    at = 0
    for match in _PARAMETER.finditer(body):
        key = match.group(1)
        if body[at : match.start()].strip():
            return _invalid("text between parameters")
        if key not in TOOLS[name]:
            return _invalid(f"{name} has no parameter {key[:40]!r}")
        if key in parameters:
            return _invalid(f"parameter {key!r} given twice")
        parameters[key] = match.group(2)
        at = match.end()
    if body[at:].strip():
        return _invalid("text between parameters")
    return Action(name, parameters)


def _invalid(detail: str) -> ToolError:
    return ToolError("invalid_action", detail)

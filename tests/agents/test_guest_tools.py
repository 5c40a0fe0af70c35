"""The four tools on a plain folder, and once through a sandbox."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muonrl.agents import guest_tools
from muonrl.sandbox import BubblewrapProvider, guest_scripts
from muonrl.trajectory import TOOL_ERROR_KINDS

CORE = "def clamp(x, lo, hi):\n    if x < lo:\n        return lo\n    return min(x, hi)\n\n\ndef twice(x):\n    return x + x\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    top = tmp_path / "work"
    (top / "pkg").mkdir(parents=True)
    (top / "pkg" / "core.py").write_text(CORE)
    (top / "pkg" / "__init__.py").write_text("")
    (top / "README.md").write_text("call clamp(1, 2, 3)\n")
    (top / ".hidden").write_text("clamp")
    (top / "pkg" / "data.bin").write_bytes(b"clamp\0")
    return top


@pytest.fixture
def use(root: Path) -> Callable[..., tuple[str, str | None]]:
    """``use(tool, **parameters)`` -> (text, kind of error or None)."""

    def call(name: str, options: dict[str, Any] | None = None, **parameters: str) -> tuple[str, str | None]:
        answer = guest_tools.run(name, parameters, options, root)
        assert set(answer) == {"text", "error", "done"}
        json.dumps(answer)
        error = answer["error"]
        assert error is None or (error["kind"] in TOOL_ERROR_KINDS and error["detail"])
        assert answer["done"] == (name == "finish" and error is None)
        return answer["text"], error and error["kind"]

    return call


Use = Callable[..., tuple[str, str | None]]


def test_kinds_are_those_of_the_trainer() -> None:
    assert guest_tools.ERROR_KINDS == TOOL_ERROR_KINDS


def test_search(use: Use, root: Path) -> None:
    assert use("search", search_term="clamp") == (
        "README.md:1: call clamp(1, 2, 3)\npkg/core.py:1: def clamp(x, lo, hi):",
        None,
    )
    assert use("search", search_term="return lo", path="pkg") == ("pkg/core.py:3: return lo", None)
    assert use("search", search_term="twice", path="/work/pkg/core.py") == (
        "pkg/core.py:7: def twice(x):",
        None,
    )
    assert use("search", search_term="nowhere") == ("error: no hit for nowhere", "not_found")
    assert use("search", search_term="x", path="absent")[1] == "not_found"
    assert use("search", search_term=" ")[1] == "invalid_action"
    assert use("search")[1] == "invalid_action"
    assert use("search", search_term="c.amp")[1] == "not_found", "a plain substring, no pattern"
    (root / "many.txt").write_text("needle\n" * 11)
    lines = use("search", search_term="needle")[0].splitlines()
    assert len(lines) == 9 and lines[7] == "many.txt:8: needle" and lines[8] == "... 3 more"


def test_view(use: Use) -> None:
    def view(**parameters: str) -> tuple[str, str | None]:
        return use("file_editor", command="view", **parameters)

    text, error = view(path="pkg/core.py")
    assert (
        error is None and text.splitlines()[0] == "1 def clamp(x, lo, hi):" and text.splitlines()[4] == "5 "
    )
    assert view(path="pkg/core.py", view_range="7 8") == ("7 def twice(x):\n8     return x + x", None)
    assert view(path="/work/pkg/core.py", view_range="[7, -1]") == view(path="pkg/core.py", view_range="7 8")
    assert view(path="pkg/core.py", view_range="8 99") == ("8     return x + x", None)
    for wrong in ("0 3", "9 9", "5 2", "a b", "3", "", "-1 3", "1 2 3"):
        assert view(path="pkg/core.py", view_range=wrong)[1] == "invalid_action", wrong
    assert view(path=".")[0] == "README.md\npkg/"
    assert view(path="")[0] == "README.md\npkg/"
    assert view(path="pkg/none.py") == ("error: no such file pkg/none.py", "not_found")
    assert view()[1] == "invalid_action"
    text, _ = use("file_editor", {"view_lines": 3}, command="view", path="pkg/core.py")
    assert text.splitlines()[2:] == ["3         return lo", "... 5 more lines"]


def test_str_replace(use: Use, root: Path) -> None:
    def replace(**parameters: str) -> tuple[str, str | None]:
        return use("file_editor", command="str_replace", path="pkg/core.py", **parameters)

    assert replace(old_str="x < lo", new_str="x <= lo") == ("edited pkg/core.py", None)
    assert (root / "pkg/core.py").read_text() == CORE.replace("x < lo", "x <= lo")
    assert replace(old_str="absent", new_str="y") == ("error: old_str is not in pkg/core.py", "not_found")
    assert replace(old_str="return", new_str="y") == ("error: old_str is 3 times in pkg/core.py", "ambiguous")
    assert replace(old_str="", new_str="y")[1] == "invalid_action"
    assert replace(new_str="y")[1] == "invalid_action"
    assert replace(old_str="        return lo\n")[1] is None, "without new_str the text is deleted"
    assert "return lo" not in (root / "pkg/core.py").read_text()
    assert use("file_editor", command="str_replace", path="absent.py", old_str="a")[1] == "not_found"


def test_bytes_that_are_no_text_survive_an_edit(use: Use, root: Path) -> None:
    (root / "latin.py").write_bytes(b"# caf\xe9\r\nx = 1\r\n")
    assert (
        use("file_editor", command="str_replace", path="latin.py", old_str="x = 1", new_str="x = 2")[1]
        is None
    )
    assert (root / "latin.py").read_bytes() == b"# caf\xe9\r\nx = 2\r\n"
    assert use("file_editor", command="view", path="latin.py") == ("1 # caf\ufffd\n2 x = 2", None)


def test_create_insert_and_undo(use: Use, root: Path) -> None:
    assert use("file_editor", command="create", path="new/mod.py", file_text="a\nb") == (
        "created new/mod.py",
        None,
    )
    assert use("file_editor", command="create", path="new/mod.py", file_text="")[1] == "invalid_action"
    for line, text, expected in (("0", "top", "top\na\nb"), ("3", "end\n", "top\na\nb\nend\n")):
        answer = use("file_editor", command="insert", path="new/mod.py", insert_line=line, new_str=text)
        assert answer == ("edited new/mod.py", None)
        assert (root / "new/mod.py").read_text() == expected
    for line in ("5", "-1", "x"):
        assert (
            use("file_editor", command="insert", path="new/mod.py", insert_line=line, new_str="")[1]
            == "invalid_action"
        )
    undo = {"command": "undo_edit", "path": "new/mod.py"}
    for expected in ("top\na\nb", "a\nb"):
        assert use("file_editor", **undo) == ("reverted new/mod.py", None)
        assert (root / "new/mod.py").read_text() == expected
    assert use("file_editor", **undo)[1] is None
    assert not (root / "new/mod.py").exists()
    assert use("file_editor", **undo)[1] == "not_found"
    assert use("file_editor", command="undo_edit", path="README.md")[1] == "not_found"


def test_nothing_outside_is_reached(use: Use, root: Path) -> None:
    (root.parent / "secret").write_text("clamp secret")
    (root / "out").symlink_to(root.parent)
    (root / "loop").symlink_to("loop")
    for path in ("../secret", "/etc/passwd", "out/secret", "pkg/../../secret", "loop", "a\0b"):
        assert use("file_editor", command="view", path=path)[1] == "not_found", path
        assert use("file_editor", command="create", path=path, file_text="x")[1] == "not_found", path
        assert use("search", search_term="secret", path=path)[1] == "not_found", path
    assert use("search", search_term="clamp secret")[1] == "not_found"
    assert (root.parent / "secret").read_text() == "clamp secret"


def test_execute_bash(use: Use) -> None:
    assert use("execute_bash", cmd="echo out; echo err >&2") == ("out\nerr", None)
    assert use("execute_bash", cmd="ls") == ("README.md\npkg", None)
    assert use("execute_bash", cmd="echo no; exit 3") == ("no\n[exit code 3]", "exit_code")
    assert use("execute_bash", cmd="exit 4") == ("[exit code 4]", "exit_code")
    assert use("execute_bash", cmd=" ")[1] == "invalid_action"
    assert use("execute_bash")[1] == "invalid_action"
    assert use("execute_bash", cmd="printf '\\377'") == ("\ufffd", None)


def test_execute_bash_ends_in_time(use: Use) -> None:
    begin = time.monotonic()
    text, error = use("execute_bash", {"timeout": 0.3}, cmd="echo first; sleep 30 & sleep 30")
    assert (text, error) == ("first\n[timed out after 0.3 s]", "timeout")
    assert use("execute_bash", cmd="sleep 30 & echo left") == ("left", None)
    assert time.monotonic() - begin < 5


def test_long_output_loses_its_middle(use: Use) -> None:
    text, error = use("execute_bash", {"max_chars": 200}, cmd="echo start; yes | head -c 10000000; echo end")
    assert error is None and len(text) < 260
    assert text.startswith("start\n") and text.endswith("end") and "characters cut" in text


def test_wrong_calls_are_values(use: Use, root: Path) -> None:
    assert use("finish", command="submit") == ("", None)
    assert use("finish") == ("", None)
    assert use("finish", command="give up")[1] == "invalid_action"
    assert use("rm", path="x") == ("error: unknown tool rm", "invalid_action")
    assert use("file_editor", path="x")[1] == "invalid_action"
    assert use("file_editor", command="erase", path="x")[1] == "invalid_action"
    assert use("file_editor", command="create", path="pkg/core.py/x", file_text="")[1] == "invalid_action"
    assert use("file_editor", command="create", path="new.py", file_text="\ud800")[1] == "invalid_action"
    assert (
        use("file_editor", command="str_replace", path="README.md", old_str="call", new_str="\ud800")[1]
        is not None
    )
    assert (root / "README.md").read_text() == "call clamp(1, 2, 3)\n"
    assert use("execute_bash", cmd="echo \ud800")[1] == "invalid_action"
    assert use("search", search_term="\ud800")[1] == "invalid_action"
    (root / "large.txt").write_bytes(b"x" * (1 << 20) + b"y")
    assert use("file_editor", command="view", path="large.txt")[1] == "invalid_action"


def test_as_a_program(root: Path) -> None:
    request = {"name": "search", "parameters": {"search_term": "twice"}}
    done = subprocess.run(
        [sys.executable, "-I", guest_tools.__file__],
        input=json.dumps(request).encode(),
        capture_output=True,
        env={"MUONRL_ROOT": str(root)},
        check=True,
    )
    assert json.loads(done.stdout) == {"text": "pkg/core.py:7: def twice(x):", "error": None, "done": False}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_in_a_sandbox() -> None:
    async def session() -> None:
        provider = BubblewrapProvider(guest_scripts())
        await provider.start()
        try:
            box = await provider.acquire()
            await box.put({"pkg/core.py": CORE.encode()})

            async def call(name: str, **parameters: str) -> Any:
                request = {"name": name, "parameters": parameters, "options": {"timeout": 5}}
                result = await box.call("tools", json.dumps(request).encode())
                assert result.rc == 0, result
                return json.loads(result.stdout)

            edit = {"command": "str_replace", "path": "pkg/core.py", "old_str": "x + x", "new_str": "2 * x"}
            assert (await call("file_editor", **edit))["text"] == "edited pkg/core.py"
            ran = await call(
                "execute_bash", cmd="python -c 'from pkg.core import twice; print(twice(4))'; pwd"
            )
            assert ran == {"text": "8\n/work", "error": None, "done": False}
            assert await box.snapshot() == {"pkg/core.py": CORE.replace("x + x", "2 * x").encode()}
            assert (await call("file_editor", command="undo_edit", path="/work/pkg/core.py"))["error"] is None
            assert await box.snapshot() == {"pkg/core.py": CORE.encode()}
            assert (await call("finish", command="submit"))["done"]
        finally:
            await provider.close()

    asyncio.run(session())

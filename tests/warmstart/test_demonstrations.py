"""Demonstrations use the tools as they are, follow from the seed, and guess the repair as often as they are told to."""

from __future__ import annotations

import keyword
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muonrl.agents.actions import Action, parse_action
from muonrl.errors import TaskError
from muonrl.tasks.load import load_tasks
from muonrl.warmstart.demonstrations import Demonstration, _rename, make_demonstrations

ROOT = Path(__file__).resolve().parents[2]
TASKS = load_tasks("shipped", "train")[::4]
MARKUP = re.compile(r"</?(?:function|parameter)[^>]*>")


def _make(count=36, *, tasks=TASKS, oracle_share=0.25, rename_share=0.0, seed=7):
    options = {"oracle_share": oracle_share, "rename_share": rename_share, "view_lines": 10, "max_chars": 800}
    return make_demonstrations(tasks, count, seed=seed, **options)


def _actions(demonstration):
    parsed = [parse_action(reply) for reply, _ in demonstration.steps]
    assert all(isinstance(action, Action) for action in parsed)
    return parsed


def _edit(demonstration):
    return _actions(demonstration)[2].parameters


PLAIN, RENAMED = _make(), _make(rename_share=1.0)


@pytest.mark.parametrize("made", [PLAIN, RENAMED], ids=["plain", "renamed"])
def test_each_has_the_four_steps(made):
    assert len(made) == 36
    for demonstration in made:
        search, view, edit, finish = _actions(demonstration)
        assert (search.name, view.name, edit.name, finish.name) == ("search", *["file_editor"] * 2, "finish")
        assert view.parameters["command"] == "view" and edit.parameters["command"] == "str_replace"
        assert finish.parameters == {"command": "submit"}
        found, shown, edited, last = (observation for _, observation in demonstration.steps)
        path = view.parameters["path"]
        assert path.endswith(".py") and path == edit.parameters["path"]
        line, text = re.fullmatch(r"(\d+): (.*)", found.splitlines()[0].removeprefix(f"{path}:")).groups()
        assert text.startswith(search.parameters["search_term"])
        assert shown.startswith(f"{line} {text}\n")
        # The tool says this only where the old text is in the file exactly once.
        assert edited == f"edited {path}" and last == ""
        assert edit.parameters["old_str"] != edit.parameters["new_str"]


def test_texts_are_all_of_a_transcript():
    one = PLAIN[0]
    assert one.texts() == [one.statement, *(text for step in one.steps for text in step)]


def test_no_trace_of_the_scratch_folder():
    assert not any("muonrl" in text or "/tmp" in text for d in PLAIN for text in d.texts())


def test_the_seed_decides():
    one, two, other = (_make(16, rename_share=0.5, seed=seed) for seed in (7, 7, 8))
    assert one == two != other


def test_the_hash_seed_of_python_does_not():
    code = (
        "import hashlib; from muonrl.tasks.load import load_tasks; "
        "from muonrl.warmstart.demonstrations import make_demonstrations as make; "
        "made = make(load_tasks('shipped', 'train')[:8], 20, oracle_share=0.5, rename_share=0.5, view_lines=9, "
        "max_chars=500, seed=1); print(hashlib.sha256(repr(made).encode()).hexdigest())"
    )
    printed = set()
    for seed in "12":
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1


def _gold(demonstration):
    """The repaired file of the task that a plain demonstration is about."""
    edit = _edit(demonstration)
    tasks = [
        t for t in TASKS if t.problem_statement == demonstration.statement and edit["path"] in t.gold_patch
    ]
    return [(t.base[edit["path"]].decode(), t.gold_patch[edit["path"]].decode()) for t in tasks]


def test_the_oracle_repairs_and_the_guess_is_an_edit_in_the_same_file():
    repaired = 0
    for demonstration in _make(50, oracle_share=1.0):
        edit = _edit(demonstration)
        assert demonstration.oracle
        pairs = _gold(demonstration)
        assert any(edit["new_str"] in fixed for _, fixed in pairs)
        repaired += any(
            base.count(edit["old_str"]) == 1 and base.replace(edit["old_str"], edit["new_str"]) == fixed
            for base, fixed in pairs
        )
    assert repaired >= 15, "about half show the task's own bug, which the oracle repairs"
    for demonstration in _make(20, oracle_share=0.0):
        assert not demonstration.oracle and _gold(demonstration)


@pytest.mark.parametrize("share", [0.25, 0.7])
def test_the_oracle_share_is_kept(share):
    count = 120
    seen = sum(d.oracle for d in _make(count, tasks=TASKS[:8], oracle_share=share, rename_share=0.5))
    assert abs(seen - share * count) < 4 * (share * (1 - share) * count) ** 0.5


def test_tasks_that_no_edit_repairs_are_left_out():
    odd = replace(TASKS[0], gold_patch={**TASKS[0].gold_patch, "more.py": b"x = 1\n"})
    with pytest.raises(TaskError, match="no task can be repaired"):
        _make(1, tasks=[odd])
    statements = {d.statement for d in _make(20, tasks=[odd, TASKS[1]])}
    assert statements == {TASKS[1].problem_statement}


# --- renaming ---------------------------------------------------------------------------------------------------------

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Words of the language, of its builtins and of the tools, which a renamed transcript keeps.
STAYING = frozenset(keyword.kwlist) | {
    "returned",
    "expected",
    "edited",
    "view",
    "str_replace",
    "submit",
    "py",
    "len",
}


PIECES = ("ba", "matri", "st", "qu")


@pytest.mark.parametrize("number", range(0, 36, 6))
@pytest.mark.parametrize("seed", range(20))
def test_renaming_changes_names_alone_and_one_to_one(number, seed):
    old = PLAIN[number]
    new = _rename(old, random.Random(seed), PIECES)
    assert new.oracle is old.oracle and len(new.steps) == len(old.steps)
    mapping: dict[str, str] = {}
    for before, after in zip(old.texts(), new.texts(), strict=True):
        assert MARKUP.findall(after) == MARKUP.findall(before)
        before, after = MARKUP.sub("|", before), MARKUP.sub("|", after)
        assert WORD.sub("_", after) == WORD.sub("_", before), "only identifiers change"
        for word, made in zip(WORD.findall(before), WORD.findall(after), strict=True):
            assert mapping.setdefault(word, made) == made, f"{word} has two names"
    assert len(set(mapping.values())) == len(mapping), "two names became one"
    assert all(mapping[word] == word for word in STAYING & set(mapping))
    assert {"def", "submit", "edited"} <= set(mapping)
    function = old.statement.partition("(")[0]
    assert mapping[function] != function and new.statement.startswith(f"{mapping[function]}(")


def test_renaming_draws_other_names_each_time():
    made = [_rename(PLAIN[0], random.Random(seed), PIECES) for seed in range(20)]
    assert len({d.statement for d in made}) == 20
    assert _rename(PLAIN[0], random.Random(3), PIECES) == made[3]


def test_renamed_demonstrations_use_other_names_than_the_task():
    known = {task.problem_statement for task in TASKS}
    assert {d.statement for d in PLAIN} <= known
    assert sum(d.statement in known for d in RENAMED) <= 2


def test_renaming_makes_names_of_the_given_pieces_too():
    names = {
        _rename(PLAIN[0], random.Random(seed), ("zzq",)).statement.partition("(")[0] for seed in range(40)
    }
    assert any("zzq" in name for name in names) and not all("zzq" in name for name in names)


def test_the_prefix_of_a_literal_is_no_name():
    code = Demonstration("f(1) returned 2", (("r", "return f\"{f(x)}\" + rb'f'"),), (), False)
    (_, shown), *_ = _rename(code, random.Random(0), PIECES).steps
    assert shown.startswith('return f"{') and "rb'" in shown and "f(x)" not in shown


def test_line_numbers_go_beyond_those_of_the_files():
    views = [d.steps[1][0] for d in _make(60, tasks=TASKS[:4], rename_share=0.0)]
    lines = [int(re.search(r"view_range>\[(\d+)", view).group(1)) for view in views]
    longest = max(len(data.splitlines()) for task in TASKS[:4] for data in task.base.values())
    assert max(lines) > longest / 2 and len(set(lines)) > 20

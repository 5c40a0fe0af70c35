"""Scripted demonstrations: find the function, view it, replace one line, finish.

The demonstrator knows how to use the tools but not, as a rule, what is wrong: it applies the true repair with probability
``oracle_share`` and otherwise a random operator edit within the buggy function. A model that imitates it masters the form
and guesses the repair, which leaves the repair for reinforcement learning. The tools are the agent's own, run on a plain
folder: nothing of a repository is executed.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import os
import random
import re
import string
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muonrl.agents import guest_tools
from muonrl.agents.actions import Action
from muonrl.errors import TaskError
from muonrl.tasks.operators import Edit, candidate_edits
from muonrl.tasks.schema import RepairTask

MAX_PRACTICE = 3
Step = tuple[str, str]  # reply, observation
Edits = Callable[[str, str], list[Edit]]  # (source, function) -> what could be done to one of its lines
_MARKUP = re.compile(r"(</?(?:function|parameter)(?:=[a-z_]+)?>)")
_IDENTIFIER = re.compile(r"""\b(?![frbu]{1,2}["'])[A-Za-z_]\w*""", re.ASCII)  # not the prefix of a literal
# Names that keep their meaning when a demonstration is renamed: the language, its builtins, and the tools' own words.
_KEPT_WORDS = """
returned raised expected edited view str_replace submit more lines py self
append items keys values join split strip lower upper pop get add sort extend insert
"""
_KEPT = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | frozenset(_KEPT_WORDS.split())
_ENDINGS = ("s", "es", "ed", "er", "est", "ing", "ly", "y")
# Everyday words, of which identifiers are made: the tokenizer learns them, and renaming draws from them.
WORDS = tuple((Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split())
KNOWN_WORDS = (*WORDS, *_KEPT_WORDS.split())


@dataclass(frozen=True)
class Demonstration:
    """A finished transcript: the user's message, then (reply, observation) pairs; the last observation is empty.

    ``practice`` are further replacements on other lines of the same view. They belong to no episode: they let a model
    practise the hardest reply several times a view.
    """

    statement: str
    steps: tuple[Step, ...]
    practice: tuple[Step, ...]
    oracle: bool

    def texts(self) -> list[str]:
        return [self.statement, *(text for step in self.steps for text in step)]

    def drill(self) -> Demonstration:
        """The transcript up to its replacement, followed by the practice."""
        return replace(self, steps=(*self.steps[:-1], *self.practice))


def make_demonstrations(
    tasks: Sequence[RepairTask],
    count: int,
    *,
    oracle_share: float,
    rename_share: float,
    view_lines: int,
    max_chars: int,
    seed: int,
    pieces: Sequence[str] = tuple(string.ascii_lowercase),
) -> list[Demonstration]:
    """``count`` demonstrations over ``tasks``; deterministic in ``seed``.

    Half show the task's own bug; the others plant a different operator bug in the same function, so that the form is
    learned on more code than the tasks themselves. ``rename_share`` of them get other identifiers, made of everyday words and
    of ``pieces``: given the tokenizer's own, every token is practised, not only those of the tasks at hand.
    """
    rng = random.Random(seed)
    options = {"view_lines": view_lines, "max_chars": max_chars, "timeout": 10.0}
    by_repo: dict[str, list[RepairTask]] = defaultdict(list)
    for task in tasks:
        by_repo[task.repo].append(task)
    result: list[Demonstration] = []
    edits: Edits = functools.cache(candidate_edits)
    usable = [t for t in tasks if _repair_is_an_edit(t, edits)]
    if not usable:
        raise TaskError("no task can be repaired by one operator edit: a warm start needs model.path instead")
    with tempfile.TemporaryDirectory(prefix="muonrl-demonstrations-", dir=_memory()) as scratch:
        bench = {repo: _Bench(Path(scratch) / repo, group[0].base) for repo, group in by_repo.items()}
        while len(result) < count:
            task = rng.choice(usable)
            made = _demonstrate(task, bench[task.repo], edits, rng, oracle_share, options)
            result.append(_rename(made, rng, pieces) if rng.random() < rename_share else made)
    return result


def _memory() -> str | None:
    """A folder in memory where the system has one: the tools rewrite a file thousands of times."""
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None


class _Bench:
    """One repository laid out in a scratch folder on which the tools run."""

    def __init__(self, root: Path, files: Mapping[str, bytes]) -> None:
        self.root = root
        for path, data in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def set(self, path: str, text: str) -> None:
        (self.root / path).write_text(text, encoding="utf-8")

    def use(self, action: Action, options: Mapping[str, object]) -> str:
        answer = guest_tools.run(action.name, action.parameters, options, self.root)
        return str(answer["text"])


def _demonstrate(
    task: RepairTask,
    bench: _Bench,
    edits: Edits,
    rng: random.Random,
    oracle_share: float,
    options: Mapping[str, object],
) -> Demonstration:
    path, function = task.provenance["path"], task.provenance["function"]
    original, fixed = task.base[path].decode(), task.gold_patch[path].decode()
    buggy = rng.choice(edits(fixed, function)).text if rng.random() < 0.5 else original
    guesses = _unambiguous(buggy, edits(buggy, function))
    if not any(e.text == fixed for e in guesses):  # a planted bug that one unique line cannot repair
        buggy = original
        guesses = _unambiguous(buggy, edits(buggy, function))
    oracle = rng.random() < oracle_share
    choice = next(e for e in guesses if e.text == fixed) if oracle else rng.choice(guesses)
    # A header of random height, so that line numbers are copied rather than known.
    shown = "#\n" * rng.choice((0, rng.randint(1, 50))) + buggy
    bench.set(path, shown)
    line = next(n for n, text in enumerate(shown.splitlines(), 1) if text.startswith(f"def {function}("))
    opening = [
        Action("search", {"search_term": f"def {function}("}),
        Action("file_editor", {"command": "view", "path": path, "view_range": f"[{line}, -1]"}),
    ]
    finish = (Action("finish", {"command": "submit"}).text(), "")
    steps = [(a.text(), bench.use(a, options)) for a in (*opening, _replace(path, choice))]
    others = _other_lines(guesses, choice, rng)[:MAX_PRACTICE]
    edited = steps[-1][1]  # names the file alone, so it answers the practice too
    practice = [(_replace(path, guess).text(), edited) for guess in others]
    bench.set(path, original)
    return Demonstration(task.problem_statement, (*steps, finish), tuple(practice), oracle)


def _replace(path: str, edit: Edit) -> Action:
    parameters = {"command": "str_replace", "path": path, "old_str": edit.old, "new_str": edit.new}
    return Action("file_editor", parameters)


def _other_lines(guesses: Sequence[Edit], choice: Edit, rng: random.Random) -> list[Edit]:
    """One random edit for each line but that of ``choice``, in random order."""
    by_line: dict[int, list[Edit]] = defaultdict(list)
    for guess in guesses:
        by_line[guess.line].append(guess)
    lines = [line for line in by_line if line != choice.line]
    rng.shuffle(lines)
    return [rng.choice(by_line[line]) for line in lines]


def _repair_is_an_edit(task: RepairTask, edits: Edits) -> bool:
    path = task.provenance.get("path", "")
    if set(task.gold_patch) != {path}:
        return False
    buggy, fixed = task.base[path].decode(), task.gold_patch[path].decode()
    return any(e.text == fixed for e in _unambiguous(buggy, edits(buggy, task.provenance["function"])))


def _unambiguous(source: str, edits: Sequence[Edit]) -> list[Edit]:
    return [e for e in edits if source.count(e.old) == 1]


def _word(rng: random.Random, pieces: Sequence[str]) -> str:
    """A known word, at times inflected, or a few of the pieces joined."""
    if rng.random() < 0.35:
        return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 3)))
    return rng.choice(WORDS) + (rng.choice(_ENDINGS) if rng.random() < 0.3 else "")


def _rename(demonstration: Demonstration, rng: random.Random, pieces: Sequence[str]) -> Demonstration:
    """The same transcript under other identifiers, so that copying is learned rather than names."""
    mapping: dict[str, str] = {}
    taken: set[str] = set()

    def fresh(name: str) -> str:
        while True:
            if len(name) > 2:
                made = "_".join(_word(rng, pieces) for _ in range(1 + name.count("_")))
            else:
                made = rng.choice("abcdefghijklmnopqrstuvwxyz") + rng.choice(("", "", "s"))
            if made not in taken and made not in _KEPT:
                taken.add(made)
                return made

    def swap(match: re.Match[str]) -> str:
        name = match.group(0)
        if name in _KEPT:
            return name
        if name not in mapping:
            mapping[name] = fresh(name)
        return mapping[name]

    def text(value: str) -> str:
        parts = _MARKUP.split(value)  # odd places hold the markup, which keeps its names
        return "".join(part if i % 2 else _IDENTIFIER.sub(swap, part) for i, part in enumerate(parts))

    def steps(values: Sequence[Step]) -> tuple[Step, ...]:
        return tuple((text(reply), text(observation)) for reply, observation in values)

    return Demonstration(
        text(demonstration.statement),
        steps(demonstration.steps),
        steps(demonstration.practice),
        demonstration.oracle,
    )

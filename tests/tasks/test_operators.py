"""The bug operators: what they edit, what they leave alone, and that every edit can be undone by one."""

import ast
import difflib

import pytest

from muonrl.errors import TaskError
from muonrl.tasks.load import DATA, load_tasks
from muonrl.tasks.operators import OPERATORS, candidate_edits, functions, is_unambiguous


def edits_of(body, operator=None, head="def f(a, b, xs):"):
    source = f"{head}\n    {body}\n"
    return {edit.new for edit in candidate_edits(source, "f") if operator in (None, edit.operator)}


@pytest.mark.parametrize(
    "operator, body, expected",
    [
        ("compare_flip", "return a < b", {"return a <= b", "return a > b"}),
        ("compare_flip", "return a <= b", {"return a < b", "return a >= b"}),
        ("compare_flip", "return a == b", {"return a != b"}),
        ("compare_flip", "return a in xs", {"return a not in xs"}),
        ("compare_flip", "return a is  not b", {"return a is b"}),
        (
            "compare_flip",
            "return a < b <= (7)",
            {"return a <= b <= (7)", "return a > b <= (7)", "return a < b < (7)", "return a < b >= (7)"},
        ),
        ("binop_swap", "return a + b", {"return a - b"}),
        ("binop_swap", "return (a * 7) // b", {"return (a * 7) % b", "return (a / 7) // b"}),
        ("binop_swap", "a -= b", {"a += b"}),
        ("binop_swap", "return a + 'x'", set()),
        ("and_or", "return a and b and xs", {"return a or b and xs", "return a and b or xs"}),
        ("if_invert", "return a if b else xs", {"return a if not b else xs"}),
        ("if_invert", "return [x for x in xs if not x]", {"return [x for x in xs if x]"}),
        ("if_invert", "return a if a < b else b", set()),
        (
            "if_invert",
            "while a and not b: a = f(a)",
            {"while not a and not b: a = f(a)", "while a and b: a = f(a)"},
        ),
        ("off_by_one", "return xs[0]", {"return xs[1]"}),
        ("off_by_one", "return xs[-1]", {"return xs[-2]"}),
        ("off_by_one", "a += 1", {"a += 2"}),
        ("off_by_one", "return range(a)", {"return range(a + 1)", "return range(a - 1)"}),
        ("off_by_one", "return xs[a:]", {"return xs[a + 1:]", "return xs[a - 1:]"}),
        ("off_by_one", "return xs[: a - 1]", {"return xs[: a]", "return xs[: a - 2]"}),
        ("off_by_one", "return a - b", {"return a - b + 1"}),
        ("off_by_one", "return a - b + 1", {"return a - b", "return a - b + 2"}),
        ("off_by_one", "return xs[a]", set()),
        ("argument_swap", "return f(a, b, xs)", {"return f(b, a, xs)", "return f(a, xs, b)"}),
        ("argument_swap", "return a, b", {"return b, a"}),
        ("argument_swap", "return f(a, a)", set()),
        ("argument_swap", "return max(a, b)", set()),
        ("argument_swap", "return f(*xs, a)", set()),
        ("dropped_return", "return a", {"a"}),
        ("dropped_return", "xs.append(a)", {"return xs.append(a)"}),
        ("dropped_return", "return 'text'", set()),
    ],
)
def test_each_operator_makes_exactly_these_edits(operator, body, expected):
    assert edits_of(body, operator) == expected


def test_an_index_is_stepped_only_when_it_counts():
    source = "def f(xs, key):\n    for i in range(9):\n        print(xs[i], xs[key])\n"
    new = {edit.new for edit in candidate_edits(source, "f") if "key]" in edit.new and edit.line == 3}
    assert "print(xs[i + 1], xs[key])" in new
    assert not any("key + 1" in text for text in new)


def test_f_strings_docstrings_and_other_functions_are_left_alone():
    source = 'def f(a):\n    """a < 1"""\n    return f"{a < 1} {a + 2}"\n\n\ndef g(a):\n    return a < 1\n'
    assert candidate_edits(source, "f") == []


def test_lines_beyond_ascii_are_left_alone():
    assert edits_of("return a + xs['\N{LATIN SMALL LETTER E WITH ACUTE}']") == set()


def test_methods_are_found_by_their_qualified_name():
    source = "class Box:\n    def full(self):\n        return self.n >= 2\n"
    assert list(functions(source)) == ["Box.full"]
    assert {edit.new for edit in candidate_edits(source, "Box.full")} >= {"return self.n > 2"}


@pytest.mark.parametrize(
    "source, message", [("def g():\n    pass\n", "no function 'f'"), ("def f(:\n", "does not parse")]
)
def test_a_source_without_the_function_is_refused(source, message):
    with pytest.raises(TaskError, match=message):
        candidate_edits(source, "f")


def test_ambiguity_counts_the_stripped_line_as_a_substring():
    source = "def f(a):\n    if a:\n        return a + 1\n    return a + 12\n"
    by_new = {edit.new: edit for edit in candidate_edits(source, "f") if edit.line == 3}
    assert is_unambiguous(by_new["return a - 1"])
    assert not is_unambiguous(by_new["a + 1"])


def shipped_functions():
    for path in sorted(DATA.glob("repos/*/*/*.py")):
        if path.parent.name != "tests":
            source = path.read_text()
            for name in functions(source):
                yield source, name


def test_every_edit_changes_one_line_and_an_edit_undoes_it():
    seen = 0
    for source, name in shipped_functions():
        for edit in candidate_edits(source, name):
            before, after = source.splitlines(), edit.text.splitlines()
            changed = [
                i for i, pair in enumerate(zip(before, after, strict=True), start=1) if pair[0] != pair[1]
            ]
            assert changed == [edit.line]
            assert (before[edit.line - 1].strip(), after[edit.line - 1].strip()) == (edit.old, edit.new)
            ast.parse(edit.text)
            back = [other for other in candidate_edits(edit.text, name) if other.text == source]
            assert [(other.old, other.new) for other in back] == [(edit.new, edit.old)], (name, edit)
            seen += 1
    assert seen > 1000


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_true_repair_of_every_shipped_bug_is_a_candidate(split):
    operators = set()
    for task in load_tasks(split=split):
        path, function = task.provenance["path"], task.provenance["function"]
        buggy, fixed = task.base[path].decode(), task.gold_patch[path].decode()
        repair = [edit for edit in candidate_edits(buggy, function) if edit.text == fixed]
        assert len(repair) == 1, task.task_id
        assert buggy.count(repair[0].old) == 1 and repair[0].old != repair[0].new
        assert repair[0].line == int(task.provenance["line"])
        changed = [line for line in difflib.ndiff(buggy.splitlines(), fixed.splitlines()) if line[0] in "+-"]
        assert len(changed) == 2
        operators.add(task.provenance["operator"])
    assert operators == set(OPERATORS)

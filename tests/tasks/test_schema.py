"""A RepairTask refuses parts that do not fit together."""

import pytest

from muonrl.errors import TaskError
from muonrl.tasks.schema import RepairTask

GOOD = {
    "task_id": "toy-f-1",
    "repo": "toy",
    "base": {"toy/a.py": b"x = 1\n", "README.md": b"toy\n"},
    "problem_statement": "f() returned 1, expected 2",
    "fail_to_pass": ("tests/test_a.py::test_f",),
    "pass_to_pass": ("tests/test_a.py::test_g",),
    "test_files": {"tests/test_a.py": b""},
    "gold_patch": {"toy/a.py": b"x = 2\n"},
    "split": "train",
}


def test_a_whole_task_is_accepted_and_cannot_be_changed():
    task = RepairTask(**GOOD)
    assert task.workdir == "/work" and task.timeout_s == 10.0
    assert task.gold_tree == {"toy/a.py": b"x = 2\n", "README.md": b"toy\n"}
    with pytest.raises(TypeError):
        task.base["toy/a.py"] = b""


@pytest.mark.parametrize(
    "change, message",
    [
        ({"split": "test"}, "split 'test'"),
        ({"problem_statement": " "}, "statement is empty"),
        ({"fail_to_pass": ()}, "no fail-to-pass"),
        ({"pass_to_pass": GOOD["fail_to_pass"]}, "both fail-to-pass and pass-to-pass"),
        ({"fail_to_pass": ("tests/test_b.py::test_f",)}, "no test file holds"),
        ({"base": {**GOOD["base"], "tests/test_a.py": b""}}, "hidden test file"),
        ({"gold_patch": {"toy/a.py": b"x = 1\n"}}, "changes nothing"),
        ({"gold_patch": {}}, "changes nothing"),
        ({"timeout_s": 0}, "must be positive"),
        ({"base": {"../a.py": b""}}, "plain relative path"),
        ({"gold_patch": {"/etc/passwd": b""}}, "plain relative path"),
        ({"base": {"toy//a.py": b""}}, "plain relative path"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(TaskError, match=message):
        RepairTask(**{**GOOD, **change})

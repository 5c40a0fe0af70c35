"""Loading: the shipped data keeps its promises, and a corrupt file is named with line and fault."""

import ast
import json
import shutil

import pytest

from muonrl.errors import TaskError
from muonrl.tasks.load import DATA, load_tasks, read_repository
from muonrl.tasks.operators import functions
from muonrl.tasks.schema import SPLITS
from muonrl.tasks.shipped import shipped_repos

ALL = [task for split in SPLITS for task in load_tasks(split=split)]


def test_there_are_enough_tasks_and_no_repository_is_in_both_splits():
    by_split = {split: load_tasks(split=split) for split in SPLITS}
    assert len(by_split["train"]) >= 140 and len(by_split["heldout"]) >= 40
    repos = {split: {task.repo for task in tasks} for split, tasks in by_split.items()}
    assert len(repos["train"]) == 8 and len(repos["heldout"]) == 3
    assert not repos["train"] & repos["heldout"]
    assert repos["train"] | repos["heldout"] == set(shipped_repos())


def test_task_ids_are_unique_over_the_splits():
    assert len({task.task_id for task in ALL}) == len(ALL)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.task_id)
def test_a_shipped_task_keeps_its_promises(task):
    function, path = task.provenance["function"], task.provenance["path"]
    assert task.problem_statement.startswith(f"{function}(")
    assert len(task.problem_statement) <= 80 and "\n" not in task.problem_statement
    assert ", expected " in task.problem_statement and "line" not in task.problem_statement.split("(")[1:][-1]
    assert len(task.fail_to_pass) >= 1 and len(task.pass_to_pass) >= 5
    assert set(task.gold_patch) == {path}
    assert not any("test" in name for name in task.base)
    assert "README.md" in task.base and len(task.test_files) >= 3


@pytest.mark.parametrize("repo", shipped_repos())
def test_a_shipped_repository_is_small_plain_code(repo):
    repository = read_repository(DATA / "repos" / repo)
    names = []
    for path, data in repository.files.items():
        assert data.isascii(), path
        if path.endswith(".py"):
            source = data.decode()
            assert source.startswith('"""') and max(map(len, source.splitlines())) <= 66
            for name, node in functions(source).items():
                names.append(name)
                assert 3 <= node.end_lineno - node.body[0].lineno + 1 <= 8, name
                assert ast.get_docstring(node) is None
    assert 15 <= len(names) <= 20 and len(set(names)) == len(names)


def test_an_unknown_split_and_an_empty_data_set_are_refused(tmp_path):
    with pytest.raises(TaskError, match="split 'test'"):
        load_tasks(split="test")
    with pytest.raises(TaskError, match="no train tasks"):
        load_tasks(tmp_path)


@pytest.fixture
def data(tmp_path):
    shutil.copytree(DATA / "repos" / "spans", tmp_path / "repos" / "spans")
    (tmp_path / "tasks" / "train").mkdir(parents=True)
    shutil.copy(DATA / "tasks" / "train" / "spans.jsonl", tmp_path / "tasks" / "train")
    return tmp_path


def rewrite(data, number, change):
    path = data / "tasks" / "train" / "spans.jsonl"
    lines = path.read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    path.write_text("\n".join(lines) + "\n")


def with_values(**values):
    return lambda line: json.dumps({**json.loads(line), **values})


def without(key):
    return lambda line: json.dumps({k: v for k, v in json.loads(line).items() if k != key})


@pytest.mark.parametrize(
    "number, change, message",
    [
        (3, lambda line: line[:40], "not JSON"),
        (3, lambda line: "[1]", "not a JSON object"),
        (3, without("bug"), "'bug' is missing"),
        (3, with_values(bug=7), "'bug' is 7, not of type str"),
        (3, with_values(fail_to_pass=[1]), "not a string"),
        (3, with_values(fail_to_pass=[]), "no fail-to-pass"),
        (3, with_values(fail_to_pass=["tests/test_x.py::test_y"]), "no test of the repository"),
        (3, with_values(bug="--- a/spans/no.py\n+++ b/spans/no.py\n"), "does not have"),
        (
            3,
            with_values(bug="--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-x\n+y\n"),
            "line 1 is not the `x`",
        ),
        (1, with_values(format=2), "format 2"),
        (1, with_values(format=True), "'format' is True"),
        (1, with_values(digest="00"), "is not the one"),
        (1, with_values(tests="all"), "'tests' is 'all', not of type list"),
    ],
)
def test_a_corrupt_line_is_named_with_its_fault(data, number, change, message):
    rewrite(data, number, change)
    with pytest.raises(TaskError, match=message) as caught:
        load_tasks(data)
    assert f"spans.jsonl:{number}: " in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_hold_nothing_are_refused(data):
    path = data / "tasks" / "train" / "spans.jsonl"
    header = path.read_text().splitlines()[0]
    path.write_text(header + "\n")
    with pytest.raises(TaskError, match="no task in it"):
        load_tasks(data)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="cannot be read"):
        load_tasks(data)
    shutil.rmtree(data / "repos")
    with pytest.raises(TaskError, match="no such repository"):
        load_tasks(data)


def test_a_task_id_met_twice_is_refused(data):
    path = data / "tasks" / "train" / "spans.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1]]) + "\n")
    with pytest.raises(TaskError, match="two tasks are called"):
        load_tasks(data)


def test_a_changed_repository_is_noticed(data):
    module = data / "repos" / "spans" / "spans" / "points.py"
    module.write_text(module.read_text() + "\n")
    with pytest.raises(TaskError, match="is not the one that these tasks were made from"):
        load_tasks(data)


def test_links_and_caches_are_no_part_of_a_repository(data):
    root = data / "repos" / "spans"
    before = read_repository(root)
    (root / "link.py").symlink_to("/etc/passwd")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert read_repository(root).digest == before.digest
    shutil.rmtree(root / "tests")
    with pytest.raises(TaskError, match="no tests/ folder"):
        read_repository(root)

"""Making tasks: deterministic, really tested, and refusing what is no clear task."""

import pytest

from muonrl.errors import TaskError
from muonrl.tasks.load import DATA, load_tasks
from muonrl.tasks.make import MakeOptions, make_tasks, write_tasks
from muonrl.tasks.shipped import main, remake, shipped_options
from muonrl.tasks.suite import write_tree


def test_a_shipped_repository_is_regenerated_byte_for_byte():
    assert remake("coins").text == (DATA / "tasks" / "train" / "coins.jsonl").read_text()


@pytest.fixture(scope="module")
def report(toy_files, tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "toy"
    write_tree(root, toy_files)
    return make_tasks(root, MakeOptions(split="heldout", limit=50, per_function=9))


def test_tasks_of_a_repository_load_again_equal(report, tmp_path):
    path = write_tasks(report, tmp_path / "data")
    assert path == tmp_path / "data" / "tasks" / "heldout" / "toy.jsonl"
    loaded = load_tasks(tmp_path / "data", "heldout")
    assert [vars(task) for task in loaded] == [vars(task) for task in report.tasks]
    assert not list(path.parent.glob("*.partial"))


def test_another_repository_of_the_same_name_is_not_mixed_in(report, tmp_path):
    write_tree(tmp_path / "repos" / "toy", {**report.repository.tree, "toy/more.py": b""})
    with pytest.raises(TaskError, match="holds another repository"):
        write_tasks(report, tmp_path)
    assert not (tmp_path / "tasks").exists()


def test_only_clear_tasks_are_admitted(report):
    functions = [task.provenance["function"] for task in report.tasks]
    assert set(functions) == {"clamp", "count_down"}, "a function that no test calls gets no bug"
    lines = [(task.provenance["function"], task.provenance["line"]) for task in report.tasks]
    assert len(set(lines)) == len(lines), "one bug a line"
    assert report.refused["hangs"] >= 1
    for task in report.tasks:
        assert b"import" not in task.base["toy/core.py"]
        assert len(task.pass_to_pass) >= 5
        assert set(task.fail_to_pass) | set(task.pass_to_pass) == set(report.tests)


def test_statements_are_failing_calls_without_default_arguments(report):
    statements = {task.problem_statement for task in report.tasks if task.provenance["function"] == "clamp"}
    assert all(text.startswith("clamp(") and ", expected " in text for text in statements)
    assert any(text.startswith("clamp(3, 2) ") for text in statements)
    assert not any(", 9)" in text for text in statements)


def test_the_limits_are_kept(toy):
    assert len(make_tasks(toy, MakeOptions(limit=1)).tasks) == 1
    functions = [task.provenance["function"] for task in make_tasks(toy, MakeOptions(per_function=1)).tasks]
    assert sorted(functions) == ["clamp", "count_down"]


def test_a_repair_that_must_raise_is_said_so(toy):
    core = toy / "toy" / "core.py"
    core.write_text("def f(x, y):\n    if x == y:\n        raise ValueError\n    return x\n")
    test = "import pytest\nfrom toy.core import f\n\ndef test_f():\n    with pytest.raises(ValueError):\n        f(1, 1)\n"
    keep = "".join(f"\ndef test_keep{i}():\n    assert {i} == {i}\n" for i in range(6))
    (toy / "tests" / "test_core.py").write_text(test + keep)
    statements = [task.problem_statement for task in make_tasks(toy).tasks]
    assert "f(1, 1) returned 1, expected it to raise ValueError" in statements


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "from toy.core import clamp\n\ndef test_no():\n    assert clamp(1, 2, 3) == 1\n",
            "test_no does not pass",
        ),
        ("import nowhere\n", r"cannot be run \(collection\)"),
        ("import pytest\n@pytest.mark.parametrize('x', {'a', 'b', 'c'})\ndef test(x): pass\n", None),
        (
            "import os, pytest\n@pytest.mark.parametrize('x', [hash('a')])\ndef test(x): pass\n",
            "change from run to run",
        ),
    ],
)
def test_a_repository_with_an_unsound_suite_is_refused(toy, tmp_path, text, message):
    (toy / "tests" / "test_core.py").write_text(text)
    if message is None:
        report = make_tasks(toy)
        assert report.tasks == ()
        with pytest.raises(TaskError, match="no mutant was admitted"):
            write_tasks(report, tmp_path / "data")
    else:
        with pytest.raises(TaskError, match=message):
            make_tasks(toy)


@pytest.mark.parametrize(
    "tests, refusal",
    [
        ("def test_f():\n    f(1)\n", "survives"),
        (
            "def test_f():\n    assert f(1) == 2\n\ndef test_seed():\n"
            "    assert f(1) == 2 or os.environ['PYTHONHASHSEED'] != '1'\n",
            "flaky",
        ),
        ("def test_f():\n    assert f(1) == 2\n", "few_pass_to_pass"),
    ],
)
def test_mutants_that_are_no_clear_task_are_counted_by_reason(toy, tests, refusal):
    (toy / "toy" / "core.py").write_text("def f(x):\n    return x + 1\n")
    keep = "".join(f"\ndef test_keep{i}():\n    pass\n" for i in range(4 if refusal[0:3] == "few" else 6))
    (toy / "tests" / "test_core.py").write_text("import os\nfrom toy.core import f\n\n" + tests + keep)
    report = make_tasks(toy)
    assert report.tasks == () and set(report.refused) == {refusal}


def test_an_unknown_shipped_repository_is_refused():
    with pytest.raises(TaskError, match="none of the shipped repositories"):
        shipped_options("nowhere")
    assert shipped_options("routes").split == "heldout"


def test_regenerating_writes_the_named_files(toy, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    (data / "repos").mkdir(parents=True)
    (data / "splits.json").write_text('{"toy": "train"}')
    toy.rename(data / "repos" / "toy")
    monkeypatch.setattr("muonrl.tasks.shipped.DATA", data)
    main(["toy"])
    assert capsys.readouterr().out.startswith("tasks/train/toy.jsonl: ")
    assert {task.repo for task in load_tasks(data)} == {"toy"}

"""Every command does what it says, and a mistake is one clear line with a status of its own."""

import json
import re
import shutil
from pathlib import Path

import pytest

from muonrl.config import Config, list_recipes, load_recipe
from muonrl.tasks.load import DATA, load_tasks
from tests.training.micro import arguments, copy_run, finished_run, home, muonrl, needs_bwrap

TINY_REPOSITORY = {
    "small/__init__.py": '"""A small package."""\n',
    "small/numbers.py": '''"""Numbers."""


def clamp(value, low, high):
    """Keep a value between two bounds."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def double(value):
    """Twice the value."""
    return value + value
''',
    "tests/test_numbers.py": """import pytest

from small.numbers import clamp, double


@pytest.mark.parametrize(
    ("value", "expected"), [(-1, 0), (0, 0), (1, 1), (5, 5), (9, 9), (10, 10), (11, 10), (99, 10)]
)
def test_clamp(value, expected):
    assert clamp(value, 0, 10) == expected


@pytest.mark.parametrize("value", [0, 1, 3, -4])
def test_double(value):
    assert double(value) == 2 * value
""",
}


def fails(capsys, *command, status=2):
    """Run a command that must fail -> its one line on standard error."""
    capsys.readouterr()
    assert muonrl(*command) == status
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    kind = "error" if status == 2 else "fault"
    assert err.startswith(f"muonrl: {kind}: ") and "Traceback" not in err
    return err


def test_recipes_lists_what_can_be_trained(capsys):
    assert muonrl("recipes") == 0
    assert capsys.readouterr().out.split() == list(list_recipes())
    assert {"tiny", "tiny_adam", "spo_adam", "spo_muon", "spopp_adam"} <= set(list_recipes())


def test_dry_run_prints_config_and_plan_and_touches_nothing(tmp_path, capsys):
    run = tmp_path / "run"
    command = ["train", "--recipe", "tiny_adam", "--run-dir", run, "--seed", "7", "--set", "run.updates=9"]
    assert muonrl(*command, "--dry-run") == 0
    out = capsys.readouterr().out
    printed = tmp_path / "printed.toml"
    printed.write_text(out)  # the plan is comments: the whole output is a recipe
    assert load_recipe(printed) == load_recipe("tiny_adam", ["run.updates=9"], seed=7)
    assert "9 updates" in out and str(run) in out and "adamw" in out
    assert not run.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--recipe", "tini"], "unknown recipe 'tini' (did you mean 'tiny'?)"),
        (["--recipe", "nowhere/x.toml"], "recipe nowhere/x.toml: No such file"),
        (["--set", "run.update=3"], "unknown key 'run.update' (did you mean 'updates'?)"),
        (["--set", "rum.updates=3"], "unknown section 'rum' (did you mean 'run'?)"),
        (["--set", "run.updates=many"], "run.updates = 'many': expected"),
        (["--set", "run.updates=0"], "run.updates = 0"),
        (["--set", "optimizer.name=sgd"], "optimizer.name = 'sgd': not a choice"),
        (["--set", "updates=3"], "expected section.key=value"),
        (["--seed", "-1"], "run.seed = -1"),
        (["--set", "model.path=/nowhere"], "no model at /nowhere: config.json is missing"),
        (["--set", "tasks.source=/nowhere"], "/nowhere: no train tasks"),
        (["--set", "tasks.train_split=middle"], "split 'middle' is none of"),
        (["--set", "sandbox.backend=process"], "allow_unsandboxed"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line_and_makes_no_run(tmp_path, capsys, options, text):
    run = tmp_path / "run"
    assert text in fails(capsys, "train", "--run-dir", run, *options)
    assert not run.exists()


def test_a_recipe_file_with_a_mistake_is_named(tmp_path, capsys):
    bad = tmp_path / "mine.toml"
    for content, text in (("[run\n", "not valid TOML"), ("[run]\nseeds = 1\n", "did you mean 'seed'?")):
        bad.write_text(content)
        line = fails(capsys, "train", "--recipe", bad, "--run-dir", tmp_path / "run")
        assert str(bad) in line and text in line


@pytest.mark.parametrize(
    "command",
    [[], ["fly"], ["train", "--recpie", "tiny"], ["eval"], ["tasks"], ["tasks", "make", "x"], ["resume"]],
)
def test_wrong_usage_is_told_by_the_parser(command, capsys):
    with pytest.raises(SystemExit) as caught:
        muonrl(*command)
    assert caught.value.code == 2
    assert "usage: muonrl" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "tasks", "eval", "warmstart"])
def test_no_bubblewrap_names_the_package(tmp_path, capsys, monkeypatch, command):
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    run = tmp_path / "run"
    commands = {
        "train": ["train", "--run-dir", run],
        "tasks": ["tasks", "verify"],
        "eval": ["eval", model],
    }
    if command == "warmstart":  # needs no sandbox, and must not ask for one
        assert muonrl("warmstart", *arguments(run)[1:3]) == 0
        return
    assert "install the package `bubblewrap`" in fails(capsys, *commands[command])
    assert not run.exists()


def damaged_tasks(target: Path, harm) -> Path:
    shutil.copytree(DATA, target)
    file = sorted((target / "tasks" / "train").glob("*.jsonl"))[0]
    lines = file.read_text().splitlines()
    lines[2] = harm(lines[2])
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda line: line[: len(line) // 2], "not JSON"),
        (lambda line: line.replace('"fail_to_pass"', '"fails"'), "'fail_to_pass' is missing"),
        (lambda line: "[]", "not a JSON object"),
    ],
    ids=["torn", "key", "list"],
)
@needs_bwrap
def test_a_corrupt_task_file_is_named_with_its_line(tmp_path, capsys, harm, text):
    file = damaged_tasks(tmp_path / "data", harm)
    source = f"tasks.source={tmp_path / 'data'}"
    line = fails(capsys, "train", "--run-dir", tmp_path / "run", "--set", source)
    assert f"{file}:3: " in line and text in line
    assert not (tmp_path / "run").exists()
    assert text in fails(capsys, "tasks", "verify", "--source", tmp_path / "data")


def test_tasks_show(capsys):
    task = load_tasks("shipped", "heldout")[0]
    assert muonrl("tasks", "show", task.task_id) == 0
    out = capsys.readouterr().out
    assert task.problem_statement in out and task.fail_to_pass[0] in out
    assert "no task 'nosuch'" in fails(capsys, "tasks", "show", "nosuch")


@needs_bwrap
def test_tasks_make_then_verify_then_train_plan(tmp_path, capsys):
    repository, data = tmp_path / "small", tmp_path / "data"
    for name, text in TINY_REPOSITORY.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    assert muonrl("tasks", "make", repository, "--out", data, "--limit", "3") == 0
    made = int(re.search(r": (\d+) tasks", capsys.readouterr().out)[1])
    assert 1 <= made <= 3
    assert len(load_tasks(data, "train")) == made
    assert muonrl("tasks", "verify", "--source", data, "--split", "train") == 0
    assert f"{made} of {made} tasks verified" in capsys.readouterr().out
    # A task whose repair does not repair is found out.
    file = data / "tasks" / "train" / "small.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    passing = [t for t in rows[0]["tests"] if t not in rows[1]["fail_to_pass"]]
    rows[1]["fail_to_pass"] = passing[:1]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert muonrl("tasks", "verify", "--source", data, "--split", "train") == 1
    assert f"{rows[1]['task_id']}: 1 fail-to-pass tests pass on the buggy tree" in capsys.readouterr().out
    assert "no such folder" in fails(capsys, "tasks", "make", tmp_path / "none", "--out", data)


@pytest.mark.slow
@needs_bwrap
def test_the_shipped_heldout_tasks_verify(capsys):
    assert muonrl("tasks", "verify", "--split", "heldout") == 0
    count = len(load_tasks("shipped", "heldout"))
    assert count >= 20 and f"{count} of {count} tasks verified" in capsys.readouterr().out


def test_tasks_make_into_a_refused_folder_is_one_line(tmp_path, capsys):
    repository = tmp_path / "small"
    for name, text in TINY_REPOSITORY.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "data"
    line = fails(capsys, "tasks", "make", repository, "--out", out, "--limit", "1", status=1)
    assert str(out) in line and "Not a directory" in line


def test_warmstart_is_made_once_and_found_again(tmp_path, capsys):
    options = ["warmstart", "--recipe", home() / "micro.toml", "--set", f"warmstart.cache_dir={tmp_path}"]
    assert muonrl(*options) == 0
    first = capsys.readouterr().out.splitlines()
    assert muonrl(*options) == 0
    second = capsys.readouterr().out.splitlines()
    folder = Path(first[-1])
    assert second[-1] == first[-1] and "from cache" in " ".join(second)
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    line = fails(capsys, *options, "--set", f"model.path={folder}")
    assert "has no warm start" in line


def test_a_warm_start_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    line = fails(
        capsys, "warmstart", "--recipe", home() / "micro.toml", "--set", f"warmstart.cache_dir={cache}"
    )
    assert f"{cache} cannot be written: a part of the path is a file" in line


@needs_bwrap
def test_a_second_run_in_the_same_folder_is_refused(tmp_path, capsys):
    run = finished_run()
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    line = fails(capsys, *arguments(run))
    assert f"{run} already holds a run: continue it with `muonrl resume {run}`" in line
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.parametrize("where", ["file/run", "/proc/muonrl-run"])
@needs_bwrap
def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path, capsys, where):
    (tmp_path / "file").write_text("kept")
    line = fails(capsys, *arguments(tmp_path / where))
    assert where in line and "cannot be written" in line
    assert (tmp_path / "file").read_text() == "kept" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_resume_needs_a_run(tmp_path, capsys):
    assert "holds no run" in fails(capsys, "resume", tmp_path)
    assert "holds no run" in fails(capsys, "resume", tmp_path / "none")


@needs_bwrap
def test_a_damaged_checkpoint_is_refused_by_resume_and_eval(tmp_path, capsys):
    run = copy_run(tmp_path / "run")
    file = run / "checkpoints" / "step-000003" / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    whole = file.read_bytes()
    file.write_bytes(data)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for command in (["resume", run], ["eval", run], ["eval", file.parent.parent]):
        line = fails(capsys, *command)
        assert "step-000003: model/model.safetensors does not match manifest.json" in line
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    file.write_bytes(whole)
    (file.parent.parent / "optimizer.safetensors").unlink()
    assert "optimizer.safetensors is missing" in fails(capsys, "resume", run)


def test_eval_of_nothing(tmp_path, capsys):
    assert "no checkpoint at" in fails(capsys, "eval", tmp_path / "none")
    assert "--samples 0: must be at least 1" in fails(capsys, "eval", tmp_path, "--samples", "0")


@needs_bwrap
def test_eval_of_a_folder_without_a_model(tmp_path, capsys):
    assert f"no model at {tmp_path}: config.json is missing" in fails(capsys, "eval", tmp_path)


@needs_bwrap
def test_eval_repeats_the_run_s_own_evaluation_and_leaves_no_trace(tmp_path, capsys):
    """Without a recipe it takes the checkpoint's own, so the figure is that of the run's end."""
    run = copy_run(tmp_path / "run")
    before = set(run.rglob("*"))
    assert muonrl("eval", run, "--samples", "1") == 0
    out = capsys.readouterr().out
    after = json.loads((run / "summary.json").read_text())["heldout_after"]
    assert f"held-out pass@1 {after:.4f} (1 samples a task)" in out
    assert f"held-out tasks: {load_recipe(home() / 'micro.toml').tasks.limit} x 1" in out
    assert set(run.rglob("*")) == before


@needs_bwrap
def test_report_is_one_page(tmp_path, capsys):
    run = copy_run(tmp_path / "run")
    assert muonrl("report", run) == 0
    page = Path(capsys.readouterr().out.strip().splitlines()[-1])
    assert page == run / "report.html" and "<html" in page.read_text()
    assert "none" in fails(capsys, "report", tmp_path / "none")


def test_a_data_set_without_heldout_tasks_can_be_trained_on_without_evaluation():
    from muonrl.training.run import select_tasks
    from tests.training.cases import config

    assert select_tasks(config(run={"eval_samples": 0}))[1] == ()
    train, heldout = select_tasks(config(tasks={"limit": 3}))
    assert len(train) == len(heldout) == 3
    assert len(select_tasks(Config())[0]) == len(load_tasks("shipped", "train"))

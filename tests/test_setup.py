"""The set-up script, run with an interpreter that only writes down what it is asked to do."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PYTHON = """#!/bin/sh
# Stands in for Python: `-m venv DIR` puts a copy of this file there; `pip` writes down its arguments.
case "$*" in
    *"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; exit ;;
    *"pip uninstall"*) echo "$*" >>"$JOURNAL"; exit ;;
    *"pip install"*) echo "$*" >>"$JOURNAL"
        case "$*" in $FAIL) echo "no such wheel"; exit 1 ;; esac
        if [ -n "$KILL" ]; then kill -9 $PPID; fi; exit ;;
    *m.version*) echo "$INSTALLED"; [ -n "$INSTALLED" ]; exit ;;
    *m.requires*) [ -n "$NEEDS_TRITON" ]; exit ;;
    *tomllib*) echo ruff; exit ;;
    *version_info*) [ -z "$OLD" ]; exit ;;
    *"ensurepip, venv"*) [ -z "$NO_VENV" ]; exit ;;
    --version) echo "Python 3.99.0"; exit ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A folder with the files that the script reads, an interpreter and a PATH of its own."""
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "muonrl/__init__.py"):
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (
        "sh",
        "cat",
        "cksum",
        "cp",
        "date",
        "dirname",
        "grep",
        "id",
        "mkdir",
        "true",
        "rm",
        "tail",
        "flock",
    ):
        if shutil.which(name):
            (tools / name).symlink_to(shutil.which(name))
    for name, text in (("python3", PYTHON), ("bwrap", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tmp_path / "clone"


def _set_up(clone, **settings):
    environment = {"PATH": str(clone.parent / "tools"), "JOURNAL": str(clone.parent / "journal"), "FAIL": "-"}
    return subprocess.run(
        ["/bin/sh", "scripts/setup.sh"],
        cwd=clone,
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=30,
    )


def _installs(clone):
    """What pip was asked to install since the last call."""
    journal = clone.parent / "journal"
    lines = journal.read_text().splitlines() if journal.exists() else []
    journal.unlink(missing_ok=True)
    return lines


def test_torch_comes_first_and_as_a_cpu_build(clone):
    result = _set_up(clone)
    assert result.returncode == 0, result.stderr
    torch, tools, project = _installs(clone)
    assert "--no-deps" in torch and "/whl/cpu" in torch and torch.endswith("torch==2.13.0")
    assert "-r .venv/dev-requirements.txt" in tools and "-c .venv/constraints.txt" in tools
    assert project.endswith("-e .[rl]") and "-c .venv/constraints.txt" in project
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and all(line.startswith("setup: ") and line.endswith(" s") for line in lines)


def test_without_the_cpu_index_pip_is_asked_for_the_same_pin(clone):
    assert _set_up(clone, FAIL="*whl/cpu*").returncode == 0
    first, second = _installs(clone)[:2]
    assert "/whl/cpu" in first and "/whl/cpu" not in second and second.endswith(" torch==2.13.0")


def test_a_gpu_machine_gets_the_cuda_build_and_the_triton_that_it_asks_for(clone):
    smi = clone.parent / "tools" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: an accelerator'\n")
    smi.chmod(0o755)
    assert _set_up(clone, NEEDS_TRITON="yes").returncode == 0
    torch = _installs(clone)[0]
    assert "/whl/cpu" not in torch and "--no-deps" not in torch
    pins = (clone / ".venv" / "constraints.txt").read_text()
    assert "torch==2.13.0" in pins and "triton==" not in pins


def test_the_other_build_of_torch_is_replaced_and_the_right_one_kept(clone):
    assert _set_up(clone, INSTALLED="2.13.0", MUONRL_TORCH="cpu").returncode == 0
    assert "uninstall" in (calls := _installs(clone))[0] and "/whl/cpu" in calls[1]
    assert "triton==" in (clone / ".venv" / "constraints.txt").read_text()
    assert _set_up(clone, INSTALLED="2.13.0+cpu", MUONRL_TORCH="cuda").returncode == 0
    assert "uninstall" in (calls := _installs(clone))[0] and calls[1].endswith(" torch==2.13.0")
    for build, installed in (("cpu", "2.13.0+cpu"), ("cuda", "2.13.0+cu130"), ("cuda", "2.13.0")):
        (clone / ".venv" / ".muonrl-ready").unlink()
        assert _set_up(clone, INSTALLED=installed, MUONRL_TORCH=build).returncode == 0
        assert len(_installs(clone)) == 2


def test_a_second_call_does_nothing_until_the_needs_change(clone):
    assert _set_up(clone).returncode == 0 and len(_installs(clone)) == 3
    began = time.monotonic()
    result = _set_up(clone)
    assert (result.returncode, result.stdout, _installs(clone)) == (0, "", [])
    assert time.monotonic() - began < 5
    os.utime(clone / "pyproject.toml")
    assert _installs(clone) == [] and _set_up(clone).stdout == ""
    with (clone / "constraints.txt").open("a") as out:
        out.write("extra==1.0\n")
    result = _set_up(clone)
    assert result.returncode == 0 and len(_installs(clone)) == 3
    assert "starting over" not in result.stdout  # a finished environment is brought up to date where it is


def test_a_killed_set_up_is_begun_anew(clone):
    assert _set_up(clone, KILL="yes").returncode == -9
    (clone / ".venv" / "half").write_text("half a package")
    _installs(clone)
    result = _set_up(clone)
    assert result.returncode == 0 and "half made, starting over" in result.stdout
    assert len(_installs(clone)) == 3 and not (clone / ".venv" / "half").exists()


def test_an_environment_of_the_users_own_is_filled_not_removed(clone):
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(clone.parent / "tools" / "python3", clone / ".venv" / "bin" / "python")
    (clone / ".venv" / "mine").write_text("")
    assert _set_up(clone).returncode == 0
    assert (clone / ".venv" / "mine").exists() and len(_installs(clone)) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"OLD": "yes"}, "no Python 3.11 or newer found"),
        ({"NO_VENV": "yes"}, "apt-get install python3-venv"),
        ({"FAIL": "*dev-req*"}, "muonrl and what it needs failed; the whole output is in .cache/setup.log"),
        ({"FAIL": "*torch==*"}, "PyTorch, cpu build failed; the whole output is in .cache/setup.log"),
        ({"FAIL": "*rl]*"}, "muonrl and what it needs failed; the whole output is in .cache/setup.log"),
    ],
)
def test_what_is_missing_is_one_clear_line(clone, settings, words):
    result = _set_up(clone, **settings)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("setup: error: ") and words in result.stderr
    assert not (clone / ".venv" / ".muonrl-ready").exists()
    again = _set_up(clone)
    assert again.returncode == 0 and "starting over" not in again.stdout


def test_without_bubblewrap_the_package_is_named_or_installed(clone):
    (clone.parent / "tools" / "bwrap").unlink()
    result = _set_up(clone)
    assert result.returncode == 0 and "sudo apt-get install bubblewrap" in result.stderr
    apt = clone.parent / "tools" / "apt-get"
    apt.write_text('#!/bin/sh\necho "apt $*" >>"$JOURNAL"\n')
    apt.chmod(0o755)
    identity = clone.parent / "tools" / "id"
    identity.unlink()
    identity.write_text("#!/bin/sh\necho 0\n")
    identity.chmod(0o755)
    _installs(clone)
    assert _set_up(clone).returncode == 0
    assert _installs(clone) == ["apt update -q", "apt install -q -y bubblewrap"]
    apt.write_text("#!/bin/sh\nexit 100\n")
    result = _set_up(clone)
    assert result.returncode == 0 and "sudo apt-get install bubblewrap" in result.stderr

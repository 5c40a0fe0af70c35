"""docs/kernels.md says what the commands say."""

from pathlib import Path

import pytest

from benchmarks.cases import choose_cases
from benchmarks.cli import ESTIMATED
from benchmarks.estimate import estimate_loss_text, estimate_text
from benchmarks.loss_cases import choose_loss_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def section(name):
    text = PAGE.read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0].strip()


def test_the_estimate_is_the_current_one():
    # python -m benchmarks estimate --write docs/kernels.md
    assert section("estimate") == estimate_text(choose_cases(ESTIMATED["muon"]))
    # python -m benchmarks estimate loss --write docs/kernels.md
    assert section("estimate loss") == estimate_loss_text(choose_loss_cases(ESTIMATED["loss"], "cuda"))


def test_the_audit_lists_every_build_of_every_target():
    # python -m benchmarks audit --write docs/kernels.md
    from muonrl_kernels import builds

    rows = [line.split("|") for line in section("audit").splitlines()[2:]]
    listed = [(cells[2].strip(), cells[1].strip()) for cells in rows]
    assert listed == [(target, build.name) for target in builds.TARGETS for build in builds.builds(target)]


@pytest.mark.parametrize("command", ["run muon", "run loss", "compare", "audit", "estimate"])
def test_every_command_is_documented(command):
    assert f"python -m benchmarks {command}" in PAGE.read_text(encoding="utf-8")

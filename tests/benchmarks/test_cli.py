"""The command line, as a user calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.cli import main
from benchmarks.results import load

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_leaves_json_table_and_plot(tmp_path, capsys):
    output = tmp_path / "out"
    code = main(
        ["run", "muon", "--cases", "small", "--implementations", "torch,torch fp32", "--device", "cpu"]
        + ["--budget", "1", "--output", str(output)]
    )
    assert code == 0
    text = capsys.readouterr().out
    assert "## Correctness gate" in text and "ESTIMATE from the cost model" in text
    report = load(output / "muon.json")
    (case,) = report.cases
    assert {m.implementation for m in case.measurements} == {"muonrl", "torch", "torch fp32"}
    assert all(len(m.samples) >= 3 and m.memory is not None for m in case.measurements)
    assert report.machine["versions"]["torch"] and report.machine["commit"] and report.machine["threads"]
    assert (output / "muon.md").read_text() == text.rstrip("\n") + "\n"
    assert (output / "muon.png").stat().st_size > 1000


def test_the_instruction_set_is_restricted_before_torch_is_loaded(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in machine.ISA_VARIABLES["avx2"]}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", "muon", "--isa", "avx2", "--cases", "small"]
        + ["--implementations", "muonrl", "--budget", "0.1", "--threads", "1", "--output", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "muon.json").read_text())["machine"]
    assert found["cpu_capability"] in ("AVX2", "DEFAULT")
    assert found["isa_environment"] == machine.ISA_VARIABLES["avx2"]
    assert "imitates a CPU without bf16" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "muon", "--cases", "huge"], "cases must be among"),
        (["run", "muon", "--device", "cpu", "--implementations", "nobody"], "implementations must be among"),
        (["compare", "no-such-commit"], "BASE must be a commit"),
        (["compare", "HEAD", "--rounds", "0"], "must be at least 1, got 0 and 3"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: error: ") and message in error and error.count("\n") == 1


def test_the_estimate_takes_other_assumptions(capsys):
    assert main(["estimate", "--cases", "qwen3-60m"]) == 0
    first = capsys.readouterr().out
    assert main(["estimate", "--cases", "qwen3-60m", "--gemm", "0.4"]) == 0
    second = capsys.readouterr().out
    assert "reach 80% of the peak" in first and "reach 40% of the peak" in second and first != second

"""Comparing two source trees."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.cases import CASES
from benchmarks.compare import (
    Comparison,
    Subject,
    Worker,
    compare,
    kernels_of,
    loss_subject,
    muon_subject,
    to_table,
)
from benchmarks.loss_cases import LOSS_CASES
from benchmarks.measure import ratio

FAKE = """
import time
import torch

class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95):
        super().__init__(params, {{}})

    def step(self):
        end = time.perf_counter() + {seconds}
        while time.perf_counter() < end:
            pass
"""


TINY = Subject("tiny", "muon", {"shapes": ((2, 2, 1),)}, "one matrix", 1.0)


def comparison(samples, baseline):
    return Comparison("c", "a matrix", 1e9, ratio(samples, baseline), 0.05)


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([1.0, 1.0, 1.0, 1.0], "same"),
        ([1.04, 1.04, 1.03, 1.04], "same"),  # within the threshold
        ([1.2, 1.3, 1.1, 1.25], "slower"),
        ([0.8, 1.3, 0.7, 1.35], "same"),  # the quartiles disagree
        ([0.8, 0.9, 0.85, 0.7], "faster"),
        ([0.97, 0.96, 0.97, 0.97], "same"),
    ],
)
def test_verdicts(samples, verdict):
    assert comparison(samples, [1.0] * 4).verdict == verdict


def test_the_table_shows_ratio_and_spread():
    text = to_table([comparison([1.2, 1.3, 1.1, 1.25], [1.0] * 4)])
    assert "1.225" in text and "1.175-1.262" in text and "slower" in text


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository whose commit `fast` steps in 4 ms and whose working tree takes 8."""
    root = tmp_path_factory.mktemp("repository")
    package = root / "kernels" / "muonrl_kernels"
    package.mkdir(parents=True)

    def git(*words):
        subprocess.run(
            ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *words],
            check=True,
            capture_output=True,
        )

    git("init", "-q")
    (package / "__init__.py").write_text(FAKE.format(seconds=0.004))
    git("add", ".")
    git("commit", "-qm", "fast")
    git("tag", "fast")
    (package / "__init__.py").write_text(FAKE.format(seconds=0.008))
    return root


def test_a_slower_working_tree_is_found(repository):
    options = {"device": "cpu", "threads": 1, "rounds": 6, "processes": 1, "threshold": 0.05}
    subjects = [TINY]
    (found,) = compare("fast", subjects, log=lambda _: None, root=repository, **options)
    assert found.verdict == "slower" and found.ratio.count == 6
    assert 1.3 < found.ratio.median < 3.0


def test_the_base_is_taken_from_git_and_not_from_the_disk(repository):
    with kernels_of("fast", repository) as kernels:
        assert "0.004" in (kernels / "muonrl_kernels" / "__init__.py").read_text()
    assert not kernels.exists()
    with pytest.raises(ValueError, match="BASE must be a commit"), kernels_of("slow", repository):
        pass


def test_a_worker_of_the_wrong_tree_is_refused(tmp_path):
    with Worker(tmp_path, "cpu", 1) as worker, pytest.raises(RuntimeError, match="muonrl_kernels came from"):
        worker.prepare(TINY.suite, TINY.problem)


def test_a_case_is_cut_down_on_a_cpu_and_whole_on_a_gpu():
    for subject in (muon_subject(CASES["qwen3-60m"], "cpu"), loss_subject(LOSS_CASES["h512-30"], "cpu")):
        assert 0 < subject.flops <= 1.5e11
    loss = loss_subject(LOSS_CASES["h512-30"], "cuda")
    assert (loss.problem["rows"], loss.problem["valid"], loss.problem["linear"]) == (4096, 1229, True)
    # 6 x 1229 valid rows x 512 x 151936
    assert loss.flops == 6 * 1229 * 512 * 151936
    tokens = loss_subject(LOSS_CASES["tokens"], "cpu")
    assert tokens.problem["rows"] == tokens.problem["valid"] == 1 << 20 and not tokens.problem["linear"]


def test_both_losses_are_compared_with_their_own_tree():
    # The folder of the package that this process uses: the worker says that it timed the same one.
    import muonrl_kernels

    kernels = Path(muonrl_kernels.__file__).parents[1]
    with Worker(kernels, "cpu", 1) as worker:
        for linear in (True, False):
            problem = {"rows": 8, "hidden": 4, "vocabulary": 11, "valid": 3, "linear": linear}
            worker.prepare("loss", problem)
            assert worker.seconds() > 0

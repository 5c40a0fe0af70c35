"""Break the loss kernels in ways that are easy to get wrong, one at a time, and see that the tests notice.

    python tests/mutation_loss.py

Each fault is put into a copy of the project, where the tests that should catch it are run. A fault that they miss, or a text
that is no longer in the source, makes the exit status 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
KERNELS: Final = Path("kernels/muonrl_kernels")
ELEMENTWISE: Final = "tests/kernels/test_triton_policy_loss.py"
LINEAR: Final = "tests/kernels/test_triton_linear_policy_loss.py"


@dataclass(frozen=True)
class Mutation:
    """A fault: `old` becomes `new` in a file of the kernels, and `tests` of `suite` (as -k takes them) must fail."""

    name: str
    file: str
    old: str
    new: str
    suite: str
    tests: str


MUTATIONS: Final = (
    Mutation(
        "sign of the clip",
        "loss_math.py",
        "loss = tl.maximum(-ratio * advantage, -bounded * advantage,",
        "loss = tl.minimum(-ratio * advantage, -bounded * advantage,",
        ELEMENTWISE,
        "against_fp64",
    ),
    Mutation(
        "missing mask",
        "loss_kernels.py",
        "    return tl.where(valid, tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)",
        "    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)",
        ELEMENTWISE,
        "poison",
    ),
    Mutation(
        "wrong normaliser",
        "loss_kernels.py",
        "count = tl.sum(tl.where(entries == 0, sums, 0.0), axis=0)",
        "count = tl.sum(tl.where(entries == 0, sums, 0.0), axis=0) + 1.0",
        ELEMENTWISE,
        "many_programs",
    ),
    Mutation(
        "w not detached",
        "loss_math.py",
        "    slope = slope * w\n",
        "    slope = slope * w + loss\n",
        ELEMENTWISE,
        "against_fp64",
    ),
    Mutation(
        "lost tail tile",
        "loss_rows.py",
        "    for start in range(0, vocabulary, BLOCK):\n        columns = start + lanes\n        z = _logits(",
        "    for start in range(0, vocabulary // BLOCK * BLOCK, BLOCK):\n"
        "        columns = start + lanes\n        z = _logits(",
        LINEAR,
        "by_the_rule and every",
    ),
)


def copy_project(folder: Path) -> None:
    """What the tests of the kernels need."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / KERNELS, folder / KERNELS, ignore=ignore)
    (folder / "tests" / "kernels").mkdir(parents=True)
    for path in (ROOT / "tests" / "kernels").glob("*.py"):
        shutil.copy(path, folder / "tests" / "kernels" / path.name)
    shutil.copy(ROOT / "tests" / "numerics.py", folder / "tests" / "numerics.py")
    shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")


def run_tests(folder: Path, suite: str, tests: str) -> subprocess.CompletedProcess[str]:
    """Run some tests of one file inside the copy, until the first failure."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        suite,
        "-k",
        tests,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'kernels'}{os.pathsep}{folder}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def caught(mutation: Mutation | None, suite: str, tests: str) -> tuple[bool, str]:
    """Whether the tests fail with that fault (None: with the source as it is), and what pytest said last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        if mutation is not None:
            path = folder / KERNELS / mutation.file
            text = path.read_text(encoding="utf-8")
            if text.count(mutation.old) != 1:
                raise LookupError(f"{mutation.name}: its text is not in {mutation.file} exactly once")
            path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        result = run_tests(folder, suite, tests)
        if result.returncode not in (0, 1):
            raise RuntimeError(f"pytest could not run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
        return result.returncode == 1, result.stdout.strip().splitlines()[-1]


def main() -> int:
    """Try every fault; 0 if the source as it is passes and all faults are caught."""
    missed = 0
    for suite, tests in sorted({(m.suite, m.tests) for m in MUTATIONS}):
        failed, said = caught(None, suite, tests)
        missed += failed
        print(f"{'FAILS' if failed else 'passes':<7} unchanged, {tests}: {said}", flush=True)
    for mutation in MUTATIONS:
        found, said = caught(mutation, mutation.suite, mutation.tests)
        missed += not found
        print(f"{'caught' if found else 'MISSED':<7} {mutation.name}: {said}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

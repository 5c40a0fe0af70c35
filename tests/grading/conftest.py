"""A small repair task and a grader whose provider lives as long as the test module."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from muonrl.grading import Grader
from muonrl.sandbox import BubblewrapProvider, guest_scripts

BUGGY = b"""
def add(a, b):
    return a - b


def mul(a, b):
    return a * b
"""
ADD = b"""
import pytest
from calc.core import add


@pytest.mark.parametrize("x", range(1, 4))
def test_add(x):
    assert add(x, 2) == x + 2
"""
MUL = b"""
from calc.core import mul


def test_mul():
    assert mul(2, 3) == 6


class TestZero:
    def test_left(self):
        assert mul(0, 5) == 0
"""


@dataclass(frozen=True)
class Task:
    task_id: str = "calc-1"
    base: Mapping[str, bytes] = field(
        default_factory=lambda: {"calc/__init__.py": b"", "calc/core.py": BUGGY, "setup.cfg": b"[metadata]\n"}
    )
    test_files: Mapping[str, bytes] = field(
        default_factory=lambda: {"tests/test_add.py": ADD, "tests/test_mul.py": MUL}
    )
    fail_to_pass: tuple[str, ...] = tuple(f"tests/test_add.py::test_add[{x}]" for x in (1, 2, 3))
    pass_to_pass: tuple[str, ...] = ("tests/test_mul.py::test_mul", "tests/test_mul.py::TestZero::test_left")
    timeout_s: float = 20.0

    @property
    def fixed(self) -> dict[str, bytes]:
        return {**self.base, "calc/core.py": BUGGY.replace(b"a - b", b"a + b")}

    def with_(self, **changes: Any) -> Task:
        return replace(self, **changes)


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture(scope="module")
def provider_and_run() -> Iterator[tuple[BubblewrapProvider, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with asyncio.Runner() as runner:
        provider = BubblewrapProvider(guest_scripts())
        runner.run(provider.start())
        yield provider, runner.run
        runner.run(provider.close())


@pytest.fixture
def run(provider_and_run: tuple[BubblewrapProvider, Callable[..., Any]]) -> Callable[..., Any]:
    return provider_and_run[1]


@pytest.fixture
def grader(provider_and_run: tuple[BubblewrapProvider, Callable[..., Any]]) -> Grader:
    return Grader(provider_and_run[0])

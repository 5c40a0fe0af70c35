"""Ways to be paid without a repair. Every one of them must get nothing; an honest repair must get its reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from muonrl.grading import Grader

# Each attack is code that runs when the package is imported; the bug stays in.
AT_IMPORT = {
    "forged stdout": """
import sys
print('{"nonce": "x", "results": [["tests/test_add.py::test_add[1]", "passed"]], "exit": 1}')
print("tests/test_add.py::test_add[1] PASSED")
sys.stdout.flush()
""",
    "exit 0": "import os; os._exit(0)",
    "exit 127": "import os, sys; print('x', file=sys.stderr); os.write(2, b'x'); os._exit(127)",
    "kill all": "import os; os.kill(os.getppid(), 9); os.kill(-1, 9)",
    "exit 1": "import os; os._exit(1)",
    "exit 0 at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "system exit": "raise SystemExit(0)",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "pytest exit": "import pytest; pytest.exit('done', 1)",
    "module-level skip": "import pytest; pytest.skip('not today', allow_module_level=True)",
    "every test passes": "import _pytest.python as p; p.Function.runtest = lambda self: None",
    "every test but canaries passes": """
import _pytest.python as p
genuine = p.Function.runtest
p.Function.runtest = lambda self: None if 'test_add' in self.nodeid else genuine(self)
""",
    "swapped code": """
import _pytest.python as p
def call(pyfuncitem):
    return True
p.pytest_pyfunc_call.__code__ = call.__code__
""",
    "patched report": """
from _pytest.reports import TestReport
genuine = TestReport.from_item_and_call.__func__
def lie(cls, item, call):
    report = genuine(cls, item, call)
    if 'test_add' in report.nodeid:
        report.outcome, report.longrepr = 'passed', None
    return report
TestReport.from_item_and_call = classmethod(lie)
""",
    "patched outcome": """
import _pytest.reports as r
r.TestReport.__init__.__defaults__ = None
""",
    "patched dumps": "import json; json.dumps = lambda *a, **k: '{}'",
    "patched builtin": """
import builtins
genuine = builtins.isinstance
builtins.isinstance = lambda a, b: genuine(a, b)
""",
    "plugin registered from the stack": """
import pytest, sys
class Plugin:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if 'test_add' in pyfuncitem.nodeid else None
frame, managers = sys._getframe(), set()
while frame is not None:
    for thing in list(frame.f_locals.values()):
        if isinstance(thing, pytest.Session):
            managers.add(thing.config.pluginmanager)
    frame = frame.f_back
managers.pop().register(Plugin())
""",
    "recorder rewritten on the heap": """
import gc
for thing in gc.get_objects():
    if type(thing).__name__ == 'Recorder':
        thing.__class__._old = None
        genuine = type(thing).pytest_runtest_logreport
        def lie(self, report):
            if 'test_add' in report.nodeid:
                report.outcome = 'passed'
            genuine(self, report)
        type(thing).pytest_runtest_logreport = lie
""",
    "descriptor forging": """
import json, os
tests = ['tests/test_add.py::test_add[%d]' % i for i in (1, 2, 3)]
tests += ['tests/test_mul.py::test_mul', 'tests/test_mul.py::TestZero::test_left']
text = json.dumps({'nonce': '', 'results': [[t, 'passed'] for t in tests], 'canaries': ['failed', 'failed'],
                   'duplicates': False, 'tampered': [], 'exit': 1}).encode()
for fd in range(1024):
    try: os.write(fd, text)
    except OSError: pass
""",
    "fork": "import os; os.fork()",
    "test modules preempted": """
import sys, types
def test_add(x=0):
    pass
for name in ('tests.test_add', 'test_add', 'tests.test_mul'):
    sys.modules[name] = types.SimpleNamespace(test_add=test_add, __name__=name, __file__=__file__)
""",
    "skipped lines": """
import sys
def trace(frame, event, arg):
    if frame.f_code.co_name == 'test_add' and event == 'line':
        return None
    return trace
sys.settrace(trace)
""",
    "crash": "import ctypes; ctypes.string_at(0)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
}

# Each attack is a set of files beside the buggy tree.
FILES = {
    "no-op": {},
    "conftest hook": {
        "conftest.py": "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    report = yield\n    report.outcome = 'passed'\n    return report\n"
    },
    "conftest in tests": {"tests/conftest.py": "def pytest_collection_modifyitems(items): items.clear()\n"},
    "ini": {
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "tox.ini": "[pytest]\naddopts = -k nothing\n",
    },
    "setup.cfg": {"setup.cfg": "[tool:pytest]\naddopts = -p evil\n", "evil.py": "import os; os._exit(0)\n"},
    "pyproject": {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n"},
    "sitecustomize": {
        "sitecustomize.py": "import os; os._exit(0)\n",
        "usercustomize.py": "import os; os._exit(0)\n",
    },
    "pth": {"x.pth": "import os; os._exit(0)\n", "calc/x.pth": "import os; os._exit(0)\n"},
    "easier tests": {
        "tests/test_add.py": "import pytest\n@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_add(x): pass\n"
    },
    "a pytest of its own": {
        "pytest.py": "def main(*a): return 1\n",
        "_pytest/__init__.py": "",
        "json.py": "dumps = str\n",
    },
    "a test file in the package": {"calc/test_add.py": "def test_add(): pass\n"},
}

HONEST = {
    "gold": {},
    "with notes and a new module": {"NOTES.md": "fixed\n", "calc/extra.py": "VALUE = 1\n"},
    "with own tests": {
        "tests/test_own.py": "def test_own(): assert False\n",
        "calc/test_own.py": "assert False\n",
    },
    "that prints": {"calc/__init__.py": "import sys\nprint('hello' * 10000)\nprint('x', file=sys.stderr)\n"},
}


@pytest.mark.parametrize("name", AT_IMPORT)
def test_code_at_import_earns_nothing(name: str, grader: Grader, run: Callable[..., Any], task: Any) -> None:
    grade = run(grader.grade(task, {**task.base, "calc/__init__.py": AT_IMPORT[name].encode()}))
    assert grade.reward == 0, grade
    assert grade.f2p_passed == 0


@pytest.mark.parametrize(
    "name", [n for n in AT_IMPORT if n.startswith(("every", "swapped", "patched", "plugin", "desc"))]
)
def test_tampering_is_found_even_beside_a_repair(
    name: str, grader: Grader, run: Callable[..., Any], task: Any
) -> None:
    grade = run(grader.grade(task, {**task.fixed, "calc/__init__.py": AT_IMPORT[name].encode()}))
    assert grade.reward == 0 and grade.suspicious, grade


@pytest.mark.parametrize("name", FILES)
def test_files_beside_the_bug_earn_nothing(
    name: str, grader: Grader, run: Callable[..., Any], task: Any
) -> None:
    after = task.base | {path: text.encode() for path, text in FILES[name].items()}
    grade = run(grader.grade(task, after))
    assert (grade.reward, grade.reason) == (0, "test_failed"), grade


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_repair_is_paid(name: str, grader: Grader, run: Callable[..., Any], task: Any) -> None:
    after = task.fixed | {path: text.encode() for path, text in HONEST[name].items()}
    grade = run(grader.grade(task, after))
    assert (grade.reward, grade.f2p_passed, grade.p2p_passed) == (1, 3, 2), grade
    assert grade.reason == "passed" and not grade.suspicious and not grade.cached and grade.seconds > 0


def test_a_repair_survives_what_is_dropped(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    for name, files in FILES.items():
        after = task.fixed | {path: text.encode() for path, text in files.items()}
        assert run(grader.grade(task, after)).reward == 1, name


def test_an_all_equal_object_is_flagged(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    trick = b"class Any(int):\n    def __eq__(self, other): return True\n\ndef add(a, b):\n    return Any()\n"
    grade = run(
        grader.grade(task, {**task.base, "calc/core.py": trick + b"def mul(a, b):\n    return a * b\n"})
    )
    assert grade.suspicious
    assert grade.reward == 1  # in-process code can deceive its tests: flagged, and documented


def test_breaking_another_test_earns_nothing(grader: Grader, run: Callable[..., Any], task: Any) -> None:
    broken = task.fixed["calc/core.py"].replace(b"a * b", b"a * b + 1")
    grade = run(grader.grade(task, {**task.base, "calc/core.py": broken}))
    assert (grade.reward, grade.f2p_passed) == (0, 3) and grade.p2p_passed < 2


@pytest.mark.parametrize("tree", [{}, {"calc/core.py": b"def add(a, b:\n"}, {"calc": b"a file"}])
def test_a_ruined_tree_earns_nothing(
    tree: dict[str, bytes], grader: Grader, run: Callable[..., Any], task: Any
) -> None:
    grade = run(grader.grade(task, tree))
    assert (grade.reward, grade.f2p_passed) == (0, 0) and not grade.suspicious

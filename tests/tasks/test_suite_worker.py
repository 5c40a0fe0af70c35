"""The parts of the warm worker that can be shown inside this process."""

import json
import os
import sys
import time

import pytest

from muonrl.tasks import suite_worker
from muonrl.tasks.suite import write_tree


@pytest.fixture
def here(monkeypatch):
    """Undo what entering a tree changes in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(modules)


def test_calls_are_answered_in_order(tmp_path, monkeypatch, here):
    write_tree(
        tmp_path, {"workertoy/a.py": b"def f(x):\n    while x > 1:\n        pass\n    return 1 // x\n"}
    )
    monkeypatch.chdir(tmp_path)
    suite_worker._enter(tmp_path)
    job = {"path": "workertoy/a.py", "function": "f", "calls": ["[1]", "[0]", "[7]"]}
    results = suite_worker._run_calls(job)["results"]
    assert results == [("returned", "1"), ("raised", "ZeroDivisionError"), ("hung", "")]


def test_the_recorder_keeps_literal_arguments_of_plain_functions_called_by_tests(tmp_path, here):
    source = (
        b"def f(x, y=2):\n    return g(x)\n\n\ndef g(x):\n    return x\n\n\ndef many(*xs):\n    return xs\n"
    )
    write_tree(
        tmp_path,
        {"recordtoy/a.py": source, "tests/call.py": b"f(1)\nf(object())\nmany(1)\n(lambda: f('a'))()\n"},
    )
    sys.path.insert(0, str(tmp_path))
    import recordtoy.a as module

    recorder = suite_worker._Recorder(tmp_path)
    names = {"f": module.f, "many": module.many}
    code = compile((tmp_path / "tests" / "call.py").read_text(), str(tmp_path / "tests" / "call.py"), "exec")
    previous = sys.getprofile()
    sys.setprofile(recorder)
    try:
        exec(code, names)
    finally:
        sys.setprofile(previous)
    assert list(recorder.calls) == [("recordtoy/a.py", "f", "[1, 2]"), ("recordtoy/a.py", "f", "['a', 2]")]


def test_the_order_of_tests_comes_from_the_seed():
    class Item:
        def __init__(self, nodeid):
            self.nodeid = nodeid

    def order(seed, names):
        items = [Item(name) for name in names]
        suite_worker._Collector(seed).pytest_collection_modifyitems(items)
        return [item.nodeid for item in items]

    names = [f"t{i}" for i in range(20)]
    assert order(1, names) == order(1, names[::-1]) != order(2, names)


def test_jobs_are_lines_and_so_are_answers(tmp_path, monkeypatch, capsys, here):
    write_tree(tmp_path, {"linetoy.py": b"def f(x):\n    return x + 1\n"})
    base = {"kind": "calls", "root": str(tmp_path), "path": "linetoy.py", "function": "f", "timeout": 20}
    monkeypatch.setattr(
        sys, "stdin", [json.dumps({**base, "calls": ["[1]"]}), json.dumps({**base, "path": "no.py"})]
    )
    suite_worker.main()
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"results": [["returned", "2"]]}, {"error": "died"}]


def test_reading_stops_at_the_deadline():
    read, write = os.pipe()
    try:
        assert suite_worker._read_all(read, time.monotonic() + 0.02) is None
        os.write(write, b"x")
        os.close(write)
        assert suite_worker._read_all(read, time.monotonic() + 5) == b"x"
    finally:
        os.close(read)

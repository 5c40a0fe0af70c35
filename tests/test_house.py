"""The rules of the house: layout, sizes, import contracts, packaging and pins."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = ROOT / "muonrl" / "tasks" / "data"
SOURCES = sorted(
    path
    for folder in ("muonrl", "kernels")
    for path in (ROOT / folder).rglob("*.py")
    if DATA not in path.parents and "__pycache__" not in path.parts
)


def _length(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_source_roots_and_tests_are_no_packages():
    for folder in ("tests", "kernels", "scripts", "benchmarks"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    "path", [*SOURCES, *sorted((ROOT / "benchmarks").glob("*.py"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_and_functions_are_short(path):
    assert _length(path) <= 400
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert node.end_lineno - node.lineno < (100 if kernel else 60), (
                f"{path}:{node.lineno} {node.name}"
            )


def _lint_imports(folder):
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    return subprocess.run(
        [*command, "--no-cache", "--no-logo"], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_import_contracts_hold():
    result = _lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/muonrl_kernels/extra.py", "import muonrl.errors"),
        ("kernels/muonrl_kernels/extra.py", "import transformers"),
        ("kernels/muonrl_kernels/extra.py", "import benchmarks.cases"),
        ("muonrl/algorithms/extra.py", "import transformers"),
        ("muonrl/algorithms/extra.py", "import muonrl.tasks"),
        ("muonrl/errors.py", "import muonrl.trajectory"),
        ("muonrl/newcomer.py", "import os"),  # a module that has no place in the layers
    ],
)
def test_import_contracts_can_be_broken(tmp_path, path, line):
    ignore = shutil.ignore_patterns("data", "__pycache__")
    shutil.copytree(ROOT / "muonrl", tmp_path / "muonrl", ignore=ignore)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignore)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(text)
    with (tmp_path / path).open("a") as out:
        out.write(f"\n{line}\n")
    # The copy goes before the installed project on the path.
    code = (
        "import sys; sys.path[:0] = ['.', 'kernels']; "
        "from importlinter.cli import lint_imports_command as run; run(['--no-cache', '--no-logo'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1 and "BROKEN" in result.stdout, result.stdout + result.stderr


def test_the_kernels_import_alone_and_quietly():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'kernels')!r}); "
        "sys.modules['muonrl'] = sys.modules['transformers'] = None; import muonrl_kernels"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_wheel_holds_both_packages_with_their_data(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry,) = (n for n in names if n.endswith("entry_points.txt"))
        assert "muonrl = muonrl.cli:main" in archive.read(entry).decode()
    expected = {
        path.relative_to(root).as_posix()
        for root, package in ((ROOT, "muonrl"), (ROOT / "kernels", "muonrl_kernels"))
        for path in (root / package).rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
    }
    assert expected <= names, f"missing: {sorted(expected - names)[:10]}"
    assert {"muonrl/py.typed", "muonrl_kernels/py.typed", "muonrl/recipes/tiny.toml"} <= names
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"muonrl", "muonrl_kernels"}
    assert any(n.endswith("licenses/LICENSE") for n in names)


def _pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


def test_every_need_is_pinned_to_a_version_that_it_allows():
    pins = _pins()
    project = PROJECT["project"]
    needs = [
        *project["dependencies"],
        *PROJECT["dependency-groups"]["dev"],
        *PROJECT["build-system"]["requires"],
    ]
    needs += [need for extra in project["optional-dependencies"].values() for need in extra]
    for need in map(Requirement, needs):
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), need
    assert "+" not in "".join(pins.values()), "a local version exists on one machine only"


def _imported(folder):
    for path in SOURCES:
        if ROOT / folder in path.parents:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    yield from (name.name.split(".")[0] for name in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    yield node.module.split(".")[0]


def test_every_third_party_import_is_declared():
    project = PROJECT["project"]
    base = {canonicalize_name(Requirement(need).name) for need in project["dependencies"]}
    extra = {canonicalize_name(Requirement(n).name) for n in project["optional-dependencies"]["rl"]}
    own = {"muonrl", "muonrl_kernels", "__future__"} | sys.stdlib_module_names
    assert {canonicalize_name(n) for n in set(_imported("kernels")) - own} <= base
    # Guest scripts import the suites' own modules and the sandbox's files by their bare names.
    guests = {path.stem for path in SOURCES}
    found = {canonicalize_name(n.removeprefix("_")) for n in set(_imported("muonrl")) - own - guests}
    assert found <= base | extra


def test_the_version_is_in_the_changelog_or_unreleased():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", text, re.MULTILINE)

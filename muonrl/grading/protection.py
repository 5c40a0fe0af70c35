"""Which changes of the agent count, and which of them smell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

_DIRECTORIES = frozenset({".git", "__pycache__", "tests", "test", ".pytest_cache"})
_NAMES = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "usercustomize.py",
    }
)
_SUFFIXES = frozenset({".pth", ".pyc", ".so", ".pyd"})
_TEST_FILE = re.compile(r"(test_.*|.*_test)\.py")
_SMELLS = re.compile(
    r"__eq__|__code__|__subclasses__|\b_?pytest\b|\bPYTEST_|\bunittest\b|\b_exit\b|\bsys\.modules\b|\bimport\s+(gc|ctypes|inspect)\b"
    r"|\b_getframe\b|\bsettrace\b|\bsetprofile\b|\batexit\b|\bbuiltins\b|\bAssertionError\b"
)


def is_protected(path: str, test_files: Collection[str] = ()) -> bool:
    """True for a path that no repair may change: tests, test configuration, start-up hooks, compiled code, git data.

    Also true for a path that is no plain relative one.
    """
    pure = PurePosixPath(path)
    if not path.isprintable() or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        return True
    return (
        path in test_files
        or not _DIRECTORIES.isdisjoint(pure.parts)
        or pure.name in _NAMES
        or pure.suffix in _SUFFIXES
        or _TEST_FILE.fullmatch(pure.name) is not None
    )


def resulting_tree(
    base: Mapping[str, bytes], after: Mapping[str, bytes], test_files: Collection[str]
) -> dict[str, bytes]:
    """``base`` with the agent's allowed changes: allowed paths as in ``after``, protected ones as in ``base``."""
    kept = {path: data for path, data in base.items() if is_protected(path, test_files)}
    changed = {path: data for path, data in after.items() if not is_protected(path, test_files)}
    return dict(sorted((kept | changed).items()))


def smells(base: Mapping[str, bytes], tree: Mapping[str, bytes]) -> bool:
    """True if a changed Python file mentions test machinery or an all-equal object more often than before.

    A flag for a human eye, never a verdict: code that runs in the tests' own process can deceive them.
    """
    for path, data in tree.items():
        before = base.get(path, b"")
        if path.endswith(".py") and data != before:
            counts = [len(_SMELLS.findall(text.decode("utf-8", "replace"))) for text in (before, data)]
            if counts[1] > counts[0]:
                return True
    return False

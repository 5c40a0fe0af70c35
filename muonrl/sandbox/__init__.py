"""Isolated places where the agent's tools and the grader's tests run."""

from __future__ import annotations

from pathlib import Path

from muonrl.config import SandboxConfig
from muonrl.sandbox.bubblewrap import BubblewrapProvider
from muonrl.sandbox.process import ProcessProvider
from muonrl.sandbox.protocol import ExecResult, Limits, ProviderStats, Sandbox, SandboxProvider

__all__ = [
    "BubblewrapProvider",
    "ExecResult",
    "Limits",
    "ProcessProvider",
    "ProviderStats",
    "Sandbox",
    "SandboxProvider",
    "guest_scripts",
    "make_provider",
]


def guest_scripts() -> dict[str, Path]:
    """The scripts that every sandbox can ``call``: the agent's "tools" and the grader's test "runner"."""
    package = Path(__file__).resolve().parent.parent
    return {
        "tools": package / "agents" / "guest_tools.py",
        "runner": package / "grading" / "native_runner.py",
    }


def make_provider(config: SandboxConfig) -> SandboxProvider:
    """The provider that ``config`` asks for, not yet started, with room for one grading beside each agent.

    Raises SandboxUnavailable for the process backend without ``allow_unsandboxed``.
    """
    if config.backend == "process":
        return ProcessProvider(guest_scripts(), allow_unsandboxed=config.allow_unsandboxed)
    return BubblewrapProvider(guest_scripts(), max_active=2 * config.concurrency)

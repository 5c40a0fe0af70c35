"""The grader: rewards from hidden tests in a fresh sandbox."""

from __future__ import annotations

from muonrl.grading.grader import GradedTask, Grader

__all__ = ["GradedTask", "Grader"]

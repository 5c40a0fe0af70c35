"""The exceptions of the trainer. User-facing ones carry one clear line; infrastructure faults are a kind of their own."""

from __future__ import annotations


class MuonrlError(Exception):
    """A mistake or a lack that the user can mend: the command line prints its one line and exits with status 2."""


class ConfigError(MuonrlError):
    """A recipe, key or value that cannot be used."""


class TaskError(MuonrlError):
    """A task file that cannot be read or a task that cannot be graded."""


class CheckpointError(MuonrlError):
    """A checkpoint that is missing, incomplete or does not match its manifest."""


class SandboxUnavailable(MuonrlError):
    """No sandbox can be started on this machine; the text names the package to install."""


class InfrastructureError(Exception):
    """A sandbox or grader fault. It drops the rollout and is counted; it is never reward 0 and never a penalty.

    ``reason`` is a short slug under which the drop is counted, e.g. ``sandbox_died``.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

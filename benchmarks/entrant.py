"""What every suite knows of the implementations that it measures, whatever they implement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar

import torch

__all__ = ["OURS", "Entrant", "Unavailable", "Verdict", "collect", "one_line", "patched", "unpatched"]

OURS: Final = "muonrl"
"""Name of our implementation in its defaults, in every suite: what everything else is compared with."""

T = TypeVar("T")


class Entrant(Protocol):
    """An implementation in one configuration."""

    @property
    def name(self) -> str:
        """As printed."""

    @property
    def note(self) -> str:
        """How it was configured."""

    @property
    def compute(self) -> torch.dtype:
        """Dtype that it computes in."""


@dataclass(frozen=True)
class Unavailable:
    """An implementation that cannot be measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Outcome of a correctness gate: the error that is the largest share of its bound, that bound, and a reason."""

    passed: bool
    error: float
    bound: float
    reason: str


def unpatched() -> AbstractContextManager[None]:
    """The context of an implementation that runs as it is."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def patched(module: ModuleType, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Put other objects under some names of a module for as long as the context lasts."""
    before = {name: getattr(module, name) for name in replacements}
    for name, value in replacements.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def collect(
    makers: Mapping[str, Callable[[bool], list[T]]], device: torch.device
) -> tuple[list[T], list[Unavailable]]:
    """What each maker finds (it is told whether it is for a GPU), and the error of every one that finds nothing."""
    found: list[T] = []
    missing: list[Unavailable] = []
    for name, make in makers.items():
        try:
            found += make(device.type == "cuda")
        except ModuleNotFoundError as error:
            missing.append(Unavailable(name, f"not installed ({error})"))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is reported beside its name
            missing.append(Unavailable(name, one_line(error)))
    return found, missing

"""What is compared: our Muon, torch.optim.Muon as shipped and iterating in fp32, and the peers that are installed."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import Parameter

from benchmarks.entrant import OURS, patched, unpatched
from muonrl_kernels import Muon
from muonrl_kernels.backend import fast_compute_dtype
from muonrl_kernels.coefficients import KJ, Triple

__all__ = [
    "LEARNING_RATE",
    "MOMENTUM",
    "OURS_FP32",
    "TORCH",
    "Implementation",
    "in_fp32",
    "own_implementations",
    "plain_scale",
    "rewritten",
]

OURS_FP32: Final = "muonrl fp32"
TORCH: Final = "torch"
LEARNING_RATE: Final = 1e-3
MOMENTUM: Final = 0.95


def plain_scale(rows: int, columns: int) -> float:
    """torch.optim.Muon's default factor on the learning rate, sqrt(max(1, rows / columns))."""
    return float(max(1.0, rows / columns) ** 0.5)


@dataclass(frozen=True)
class Implementation:
    """One optimizer in one configuration.

    Attributes:
        name: as printed.
        note: how it was configured, and how it was made to iterate in fp32 where it was.
        compute: dtype of the iteration.
        make: (parameters, learning rate, weight decay) -> the optimizer.
        algorithm: its key in the cost model.
        coefficients: (a, b, c) of each step.
        norm_factor: what the Frobenius norm is multiplied by before dividing.
        scale: factor of (rows, columns) between the orthogonalized matrix and the update; None if it is left open.
        active: context in which its steps run.
    """

    name: str
    note: str
    compute: torch.dtype
    make: Callable[[list[Parameter], float, float], Any]
    algorithm: str
    coefficients: Sequence[Triple] = KJ.coefficients
    norm_factor: float = 1.0
    scale: Callable[[int, int], float] | None = plain_scale
    active: Callable[[], AbstractContextManager[Any]] = unpatched


def rewritten(module: ModuleType, name: str, changes: Mapping[str, str]) -> Any:
    """A function of `module` made anew from its own source with some text changed.

    So the code that is measured stays its authors', but for the casts.

    Raises:
        RuntimeError: the source does not contain a text that was to be changed; the function is another one by now.
    """
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    for old, new in changes.items():
        if old not in source:
            raise RuntimeError(f"{module.__name__}.{name} no longer contains {old!r}")
        source = source.replace(old, new)
    scope = dict(vars(module))
    exec(compile(source, f"<{module.__name__}.{name} in fp32>", "exec"), scope)
    return scope[name]


def in_fp32(
    module: ModuleType, changes: Mapping[str, Mapping[str, str]]
) -> Callable[[], AbstractContextManager[None]]:
    """A context in which functions of `module` run without their casts to half precision."""
    replacements = {name: rewritten(module, name, edits) for name, edits in changes.items()}
    return lambda: patched(module, replacements)


def _ours(params: list[Parameter], lr: float, decay: float) -> Any:
    return Muon(params, lr=lr, weight_decay=decay, momentum=MOMENTUM)


def _ours_in_fp32(params: list[Parameter], lr: float, decay: float) -> Any:
    return Muon(params, lr=lr, weight_decay=decay, momentum=MOMENTUM, compute_dtype=torch.float32)


def _torch(params: list[Parameter], lr: float, decay: float) -> Any:
    return torch.optim.Muon(params, lr=lr, weight_decay=decay, momentum=MOMENTUM)


def own_implementations(device: torch.device) -> list[Implementation]:
    """Ours and torch's; on a CPU each of them in fp32 as well, so that equal precision is compared."""
    fast = fast_compute_dtype(device)
    on_gpu = device.type == "cuda"
    found = [Implementation(OURS, "muonrl_kernels.Muon, defaults", fast, _ours, "fused" if on_gpu else "own")]
    if not on_gpu and fast != torch.float32:
        found.append(
            Implementation(OURS_FP32, "compute_dtype=torch.float32", torch.float32, _ours_in_fp32, "own")
        )
    found.append(Implementation(TORCH, "torch.optim.Muon as shipped, bf16", torch.bfloat16, _torch, "torch"))
    if not on_gpu:
        import torch.optim._muon as module

        active = in_fp32(
            module, {"_zeropower_via_newtonschulz": {"grad.bfloat16()": "grad.to(torch.float32, copy=True)"}}
        )
        note = "torch.optim.Muon, its own function made anew from its source with a copy in place of the cast to bf16"
        found.append(Implementation("torch fp32", note, torch.float32, _torch, "torch", active=active))
    return found

"""The one place that decides whether an operation runs as a Triton kernel or as PyTorch operations.

Every public operation takes ``backend="auto" | "triton" | "torch"`` and asks :func:`resolve`. "auto" never fails and
says once per operation and device, through :mod:`logging` (level INFO), what was taken and why; "triton" is a demand
and raises where it cannot be met; "torch" always works.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch

__all__ = [
    "BACKENDS",
    "KERNELS",
    "Backend",
    "Choice",
    "explain",
    "fast_compute_dtype",
    "resolve",
    "takes_loss_kernels",
    "takes_triton",
]

Backend = Literal["auto", "triton", "torch"]
BACKENDS: Final[tuple[str, ...]] = ("auto", "triton", "torch")

KERNELS: Final[frozenset[str]] = frozenset(
    {"orthogonalize", "muon", "policy_loss", "linear_logprob", "linear_policy_loss"}
)
"""Names of the operations that have a Triton kernel in this version."""

_MATRIX_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_ITERATION_DTYPES: Final = (None, torch.float16, torch.bfloat16)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What runs (``"triton"`` or ``"torch"``) and the reason in one sentence."""

    name: Literal["triton", "torch"]
    reason: str


def _interprets() -> bool:
    """Whether TRITON_INTERPRET=1 makes Triton run kernels on the CPU, slowly, for tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _obstacle(operation: str, device_type: str) -> str | None:
    """Why `operation` cannot run as a Triton kernel on that kind of device; None if it can."""
    if operation not in KERNELS:
        return f"this version of muonrl_kernels has no Triton kernel for {operation}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu" and not _interprets():
        return "the tensors are on the CPU, where Triton does not run"
    if device_type not in ("cpu", "cuda"):
        return f"there is no Triton kernel for {device_type} devices"
    return None


def explain(operation: str, device: torch.device | str = "cpu") -> Choice:
    """The choice that ``backend="auto"`` makes for `operation` on `device`, without logging anything.

    Never Triton on the CPU: its interpreter is for whoever asks for it by name.
    """
    device_type = torch.device(device).type
    obstacle = _obstacle(operation, device_type)
    if obstacle is None and device_type != "cpu":
        return Choice("triton", f"a Triton kernel for {operation} is available")
    return Choice("torch", obstacle or "on the CPU Triton only interprets")


@cache
def _announce(operation: str, device_type: str, choice: Choice) -> None:
    """Log a choice of "auto"; the cache makes it once per operation and kind of device."""
    _log.info("%s on %s: %s (%s)", operation, device_type, choice.name, choice.reason)


def resolve(requested: str, operation: str, device: torch.device | str = "cpu") -> Choice:
    """Decide the backend of one operation.

    Args:
        requested: "auto", "triton" or "torch".
        operation: name of the public operation, such as "orthogonalize".
        device: where the tensors are.

    Raises:
        ValueError: `requested` is not one of the three names.
        RuntimeError: `requested` is "triton" and the kernel is not available; the text says why.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if requested == "torch":
        return Choice("torch", "requested")
    device_type = torch.device(device).type
    if requested == "triton":
        if obstacle := _obstacle(operation, device_type):
            raise RuntimeError(f"backend='triton' is not available for {operation}: {obstacle}")
        return Choice("triton", "requested")
    choice = explain(operation, device_type)
    _announce(operation, device_type, choice)
    return choice


def takes_triton(
    requested: str,
    operation: str,
    device: torch.device,
    tensors: Iterable[torch.dtype],
    compute_dtype: torch.dtype | None,
) -> bool:
    """Whether an operation on matrices of those dtypes, iterated in `compute_dtype`, runs on Triton kernels.

    Raises:
        RuntimeError: `requested` is "triton" and there is no kernel for a dtype or on the device.
    """
    if resolve(requested, operation, device).name != "triton":
        return False
    lacking = [d for d in tensors if d not in _MATRIX_DTYPES]
    if compute_dtype not in _ITERATION_DTYPES:
        lacking.append(compute_dtype)
    if lacking and requested == "triton":
        raise RuntimeError(f"backend='triton' is not available for {operation} in {lacking[0]}")
    return not lacking


def takes_loss_kernels(
    requested: str, operation: str, device: torch.device, dtype: torch.dtype, loss_type: str | None = None
) -> bool:
    """Whether a loss of inputs in `dtype` runs on Triton kernels.

    There are none for fp64, and none for gspo where the loss is elementwise: its tokens wait for their sequence twice.

    Raises:
        RuntimeError: `requested` is "triton" and there is no kernel.
    """
    if resolve(requested, operation, device).name != "triton":
        return False
    lacking = str(dtype) if dtype not in _MATRIX_DTYPES else None
    if operation == "policy_loss" and loss_type == "gspo":
        lacking = "loss_type gspo"
    if lacking and requested == "triton":
        raise RuntimeError(f"backend='triton' is not available for {operation} in {lacking}")
    if lacking:
        _announce(
            operation, f"{device.type} in {lacking}", Choice("torch", "there is no Triton kernel for it")
        )
    return lacking is None


@cache
def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware.

    Without such instructions a bf16 product on the CPU is two orders of magnitude slower than an fp32 one. oneDNN's own
    answer is not enough on x86: it also says yes where it emulates bf16 with AVX-512.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # also where the environment restricts oneDNN
        return False
    if torch.backends.cpu.get_cpu_capability().startswith(("AVX", "DEFAULT")):
        probes = (
            getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        )
        return any(bool(probe()) for probe in probes if probe is not None)
    return True


def fast_compute_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype in which the iteration on `device` is fast and accurate enough.

    fp16 on CUDA and ROCm devices: three more bits than bf16 at the same speed, and the Gram form is stable in it. On a
    CPU bf16 where the hardware has it. Else fp32.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.float16
    return torch.bfloat16 if kind == "cpu" and _cpu_has_bf16() else torch.float32

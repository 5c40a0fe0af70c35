"""What a parameter group of Muon may say, and the checks that turn a mistake into one clear ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from muonrl_kernels.backend import BACKENDS, resolve
from muonrl_kernels.coefficients import Schedule, Triple, resolve_schedule
from muonrl_kernels.iteration import HALF, ScheduleLike, check_options

__all__ = [
    "ADJUST_NAMES",
    "ALGORITHMS",
    "MOMENTUM_STYLES",
    "VARIANTS",
    "AdjustLr",
    "Split",
    "StepOptions",
    "check_group",
    "lr_ratio",
    "plain_schedule",
]

AdjustLr: TypeAlias = str | Callable[[torch.Size], float] | None
Sizes: TypeAlias = int | Sequence[int] | None
Split: TypeAlias = Sizes | Callable[[Tensor], Sizes]

ALGORITHMS: Final = ("muon", "adamw")
ADJUST_NAMES: Final = ("original", "match_rms_adamw", "spectral_unclamped", "unscaled")
MOMENTUM_STYLES: Final = ("ema", "sum")
VARIANTS: Final = ("muon", "normuon")
_MOMENTUM_DTYPES: Final = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLAGS: Final = (
    "nesterov",
    "flatten",
    "batched_matrices",
    "cautious_wd",
    "stochastic_rounding",
    "capturable",
)


@dataclass(frozen=True)
class StepOptions:
    """All that one step of a Muon group depends on besides its tensors.

    Attributes:
        lr: learning rate; a one-element device tensor with `capturable`, else a float.
        weight_decay, momentum, nesterov, momentum_style, eps: as the constructor's.
        schedule: the Newton-Schulz steps.
        normalize, method, compute_dtype: how they are run.
        cautious_wd: decay only where update and weight agree in sign.
        variant: "muon" or "normuon"; beta2 belongs to the latter.
        stochastic_rounding: round updates of half-precision weights without bias, by the noise of `rounding_seed`, the
            item's stream and its step counter.
        capturable: nothing may be read back to the host.
        max_workspace_bytes: bound on a stack of matrices, None for the default.
    """

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    momentum_style: str
    schedule: Schedule
    normalize: str
    method: str
    compute_dtype: torch.dtype | None
    eps: float
    cautious_wd: bool
    variant: str
    beta2: float
    stochastic_rounding: bool
    rounding_seed: int
    capturable: bool
    max_workspace_bytes: int | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> StepOptions:
        """The options of a parameter group as they stand now; schedulers may have changed its numbers."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and not group["capturable"]:
            lr = lr.item()
        same = (
            "nesterov momentum_style normalize method compute_dtype eps cautious_wd variant beta2 "
            "stochastic_rounding rounding_seed capturable max_workspace_bytes"
        )
        return cls(
            lr=lr,
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            schedule=group_schedule(group),
            **{key: group[key] for key in same.split()},
        )


def lr_ratio(adjust_lr_fn: AdjustLr, shape: Sequence[int]) -> float:
    """Factor on the learning rate of a matrix [A, B].

    None or "original": sqrt(max(1, A/B)); "match_rms_adamw": 0.2 sqrt(max(A, B)); "spectral_unclamped": sqrt(A/B);
    "unscaled": 1; a callable gets the shape and returns the factor.
    """
    if callable(adjust_lr_fn):
        return float(adjust_lr_fn(torch.Size(shape)))
    rows, columns = shape[0], shape[1]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "unscaled":
        return 1.0
    ratio = rows / max(1, columns)
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


def plain_schedule(spec: ScheduleLike | None) -> str | tuple[Triple, ...] | None:
    """A schedule as names and numbers only, so that a saved state dict loads with weights_only=True."""
    if spec is None or isinstance(spec, str):
        if spec is not None:
            resolve_schedule(spec)
        return spec
    schedule = spec if isinstance(spec, Schedule) else resolve_schedule(spec)
    return schedule.coefficients


def group_schedule(group: Mapping[str, Any]) -> Schedule:
    """The Newton-Schulz steps of a group: `ns_schedule`, or `ns_steps` times `ns_coefficients`."""
    if group["ns_schedule"] is not None:
        return resolve_schedule(group["ns_schedule"])
    return resolve_schedule(group["ns_coefficients"], group["ns_steps"])


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for numbers and names of a complete group (defaults filled in) that no step could use."""
    _check_numbers(group)
    if group["algorithm"] == "adamw":
        _check_adamw(group)
        return
    adjust = group["adjust_lr_fn"]
    if adjust is not None and not callable(adjust) and adjust not in ADJUST_NAMES:
        raise ValueError(
            f"Adjust learning rate function {adjust} is not supported; the names are {', '.join(ADJUST_NAMES)}"
        )
    for key, allowed in (
        ("momentum_style", MOMENTUM_STYLES),
        ("variant", VARIANTS),
        ("backend", BACKENDS),
        ("momentum_dtype", _MOMENTUM_DTYPES),
        ("split_dim", (0, 1)),
        *((flag, (False, True)) for flag in _FLAGS),
    ):
        if group[key] not in allowed:
            raise ValueError(f"{key} must be one of {', '.join(map(str, allowed))}; got {group[key]!r}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(
            f"ns_coefficients must be a tuple of exactly 3 values, got {group['ns_coefficients']!r}"
        )
    group_schedule(group)
    check_options(group["method"], group["normalize"], group["compute_dtype"])
    _check_counts(group)


def check_tensors(group: Mapping[str, Any]) -> None:
    """Raise ValueError (RuntimeError for backend="triton") where options and the group's parameters do not fit."""
    if group["algorithm"] == "muon":
        for device in {p.device for p in group["params"]}:
            resolve(group["backend"], "muon", device)
        half = any(p.dtype in HALF for p in group["params"])
        if group["stochastic_rounding"] and group["params"] and not half:
            raise ValueError(
                "stochastic_rounding is for bfloat16 and float16 parameters; this group has "
                f"only {', '.join(sorted({str(p.dtype) for p in group['params']}))}"
            )
    lr = group["lr"]
    if group["capturable"] and isinstance(lr, Tensor):
        others = {str(p.device) for p in group["params"]} - {str(lr.device)}
        if others:
            raise ValueError(
                f"capturable needs lr on the parameters' device {', '.join(others)}; got a tensor on {lr.device}"
            )


def _check_numbers(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}")
    for label, key in (
        ("Learning rate", "lr"),
        ("momentum", "momentum"),
        ("weight_decay", "weight_decay"),
        ("eps", "eps"),
    ):
        if not group[key] >= 0.0:
            raise ValueError(f"{label} should be >= 0 but is: {group[key]}")
    if group["momentum_style"] == "ema" and group["momentum"] > 1.0:
        raise ValueError(f"momentum of an average should be <= 1 but is: {group['momentum']}")


def _check_adamw(group: Mapping[str, Any]) -> None:
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")


def _check_counts(group: Mapping[str, Any]) -> None:
    if not 0.0 <= group["beta2"] < 1.0:
        raise ValueError(f"beta2 must lie in [0, 1), got {group['beta2']}")
    seed, bytes_ = group["rounding_seed"], group["max_workspace_bytes"]
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"rounding_seed must be an integer in 0..2**63 - 1, got {seed!r}")
    if bytes_ is not None and (not isinstance(bytes_, int) or bytes_ < 1):
        raise ValueError(f"max_workspace_bytes must be None or a positive integer, got {bytes_!r}")

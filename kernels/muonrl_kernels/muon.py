"""The Muon optimizer: torch.optim.Muon's signature, defaults, update and state, with batched orthogonalization.

Per matrix W with gradient G (Keller Jordan 2024; Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982):

    M <- M + (1 - mu)(G - M);   U = G + mu (M - G) if nesterov else M
    W <- (1 - lr wd) W - lr adjust(shape) NewtonSchulz(U)

Differences from torch.optim.Muon, all of them deliberate: `eps` only guards the all-zero matrix (the gradient's scale
never matters, while torch clamps its raw norm); a matrix whose gradient is not finite is skipped and counted; the
momentum is never written to by the orthogonalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from muonrl_kernels.backend import resolve
from muonrl_kernels.coefficients import Schedule, Triple, resolve_schedule
from muonrl_kernels.newton_schulz import METHODS, NORMALIZATIONS, ScheduleLike, orthogonalize_list

__all__ = ["ALGORITHMS", "AdjustLr", "Muon", "convert_momentum", "lr_ratio"]

AdjustLr: TypeAlias = str | Callable[[torch.Size], float] | None
ALGORITHMS: Final = ("muon", "adamw")
_ADJUST_NAMES: Final = ("original", "match_rms_adamw", "spectral_unclamped")
_MOMENTUM_STYLES: Final = ("ema", "sum")
_ADAMW_DEFAULTS: Final[Mapping[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}


def lr_ratio(adjust_lr_fn: AdjustLr, shape: torch.Size) -> float:
    """Factor on the learning rate of a matrix [A, B, ...].

    None or "original": sqrt(max(1, A/B)); "match_rms_adamw": 0.2 sqrt(max(A, B)); "spectral_unclamped": sqrt(A/B);
    a callable gets the shape and returns the factor.
    """
    if callable(adjust_lr_fn):
        return float(adjust_lr_fn(shape))
    rows, columns = shape[0], shape[1]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / max(1, columns)
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


def convert_momentum(state_dict: Mapping[str, Any], to: str) -> dict[str, Any]:
    """A copy of a Muon state dict with its momentum buffers in the other convention.

    The sum buffer of older implementations (M <- mu M + G) is the EMA buffer divided by 1 - mu, as long as mu is
    constant. `to` is "ema" or "sum"; groups that are already in that style are left as they are.
    """
    if to not in _MOMENTUM_STYLES:
        raise ValueError(f"momentum style must be ema or sum, got {to!r}")
    state = {key: dict(value) for key, value in state_dict["state"].items()}
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if group.get("algorithm", "muon") != "muon" or group.get("momentum_style", "ema") == to:
            continue
        factor = 1.0 - group["momentum"]
        for key in group["params"]:
            if "momentum_buffer" in state.get(key, {}):
                buffer = state[key]["momentum_buffer"]
                state[key]["momentum_buffer"] = buffer * factor if to == "ema" else buffer / factor
        group["momentum_style"] = to
    return {**state_dict, "state": state, "param_groups": groups}


def _as_float(value: float | Tensor) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def _check_scalars(lr: float | Tensor, weight_decay: float, momentum: float) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for label, value in (("Learning rate", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
        if not value >= 0.0:
            raise ValueError(f"{label} should be >= 0 but is: {value}")


def _plain_schedule(spec: ScheduleLike | None) -> str | tuple[Triple, ...] | None:
    """A schedule as names and numbers only, so that a saved state dict loads with weights_only=True."""
    if spec is None or isinstance(spec, str):
        if spec is not None:
            resolve_schedule(spec)
        return spec
    schedule = spec if isinstance(spec, Schedule) else resolve_schedule(spec)
    return schedule.coefficients


class Muon(torch.optim.Optimizer):
    """Muon for hidden weight matrices, AdamW for parameter groups marked ``algorithm="adamw"``.

    The positional arguments are torch.optim.Muon's. A group ``{"params": ..., "algorithm": "adamw"}`` is updated with
    decoupled AdamW and may set `betas` (0.9, 0.999) and `eps` (1e-8 there); `lr` and `weight_decay` default to the
    constructor's. :func:`muonrl_kernels.split_params` makes such groups from a model.

    Args:
        params: 2-D parameters (more dimensions with `flatten`), or parameter groups.
        lr: learning rate, a float or a one-element tensor.
        weight_decay: decoupled weight decay.
        momentum: mu of the moving average of gradients.
        nesterov: look ahead along the momentum.
        ns_coefficients: (a, b, c), used in each of `ns_steps` steps unless `ns_schedule` is given.
        eps: floor on the norm of a matrix scaled to entries of at most 1; guards the all-zero matrix only.
        ns_steps: number of steps with `ns_coefficients`, less than 100.
        adjust_lr_fn: None, "original", "match_rms_adamw", "spectral_unclamped", or a callable of the matrix shape.
        ns_schedule: preset name, Schedule or sequence of (a, b, c); takes the place of the two arguments above.
        normalize: "frobenius" or "schatten4".
        method: form of the iteration, "auto", "standard", "symmetric" or "gram".
        backend: "auto", "triton" or "torch".
        momentum_style: "ema" (torch) or "sum" (M <- mu M + G; see :func:`convert_momentum`).
        flatten: treat [A, B, C, ...] (convolutions) as the matrix [A, B*C*...] instead of refusing it.
        compute_dtype: dtype of the iteration; None asks the machine (fp32 on CPUs without bf16 instructions).

    Raises:
        ValueError: a bad hyper-parameter or a parameter that is not a matrix.
        RuntimeError: complex parameters, sparse gradients, or backend="triton" where it is not available.
    """

    skipped: int = 0
    """Number of parameter updates left out so far because their gradient was not finite."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = None,
        *,
        ns_schedule: ScheduleLike | None = None,
        normalize: str = "frobenius",
        method: str = "auto",
        backend: str = "auto",
        momentum_style: str = "ema",
        flatten: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        _check_scalars(lr, weight_decay, momentum)
        resolve(backend, "muon")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": "muon",
            "ns_schedule": _plain_schedule(ns_schedule),
            "normalize": normalize,
            "method": method,
            "backend": backend,
            "momentum_style": momentum_style,
            "flatten": flatten,
            "compute_dtype": compute_dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking that its options and the shapes of its parameters fit its algorithm."""
        algorithm = param_group.get("algorithm", "muon")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be muon or adamw, got {algorithm!r}")
        if algorithm == "adamw":
            for key, value in _ADAMW_DEFAULTS.items():
                param_group.setdefault(key, value)
        if "ns_schedule" in param_group:
            param_group["ns_schedule"] = _plain_schedule(param_group["ns_schedule"])
        merged = {**self.defaults, **param_group}
        _check_scalars(merged["lr"], merged["weight_decay"], merged["momentum"])
        if algorithm == "muon":
            _check_muon_options(merged)
        super().add_param_group(param_group)
        try:
            _check_shapes(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Complete groups saved by torch.optim.Muon with this optimizer's own options."""
        present = getattr(self, "param_groups", [])
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            known = present[index] if index < len(present) else self.defaults
            for key, value in known.items():
                if key != "params":
                    group.setdefault(key, value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one update of every parameter that has a gradient; returns what `closure` returned, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = self._ready(group)
            if not params:
                continue
            if group["algorithm"] == "adamw":
                self._step_adamw(group, params)
            else:
                self._step_muon(group, params)
        return loss

    def _ready(self, group: Mapping[str, Any]) -> list[Tensor]:
        """Parameters of a group with a usable gradient; those with a non-finite one are counted and left alone."""
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if torch.is_complex(p):
                raise RuntimeError("Muon does not support complex parameters")
            if cast(Tensor, p.grad).is_sparse:
                raise RuntimeError("Muon does not support sparse gradients")
        filled = [p for p in params if p.numel()]
        finite = _finite([cast(Tensor, p.grad) for p in filled])
        self.skipped += len(filled) - sum(finite)
        return [p for p, good in zip(filled, finite, strict=True) if good]

    def _step_muon(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        resolve(group["backend"], "muon", params[0].device)
        grads = [cast(Tensor, p.grad) for p in params]
        updates = self._momentum(group, params, grads)
        matrices = [u.reshape(u.shape[0], -1) for u in updates]
        solved = orthogonalize_list(
            matrices,
            _group_schedule(group),
            normalize=group["normalize"],
            method=group["method"],
            compute_dtype=group["compute_dtype"],
            eps=group["eps"],
        )
        lr = _as_float(group["lr"])
        torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        ratios: dict[torch.Size, float] = {}
        for p, matrix, ortho in zip(params, matrices, solved, strict=True):
            ratio = ratios.get(matrix.shape)
            if ratio is None:
                ratio = ratios[matrix.shape] = lr_ratio(group["adjust_lr_fn"], matrix.shape)
            p.add_(ortho.reshape(p.shape).to(p.dtype), alpha=-lr * ratio)

    def _momentum(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> Sequence[Tensor]:
        """Advance the momentum buffers; returns what is to be orthogonalized (never p.grad itself)."""
        for p, grad in zip(params, grads, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffers: list[Tensor] = [self.state[p]["momentum_buffer"] for p in params]
        mu = _as_float(group["momentum"])
        if group["momentum_style"] == "sum":
            torch._foreach_mul_(buffers, mu)
            torch._foreach_add_(buffers, grads)
            return torch._foreach_add(grads, buffers, alpha=mu) if group["nesterov"] else buffers
        torch._foreach_lerp_(buffers, grads, 1.0 - mu)
        return torch._foreach_lerp(grads, buffers, mu) if group["nesterov"] else buffers

    def _step_adamw(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        adamw(
            params,
            [cast(Tensor, p.grad) for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=_as_float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _finite(grads: list[Tensor]) -> list[bool]:
    """Whether each gradient is finite throughout; one small read back, which is free on the CPU.

    A finite sum of squares proves it; only where that overflows is every entry looked at.
    """
    if not grads:
        return []
    proven = torch.stack([norm.float() for norm in torch._foreach_norm(grads)]).isfinite().tolist()
    return [good or bool(g.isfinite().all()) for good, g in zip(proven, grads, strict=True)]


def _group_schedule(group: Mapping[str, Any]) -> Schedule:
    if group["ns_schedule"] is not None:
        return resolve_schedule(group["ns_schedule"])
    return resolve_schedule(group["ns_coefficients"], group["ns_steps"])


def _check_muon_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a Muon group that the first step would trip over."""
    adjust = group["adjust_lr_fn"]
    if adjust is not None and not callable(adjust) and adjust not in _ADJUST_NAMES:
        raise ValueError(f"Adjust learning rate function {adjust} is not supported")
    for key, allowed in (
        ("normalize", NORMALIZATIONS),
        ("method", METHODS),
        ("momentum_style", _MOMENTUM_STYLES),
    ):
        if group[key] not in allowed:
            raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {group[key]!r}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError("ns_coefficients must be a tuple of exactly 3 values")
    _group_schedule(group)


def _check_shapes(group: Mapping[str, Any]) -> None:
    if group["algorithm"] != "muon":
        return
    for p in group["params"]:
        if p.ndim != 2 and not (group["flatten"] and p.ndim > 2):
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}"
            )

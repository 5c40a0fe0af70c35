"""The Muon optimizer: torch.optim.Muon's signature, defaults, update and state, with batched orthogonalization.

Per matrix W with gradient G (Keller Jordan 2024; Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982):

    M <- M + (1 - mu)(G - M);   U = G + mu (M - G) if nesterov else M
    W <- (1 - lr wd) W - lr adjust(shape) NewtonSchulz(U)

Differences from torch.optim.Muon, all of them deliberate: `eps` only guards the all-zero matrix (the gradient's scale
never matters, while torch clamps its raw norm); a parameter whose gradient is not finite is skipped and counted; the
momentum is never written to by the orthogonalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from muonrl_kernels.backend import takes_triton
from muonrl_kernels.coefficients import Triple
from muonrl_kernels.iteration import ScheduleLike
from muonrl_kernels.muon_matrices import BUFFER, NEURONS, STEP, check_shape, expand, init_state
from muonrl_kernels.muon_options import (
    ALGORITHMS,
    AdjustLr,
    Split,
    StepOptions,
    check_group,
    check_tensors,
    plain_schedule,
)
from muonrl_kernels.muon_update import update

__all__ = ["Muon"]

_ADAMW_DEFAULTS: Final[Mapping[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}
_SHARED: Final = ("params", "lr", "weight_decay", "eps", "algorithm", "capturable")
"""Options that groups of both algorithms read."""


class _Ready(NamedTuple):
    """A parameter whose gradient is used: its number in the optimizer, and on which flag that depends (None: on none)."""

    parameter: Tensor
    number: int
    finite: Tensor | None


class Muon(torch.optim.Optimizer):
    """Muon for hidden weight matrices, AdamW for parameter groups marked ``algorithm="adamw"``.

    The positional arguments are torch.optim.Muon's; every option may also be set by a parameter group. A group
    ``{"params": ..., "algorithm": "adamw"}`` is updated with decoupled AdamW and may set `betas` (0.9, 0.999) and `eps`
    (1e-8 there); `lr` and `weight_decay` default to the constructor's. :func:`muonrl_kernels.split_params` makes such
    groups from a model. docs/muon.md states every option with its formula.

    Args:
        params: 2-D parameters (more dimensions with `flatten` or `batched_matrices`), or parameter groups.
        lr: learning rate, a float or a one-element tensor.
        weight_decay: decoupled weight decay.
        momentum: mu of the moving average of gradients.
        nesterov: look ahead along the momentum.
        ns_coefficients: (a, b, c), used in each of `ns_steps` steps unless `ns_schedule` is given.
        eps: floor on the norm of a matrix scaled to entries of at most 1; guards the all-zero matrix only.
        ns_steps: number of steps with `ns_coefficients`, less than 100.
        adjust_lr_fn: None, "original", "match_rms_adamw", "spectral_unclamped", "unscaled", or a callable of the shape.
        ns_schedule: preset name, Schedule or sequence of (a, b, c); takes the place of the two arguments above.
        normalize: "frobenius" or "schatten4".
        method: form of the iteration, "auto", "standard", "symmetric" or "gram".
        backend: "auto", "triton" or "torch".
        momentum_style: "ema" (torch) or "sum" (M <- mu M + G; see :func:`muonrl_kernels.convert_momentum`).
        flatten: treat [A, B, C, ...] (convolutions) as the matrix [A, B*C*...] instead of refusing it.
        batched_matrices: treat [..., m, n] (stacked experts) as separate matrices [m, n] instead of refusing it.
        split: orthogonalize blocks of each matrix (fused QKV, heads, gate and up) by themselves: a number of equal
            blocks, a sequence of block sizes, or a callable (parameter) -> one of these or None.
        split_dim: 0 splits rows (torch.nn.Linear's outputs), 1 columns (where weights are stored [in, out]).
        cautious_wd: decay only the entries whose update has their own sign (arXiv 2510.12402).
        variant: "muon", or "normuon" for a second moment per output neuron (arXiv 2510.05491).
        beta2: decay of NorMuon's second moment.
        momentum_dtype: dtype of the momentum buffer; None takes the gradient's.
        stochastic_rounding: round updates of bf16 and fp16 parameters without bias.
        rounding_seed: seed of that rounding's noise.
        capturable: never read from the device in :meth:`step` (CUDA graphs); `lr` may be a device tensor.
        compute_dtype: dtype of the iteration; None asks the machine (fp32 on CPUs without bf16 instructions).
        max_workspace_bytes: bound on a stack of matrices that are worked on together; one alone may exceed it.

    Raises:
        ValueError: a bad hyper-parameter, a combination that cannot be, or a parameter that is not a matrix.
        RuntimeError: complex parameters, sparse gradients, or backend="triton" where it is not available.
    """

    _skipped: int = 0
    _skipped_there: Tensor | None = None

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
        batched_matrices: bool = False,
        split: Split = None,
        split_dim: int = 0,
        cautious_wd: bool = False,
        variant: str = "muon",
        beta2: float = 0.95,
        momentum_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        capturable: bool = False,
        compute_dtype: torch.dtype | None = None,
        max_workspace_bytes: int | None = None,
    ) -> None:
        given = dict(locals())
        for name in ("self", "params", "__class__"):
            del given[name]
        defaults = {**given, "algorithm": "muon", "ns_schedule": plain_schedule(ns_schedule)}
        check_group(defaults)
        super().__init__(params, defaults)

    @property
    def skipped(self) -> int:
        """Number of parameter updates left out so far because their gradient was not finite.

        With `capturable` the count stays on the device; reading it here is what waits for it.
        """
        there = self._skipped_there
        return self._skipped + (0 if there is None else int(there.item()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking that its options and the shapes of its parameters fit its algorithm."""
        algorithm = param_group.get("algorithm", "muon")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be muon or adamw, got {algorithm!r}")
        if "ns_schedule" in param_group:
            param_group["ns_schedule"] = plain_schedule(param_group["ns_schedule"])
        if algorithm == "adamw":
            foreign = [
                key
                for key, value in self.defaults.items()
                if key not in _SHARED and param_group.get(key, value) != value
            ]
            if foreign:
                raise ValueError(f"an adamw group does not read {', '.join(foreign)}: leave it out")
            for key, value in _ADAMW_DEFAULTS.items():
                param_group.setdefault(key, value)
        elif "betas" in param_group:
            raise ValueError('betas belong to groups with algorithm="adamw"; a muon group has momentum')
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_tensors(group)
            for p in group["params"] if algorithm == "muon" else ():
                check_shape(group, p)
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Complete groups saved by torch.optim.Muon, or by earlier versions, with this optimizer's own options."""
        present = getattr(self, "param_groups", [])
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            group.setdefault("momentum_style", "ema")
            known = present[index] if index < len(present) else self.defaults
            for key, value in known.items():
                if key != "params":
                    group.setdefault(key, value)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch saves it; functions (`adjust_lr_fn`, `split`) are left out and kept from the constructor."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            for key in [key for key, value in group.items() if callable(value)]:
                del group[key]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or of torch.optim.Muon, with buffers in the dtypes that their groups say."""
        loaded: dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # torch casts state to the parameters' dtype, which would cut a wider buffer down.
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                state, before = self.state.get(p, {}), loaded["state"].get(key, {})
                if NEURONS in before:
                    state[NEURONS] = before[NEURONS].to(p.device)
                if BUFFER in before:
                    dtype = group["momentum_dtype"] or state[BUFFER].dtype
                    # Moonlight keeps a convolution's buffer as a matrix.
                    state[BUFFER] = before[BUFFER].to(p.device, dtype).reshape(p.shape)
            if group["capturable"] and isinstance(group["lr"], Tensor) and group["params"]:
                group["lr"] = group["lr"].to(group["params"][0].device)

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
        number = 0
        for group in self.param_groups:
            ready = list(self._ready(group, number))
            number += len(group["params"])
            if not ready:
                continue
            if group["algorithm"] == "adamw":
                self._step_adamw(group, ready)
            else:
                self._step_muon(group, ready)
        return loss

    def _ready(self, group: Mapping[str, Any], number: int) -> Iterator[_Ready]:
        """Parameters with a gradient; those with a non-finite one are counted, and left out or marked."""
        filled = []
        for index, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            if torch.is_complex(p):
                raise RuntimeError("Muon does not support complex parameters")
            if p.grad.is_sparse:
                raise RuntimeError("Muon does not support sparse gradients")
            if p.numel():
                filled.append((p, number + index))
        if not filled:
            return
        fused = [self._fuses(group, p) for p, _ in filled]
        yield from (_Ready(p, i, None) for (p, i), fuses in zip(filled, fused, strict=True) if fuses)
        filled = [entry for entry, fuses in zip(filled, fused, strict=True) if not fuses]
        if not filled:
            return
        flags = _finite([cast(Tensor, p.grad) for p, _ in filled])
        if group["capturable"]:
            self._count((~flags).sum())
            yield from (_Ready(p, i, flag) for (p, i), flag in zip(filled, flags.unbind(), strict=True))
            return
        good = flags.tolist()
        self._skipped += good.count(False)
        yield from (_Ready(p, i, None) for (p, i), usable in zip(filled, good, strict=True) if usable)

    def _fuses(self, group: Mapping[str, Any], p: Tensor) -> bool:
        """Whether Triton kernels update the parameter; they find out by themselves whether its gradient is finite."""
        if group["algorithm"] != "muon":
            return False
        grad = cast(Tensor, p.grad)
        buffer = (
            self.state[p][BUFFER].dtype if BUFFER in self.state[p] else group["momentum_dtype"] or grad.dtype
        )
        dtypes = (p.dtype, grad.dtype, buffer)
        return takes_triton(group["backend"], "muon", p.device, dtypes, group["compute_dtype"])

    def _count(self, missed: Tensor) -> None:
        """Add to the updates left out, on the device where they are known."""
        missed = missed.reshape(())
        if self._skipped_there is None:
            self._skipped_there = torch.zeros((), dtype=torch.int64, device=missed.device)
        self._skipped_there.add_(missed.to(self._skipped_there.device))

    def _step_muon(self, group: Mapping[str, Any], ready: Sequence[_Ready]) -> None:
        items, copies = [], []
        for p, number, finite in ready:
            state = self.state[p]
            init_state(group, p, state)
            if group["stochastic_rounding"]:
                state[STEP].add_(1.0 if finite is None else finite)
            matrices, copy = expand(group, p, state, finite, number)
            items.extend(matrices)
            if copy is not None:
                copies.append((p, copy))
        for missed in update(items, StepOptions.of(group), group["backend"]):
            self._count(missed)
        for p, copy in copies:
            p.copy_(copy)

    def _step_adamw(self, group: Mapping[str, Any], ready: Sequence[_Ready]) -> None:
        capturable = group["capturable"]
        for p, _, _ in ready:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), device=p.device if capturable else "cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # Whether a fused update happens is one flag a call, so with flags on the device each parameter gets its own.
        for part in [[r] for r in ready] if capturable else [ready]:
            adamw(
                [r.parameter for r in part],
                [_like(r.parameter) if capturable else cast(Tensor, r.parameter.grad) for r in part],
                [self.state[r.parameter]["exp_avg"] for r in part],
                [self.state[r.parameter]["exp_avg_sq"] for r in part],
                [],
                [self.state[r.parameter]["step"] for r in part],
                fused=capturable or None,
                capturable=capturable,
                found_inf=(~cast(Tensor, part[0].finite)).float() if capturable else None,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"] if capturable else float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _like(p: Tensor) -> Tensor:
    """The gradient in the parameter's layout, which is what torch's fused update takes it to have."""
    grad = cast(Tensor, p.grad)
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


def _finite(grads: list[Tensor]) -> Tensor:
    """Whether each gradient is finite throughout: bool [number of gradients], without reading any of it back.

    Maxima let NaN and infinities through and cannot overflow.
    """
    if grads[0].device.type == "cpu":
        peaks = [torch.maximum(high, low.neg()) for low, high in map(torch.aminmax, grads)]
    else:
        peaks = list(torch._foreach_norm(grads, math.inf))
    wide = torch.float64 if any(peak.dtype == torch.float64 for peak in peaks) else torch.float32
    return torch.stack([peak.to(peaks[0].device, wide) for peak in peaks]).isfinite()

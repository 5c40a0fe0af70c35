"""Launches of the elementwise policy-loss kernels."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from muonrl_kernels.loss_kernels import reduce_terms, token_loss
from muonrl_kernels.loss_math import COLUMNS
from muonrl_kernels.options import LossOptions
from muonrl_kernels.policy_loss import Terms
from muonrl_kernels.tokens import Tokens

__all__ = ["OPTIONS", "as_bytes", "evaluate_prepared", "evaluate_raw", "hyper", "kl_name", "on_device"]

OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": True}
"""Compiler options of every launch; stated because Triton's default changes between versions."""

BLOCK: Final = 512
WARPS: Final = 8
ROWS: Final = 64
_COLUMNS: Final = int(COLUMNS.value)


def as_bytes(flags: Tensor) -> Tensor:
    """A bool tensor as the uint8 that kernels read."""
    return flags.contiguous().view(torch.uint8)


def hyper(o: LossOptions) -> dict[str, float]:
    """The hyper-parameters as run-time arguments of the kernels, by name."""
    return {
        "low": 1.0 - o.clip_low,
        "high": 1.0 + o.clip_high,
        "dual": math.inf if o.dual_clip is None else float(o.dual_clip),
        "beta": float(o.beta),
        "entropy_coef": float(o.entropy_coef),
        "limit": float(o.log_ratio_clamp),
    }


def kl_name(o: LossOptions, has_ref: bool) -> str:
    """The estimator to compile in; "none" without a KL term."""
    if o.beta == 0.0 or not has_ref:
        return "none"
    return f"{o.kl}_weighted" if o.kl_weighted else o.kl


@dataclass(frozen=True)
class _Arrays:
    """Flat contiguous inputs; either `rollout` (or nothing) or the four prepared fields."""

    logp: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    ref: Tensor | None
    entropy: Tensor | None
    rollout: Tensor | None = None
    prepared: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().reshape(-1).contiguous()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _launch(a: _Arrays, o: LossOptions, normalizer: Tensor | None) -> tuple[Terms, Tensor]:
    """Terms whose gradients still lack the factor that is returned with them (the loss and the metrics have it)."""
    device, count = a.logp.device, a.logp.numel()
    programs = max(1, -(-count // BLOCK))
    d_logp = torch.empty(count, dtype=torch.float32, device=device)
    d_entropy = torch.empty_like(d_logp) if a.entropy is not None and o.entropy_coef != 0.0 else None
    partial = torch.empty(programs, _COLUMNS, dtype=torch.float32, device=device)
    w, w_log, cut, share = a.prepared or (None, None, None, None)
    token_loss[(programs,)](
        a.logp, a.old, a.advantages, a.mask, a.rollout, a.ref, a.entropy,
        w, w_log, cut, share, d_logp, d_entropy, partial, count,
        **hyper(o),
        is_low=0.0 if o.is_low is None else float(o.is_low),
        is_high=float(o.is_high),
        LOSS_TYPE=o.loss_type,
        IS_MODE=o.is_mode if a.rollout is not None else "none",
        KL=kl_name(o, a.ref is not None),
        BLOCK=BLOCK,
        num_warps=WARPS,
        **OPTIONS,
    )  # fmt: skip
    result = torch.empty(_COLUMNS, dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    scale = torch.empty_like(loss)
    reduce_terms[(1,)](
        partial,
        normalizer,
        result,
        loss,
        scale,
        programs,
        PREPARED=a.prepared is not None,
        ROWS=ROWS,
        num_warps=WARPS,
        **OPTIONS,
    )
    return Terms(loss, d_logp, d_entropy, result[:-2].clone(), result[-2:].clone()), scale


def evaluate_raw(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout: Tensor | None,
    ref: Tensor | None,
    entropy: Tensor | None,
    o: LossOptions,
) -> tuple[Terms, Tensor]:
    """Terms of tokens whose options need no sequences, from the caller's tensors, and the factor that gradients still lack.

    The metric `dropped` is in the terms.
    """
    normalizer = o.normalizer
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(logp.device)
    elif normalizer is not None:
        normalizer = torch.full((), float(normalizer), dtype=torch.float32, device=logp.device)
    arrays = [_flat(x) for x in (logp, old, advantages, ref, entropy, rollout)]
    assert arrays[0] is not None and arrays[1] is not None and arrays[2] is not None
    flags = as_bytes(mask.reshape(-1).to(torch.bool))
    a = _Arrays(arrays[0], arrays[1], arrays[2], flags, arrays[3], arrays[4], arrays[5])
    with on_device(logp.device):
        return _launch(a, o, normalizer)


def evaluate_prepared(
    t: Tokens, logp: Tensor, entropy: Tensor | None, o: LossOptions
) -> tuple[Terms, Tensor]:
    """The same for prepared tokens, whose shares hold the normalizer; the factor is 1 and `dropped` is left out."""
    flat = logp.detach().reshape(-1).contiguous()
    prepared = (t.w, t.w_log, as_bytes(t.w_cut), t.share)
    a = _Arrays(
        flat, t.old, t.advantages, as_bytes(t.valid), t.ref, _flat(entropy), rollout=None, prepared=prepared
    )
    with on_device(logp.device):
        return _launch(a, o, None)

"""One step of Muon over a list of matrices, in PyTorch operations.

Per matrix W with gradient G, momentum M and c = 1 - mu (momentum_style "ema") or 1 ("sum"):

    M <- mu M + c G;   U = mu M + c G if nesterov else M;   O = NewtonSchulz(U);   s = lr ratio
    W <- W - lr wd W - s O,  or with cautious_wd  W <- W - lr wd 1[O W >= 0] W - s O

Everything about a matrix happens while its workspace is alive: U is written straight into it and O is added to W from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from muonrl_kernels.backend import takes_triton
from muonrl_kernels.iteration import HALF
from muonrl_kernels.muon_matrices import MatrixItem
from muonrl_kernels.muon_options import StepOptions
from muonrl_kernels.newton_schulz import orthogonalize_stream
from muonrl_kernels.rounding import noise_keys, store_rounded
from muonrl_kernels.torch_ops import LastProduct

__all__ = ["finish", "normalize_neurons", "update"]

_TINY = 1e-10
"""Guards the two divisions of NorMuon, as in its authors' code."""


def update(items: Sequence[MatrixItem], options: StepOptions, backend: str) -> list[Tensor]:
    """Update weights and state of all matrices in place; `grad` is only read.

    Returns:
        Numbers of parameters that Triton kernels left out because of a gradient that is not finite: int32 [1] each, on
        their devices.
    """
    parts: dict[tuple[torch.device, bool, bool], list[MatrixItem]] = {}
    for item in items:
        dtypes = (item.weight.dtype, item.grad.dtype, item.momentum.dtype)
        device = item.weight.device
        fused = takes_triton(backend, "muon", device, dtypes, options.compute_dtype)
        parts.setdefault((device, fused, torch.float64 in dtypes), []).append(item)
    missed = []
    for (device, fused, wide), part in parts.items():
        if fused:
            from muonrl_kernels import muon_triton

            missed.append(muon_triton.update(part, options))
        else:
            _torch_update(part, options, torch.float64 if wide else torch.float32, device)
    return missed


def _torch_update(
    items: Sequence[MatrixItem], options: StepOptions, dtype: torch.dtype, device: torch.device
) -> None:
    orthogonalize_stream(
        [item.weight.shape for item in items],
        lambda i, slot: _fill(items[i], slot, options),
        lambda i, product: finish(items[i], product, options),
        options.schedule,
        dtype=dtype,
        device=device,
        normalize=options.normalize,
        method=options.method,
        compute_dtype=options.compute_dtype,
        eps=options.eps,
        max_workspace_bytes=options.max_workspace_bytes,
    )


def _fill(item: MatrixItem, slot: Tensor, options: StepOptions) -> None:
    """Advance the momentum and write U to the workspace (fp32 or fp64)."""
    g, m, mu = item.grad, item.momentum, options.momentum
    average = options.momentum_style == "ema"
    fresh = 1.0 - mu if average else 1.0
    lerps = average and m.dtype == g.dtype
    if item.finite is not None:
        # Seen in place of a gradient that is not finite, the momentum leaves itself unchanged below.
        g = torch.where(item.finite, g, m)
    if lerps:
        m.lerp_(g, fresh)
    else:
        # Through the workspace, so that a half-precision buffer is rounded once.
        slot.copy_(m).mul_(mu).add_(g, alpha=fresh)
        m.copy_(slot if item.finite is None else torch.where(item.finite, slot, m))
    if not options.nesterov:
        slot.copy_(m)
    elif lerps and g.dtype == slot.dtype:
        torch.lerp(g, m, mu, out=slot)
    else:
        slot.copy_(g).mul_(fresh).add_(m, alpha=mu)


def finish(item: MatrixItem, product: LastProduct, options: StepOptions) -> None:
    """Decay the weight and add the orthogonalized update."""
    weight, lr = item.weight, options.lr
    rounded = options.stochastic_rounding and weight.dtype in HALF
    if not (options.capturable or options.cautious_wd or rounded or item.neurons is not None):
        number = cast(float, lr)
        if number * options.weight_decay != 0.0:
            weight.mul_(1.0 - number * options.weight_decay)
        product.add_to_(weight, -number * item.ratio)
        return
    o = product.value()
    if item.neurons is not None:
        normalize_neurons(o, item.neurons, options.beta2, item.finite)
    exact = weight.float() if rounded else weight
    rate = _predicated(lr, item.finite, torch.promote_types(weight.dtype, torch.float32))
    _apply(exact, o, rate * options.weight_decay, rate * item.ratio, options)
    if rounded:
        assert item.step is not None
        store_rounded(weight, exact, noise_keys(options.rounding_seed, item.stream, item.step))


def _predicated(factor: float | Tensor, finite: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    """The factor, or 0 on the device where the gradient was not finite."""
    if finite is None:
        return factor
    return torch.where(finite, factor, torch.zeros((), dtype=dtype, device=finite.device))


def _apply(
    weight: Tensor, o: Tensor, decay: float | Tensor, scale: float | Tensor, options: StepOptions
) -> None:
    """W <- W - decay W - scale O, or with the decay masked; `o` is not needed any more."""
    if options.weight_decay == 0.0:
        pass
    elif options.cautious_wd:
        kept = torch.mul(o.sign(), weight).ge_(0.0).mul_(weight)
        weight.sub_(kept.mul_(decay))
    else:
        weight.mul_(1.0 - decay)
    if isinstance(scale, Tensor):
        weight.sub_(o.to(torch.promote_types(o.dtype, torch.float32)).mul_(scale))
    else:
        weight.add_(o, alpha=-scale)


def normalize_neurons(o: Tensor, v: Tensor, beta2: float, finite: Tensor | None = None) -> None:
    """NorMuon's step from O to the update, in place (arXiv 2510.05491 and its authors' code).

    Per row i of O [rows, columns], with V [rows, 1] averaged over steps:

        V <- beta2 V + (1 - beta2) mean_j O_ij^2;   O' = O / (sqrt(V) + 1e-10);   O <- O' ||O||_F / (||O'||_F + 1e-10)
    """
    norms = torch.linalg.vector_norm(o, dim=1, keepdim=True, dtype=torch.promote_types(o.dtype, v.dtype)).to(
        v.dtype
    )
    v.lerp_(norms.square() / o.shape[1], _predicated(1.0 - beta2, finite, v.dtype))
    factor = (v.sqrt() + _TINY).reciprocal()
    after = torch.linalg.vector_norm(norms * factor)
    o.mul_(factor * (torch.linalg.vector_norm(norms) / (after + _TINY)))

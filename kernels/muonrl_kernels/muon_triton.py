"""Muon's step and `orthogonalize` on a GPU: matrices batched by their short side, from gradient to weight in Triton kernels.

Per bucket: norms of all matrices (one reading of gradient and momentum), the first iterates and the new momenta (one more),
the iteration on shared launches, and the last product, which updates the weights as it goes. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, cast

import torch
from torch import Tensor

from muonrl_kernels.coefficients import Schedule
from muonrl_kernels.muon_matrices import MatrixItem
from muonrl_kernels.muon_options import StepOptions
from muonrl_kernels.muon_update import finish
from muonrl_kernels.rounding import noise_key_halves, noise_key_table
from muonrl_kernels.torch_ops import LastProduct
from muonrl_kernels.triton_layout import Layout, device_table, panel_layout, places, viewable
from muonrl_kernels.triton_ops import Source, Target, first_iterate, prepare, run
from muonrl_kernels.tuning import Tile, Tuning, choose_tile, tuning_for

__all__ = ["orthogonalize_pairs", "update"]

_WORKSPACE_BYTES: Final = 2 << 30
_WORKSPACE_SHARE: Final = 1 / 20
"""Bounds on the workspace of one bucket unless the caller gives another: bytes, and share of the device's memory. One matrix
alone may exceed them. A bucket of ten matrices of a 4 B model's size keeps all multiprocessors busy for several tiles."""


@dataclass(frozen=True)
class _Bucket:
    """Matrices of one launch: indices, form of the iteration, padded short side, panel width, tile (None: small kernel)."""

    indices: tuple[int, ...]
    method: str
    side: int
    width: int
    tile: Tile | None


def _form(method: str, m: int, n: int, dtype: torch.dtype) -> str:
    """Gram for oblong matrices in fp16; for square ones it saves nothing, and in bf16 it is not stable."""
    if method != "auto":
        return method
    return "gram" if n > m and dtype == torch.float16 else "symmetric"


def _shared(
    method: str, m: int, n: int, dtype: torch.dtype, tuning: Tuning
) -> tuple[str, int, int, Tile | None]:
    """What matrices of one launch have in common: form, padded short side, panel width, tile."""
    # The small kernel is the Gram form; for square matrices of that size it is as good, and one launch.
    small = m <= tuning.small_side and n <= tuning.small_panels * tuning.small_columns
    if small and dtype == torch.float16 and method in ("auto", "gram"):
        return "gram", max(16, 1 << (m - 1).bit_length()), tuning.small_columns, None
    tile = choose_tile(tuning, m)
    return _form(method, m, n, dtype), -(-m // tile.block) * tile.block, tile.block, tile


@lru_cache(maxsize=256)
def _buckets(
    sizes: tuple[tuple[int, int], ...], method: str, dtype: torch.dtype, tuning: Tuning, max_bytes: int
) -> tuple[_Bucket, ...]:
    """Group matrices (short, long) by short side and form, bounded in workspace; long ones first, to end together."""
    groups: dict[tuple[str, int, int, Tile | None], list[int]] = {}
    for index, (m, n) in enumerate(sizes):
        groups.setdefault(_shared(method, m, n, dtype, tuning), []).append(index)
    found: list[_Bucket] = []
    for (form, side, width, tile), indices in groups.items():
        indices.sort(key=lambda i: -sizes[i][1])
        part: list[int] = []
        used = 0
        for i in indices:
            need = dtype.itemsize * side * (2 * (-(-sizes[i][1] // width) * width) + 4 * side)
            if part and used + need > max_bytes:
                found.append(_Bucket(tuple(part), form, side, width, tile))
                part, used = [], 0
            part.append(i)
            used += need
        found.append(_Bucket(tuple(part), form, side, width, tile))
    return tuple(found)


@lru_cache
def _workspace_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _WORKSPACE_BYTES
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return min(_WORKSPACE_BYTES, int(memory * _WORKSPACE_SHARE))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _sides(t: Tensor) -> tuple[int, int]:
    rows, columns = t.shape
    return (rows, columns) if rows <= columns else (columns, rows)


def _layout(bucket: _Bucket, tensors: Sequence[Tensor], dtype: torch.dtype) -> Layout:
    sizes = tuple(_sides(tensors[i]) for i in bucket.indices)
    return panel_layout(sizes, bucket.side, bucket.width, dtype, tensors[0].device)


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def orthogonalize_pairs(
    pairs: Sequence[tuple[Tensor, Tensor]],
    schedule: Schedule,
    *,
    normalize: str,
    method: str,
    compute_dtype: torch.dtype | None,
    eps: float = 1e-7,
) -> None:
    """Orthogonalize the first of each pair (2-D, equal dtypes, one device) into the second."""
    dtype = compute_dtype or torch.float16
    device = pairs[0][0].device
    tuning = tuning_for(device)
    inputs = [g if viewable(g) else g.contiguous() for g, _ in pairs]
    outputs = [
        t if viewable(t) else torch.empty_like(t, memory_format=torch.contiguous_format) for _, t in pairs
    ]
    sizes = tuple(_sides(g) for g in inputs)
    bound = _workspace_bytes(device)
    with _current(device):
        for bucket in _buckets(sizes, method, dtype, tuning, bound):
            layout = _layout(bucket, inputs, dtype)
            mu = device_table((0.0,), torch.float32, device)
            source = Source(places([inputs[i] for i in bucket.indices]), None, "none", False, mu)
            scales, finite = prepare(layout, source, tuning, eps)
            it = first_iterate(layout, source, tuning, dtype, scales, finite)
            run(
                layout,
                it,
                schedule,
                method=bucket.method,
                normalize=normalize,
                tuning=tuning,
                tile=bucket.tile,
                target=Target("write", places([outputs[i] for i in bucket.indices])),
            )
    torch.autograd.graph.increment_version(outputs)  # kernels write through addresses, unseen by autograd
    for (_, wanted), written in zip(pairs, outputs, strict=True):
        if written is not wanted:
            wanted.copy_(written)


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def update(items: Sequence[MatrixItem], options: StepOptions) -> Tensor:
    """Update weights and state of all matrices in place, on one device and without reading anything back.

    Returns:
        int64 [1]: number of parameters left out because their gradient is not finite.
    """
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, item in enumerate(items):
        key = (item.weight.dtype, item.grad.dtype, item.momentum.dtype)
        groups.setdefault(key, []).append(index)
    with _current(items[0].weight.device):
        return _update(items, list(groups.values()), options)


def _update(items: Sequence[MatrixItem], groups: Sequence[list[int]], options: StepOptions) -> Tensor:
    steps = [_Step([items[i] for i in indices], options) for indices in groups]
    finite = torch.cat([step.finite for step in steps])
    order = [i for indices in groups for i in indices]
    owners = [items[i].parameter for i in order]
    numbers = {owner: n for n, owner in enumerate(dict.fromkeys(owners))}
    owner = device_table(tuple(numbers[o] for o in owners), torch.int64, finite.device)
    whole = torch.ones(len(numbers), dtype=finite.dtype, device=finite.device)
    whole.scatter_reduce_(0, owner, finite, "amin")
    start = 0
    for step in steps:
        count = step.finite.numel()
        step.finish(whole[owner[start : start + count]])
        start += count
    return (1 - whole).sum(dim=0, keepdim=True)


class _Step:
    """One step of matrices whose weights, gradients and momenta have the same three dtypes."""

    def __init__(self, items: Sequence[MatrixItem], options: StepOptions) -> None:
        """Read all gradients once, so that it is known which parameters are left out before anything is written."""
        self._items = items
        self._options = options
        self._device = items[0].weight.device
        self._tuning = tuning_for(self._device)
        self._dtype = options.compute_dtype or torch.float16
        self._grads = [i.grad if viewable(i.grad) else i.grad.contiguous() for i in items]
        self._momenta = [i.momentum if viewable(i.momentum) else i.momentum.contiguous() for i in items]
        self._weights = [i.weight if viewable(i.weight) else i.weight.contiguous() for i in items]
        sizes = tuple(_sides(w) for w in self._weights)
        bound = options.max_workspace_bytes or _workspace_bytes(self._device)
        self._buckets = _buckets(sizes, options.method, self._dtype, self._tuning, bound)
        self._prepared = [self._prepare(bucket) for bucket in self._buckets]
        indices = tuple(i for bucket in self._buckets for i in bucket.indices)
        order = device_table(indices, torch.int64, self._device)
        flags = torch.cat([finite for _, _, _, finite in self._prepared])
        self.finite = torch.empty_like(flags).scatter_(0, order, flags)
        """int32 [items]: whether each matrix's gradient is finite."""

    def _prepare(self, bucket: _Bucket) -> tuple[Layout, Source, Tensor, Tensor]:
        options = self._options
        layout = _layout(bucket, self._weights, self._dtype)
        source = Source(
            places([self._grads[i] for i in bucket.indices]),
            places([self._momenta[i] for i in bucket.indices]),
            options.momentum_style,
            options.nesterov,
            device_table((options.momentum,), torch.float32, self._device),
        )
        return layout, source, *prepare(layout, source, self._tuning, options.eps)

    def finish(self, finite: Tensor) -> None:
        """Advance momenta, orthogonalize and update the weights of matrices with a flag in `finite`, int32 [items]."""
        for bucket, (layout, source, scales, _) in zip(self._buckets, self._prepared, strict=True):
            mine = finite[device_table(bucket.indices, torch.int64, self._device)]
            it = first_iterate(layout, source, self._tuning, self._dtype, scales, mine)
            outputs = None
            if self._options.variant == "normuon":
                outputs = [
                    torch.empty(self._weights[i].shape, dtype=torch.float32, device=self._device)
                    for i in bucket.indices
                ]
            run(
                layout,
                it,
                self._options.schedule,
                method=bucket.method,
                normalize=self._options.normalize,
                tuning=self._tuning,
                tile=bucket.tile,
                target=self._target(bucket, mine) if outputs is None else Target("write", places(outputs)),
            )
            if outputs is None:
                continue
            for i, flag, o in zip(bucket.indices, mine.bool().unbind(), outputs, strict=True):
                item = replace(self._items[i], weight=self._weights[i], finite=flag)
                finish(item, LastProduct.of(o), self._options)
        # Kernels write through addresses, so autograd would not know that what it may have saved has changed.
        torch.autograd.graph.increment_version([*self._momenta, *self._weights])
        for item, momentum, weight in zip(self._items, self._momenta, self._weights, strict=True):
            if momentum is not item.momentum:
                item.momentum.copy_(momentum)
            if weight is not item.weight:
                item.weight.copy_(weight)

    def _target(self, bucket: _Bucket, finite: Tensor) -> Target:
        options, items = self._options, [self._items[i] for i in bucket.indices]
        keys = None
        if options.stochastic_rounding and items[0].weight.dtype != torch.float32:
            halves = tuple(h for i in items for h in noise_key_halves(options.rounding_seed, i.stream))
            table = device_table(halves, torch.int32, self._device).view(-1, 2)
            count = torch.stack([cast(Tensor, i.step) for i in items]).to(self._device, non_blocking=True)
            keys = noise_key_table(table, count)
        return Target(
            "update",
            places([self._weights[i] for i in bucket.indices]),
            finite=finite,
            ratios=device_table(tuple(i.ratio for i in items), torch.float32, self._device),
            hyper=self._hyper(),
            keys=keys,
            cautious=options.cautious_wd,
        )

    def _hyper(self) -> Tensor:
        """fp32 [2]: the learning rate and what is kept of the weights."""
        lr, decay = self._options.lr, self._options.weight_decay
        if isinstance(lr, Tensor):
            rate = lr.to(self._device, torch.float32).reshape(1)
            return torch.cat([rate, 1.0 - rate * decay])
        return device_table((lr, 1.0 - lr * decay), torch.float32, self._device)

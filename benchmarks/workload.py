"""Weights and gradients to step on."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from benchmarks.cases import Shapes, matrices
from benchmarks.machine import cache_filler

__all__ = ["Workload"]


class Workload:
    """Weights and gradients of a set of matrices. Every contender updates the same weights, which timing does not mind.

    Gradients are written anew before each step: some implementations overwrite them, as a backward pass would.
    """

    def __init__(self, shapes: Shapes, device: torch.device, seed: int = 0) -> None:
        self.shapes = shapes
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._weights: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._grads: dict[tuple[int, int], list[torch.Tensor]] = {}
        for shape in matrices(shapes):
            weight = torch.randn(shape, device=device, generator=self._generator).mul_(0.02)
            self._weights.setdefault(shape, []).append(weight)
            gradient = torch.randn(shape, device=device, generator=self._generator)
            self._grads.setdefault(shape, []).append(gradient)
        on_gpu = device.type == "cuda"
        self._fill_cache = cache_filler(device)
        # On a GPU drawing anew is cheaper than room for a second set of gradients.
        self._master = None if on_gpu else {k: [g.clone() for g in v] for k, v in self._grads.items()}

    def refill(self) -> None:
        """Write the gradients anew; on a GPU, overwrite its L2 cache afterwards."""
        for shape, grads in self._grads.items():
            for index, grad in enumerate(grads):
                if self._master is not None:
                    grad.copy_(self._master[shape][index])
                else:
                    grad.normal_(generator=self._generator)
        self._fill_cache()

    def parameters(self, subset: Shapes) -> list[tuple[Parameter, torch.Tensor]]:
        """New parameters on the shared weights of a subset, each with its gradient."""
        return [
            (Parameter(self._weights[rows, columns][index]), self._grads[rows, columns][index])
            for rows, columns, count in subset
            for index in range(count)
        ]

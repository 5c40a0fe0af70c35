"""One side of a comparison: runs muonrl_kernels of whatever source tree comes first on its path, on request.

Reads one JSON request a line and answers with one JSON value a line: {"suite": "muon", "problem": {...}} prepares what is
timed, warms it up and answers the path of the package, {"step": true} answers the seconds of one call. Imports as little of
the package as it can, so that old commits can be measured as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

import muonrl_kernels
from benchmarks.loss_workload import draw, draw_logp
from benchmarks.machine import cache_filler
from benchmarks.workload import Workload

__all__ = ["LossStepper", "Stepper", "main"]


class _Timed:
    """Something that can be prepared and then timed."""

    device: torch.device

    def refresh(self) -> None:
        """Undo what the last call left behind."""
        raise NotImplementedError

    def step(self) -> None:
        """One call, to its end."""
        raise NotImplementedError

    def seconds(self) -> float:
        """Duration of one call after a refresh."""
        self.refresh()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        """Wait for the GPU, if it is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Stepper(_Timed):
    """An optimizer on a workload."""

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self._workload = Workload(tuple((r, c, n) for r, c, n in shapes), device)
        self._pairs = self._workload.parameters(self._workload.shapes)
        params = [p for p, _ in self._pairs]
        self._optimizer: Any = muonrl_kernels.Muon(params, lr=1e-3, weight_decay=0.1, momentum=0.95)
        self.seconds()

    def refresh(self) -> None:
        """Write the gradients anew."""
        self._workload.refill()
        for p, grad in self._pairs:
            p.grad = grad
        self.synchronize()

    def step(self) -> None:
        """One step of the optimizer, to its end."""
        self._optimizer.step()
        self.synchronize()


class LossStepper(_Timed):
    """A forward and a backward pass of the loss, linear or elementwise: fp32 on a CPU, bf16 on a GPU."""

    def __init__(
        self, rows: int, hidden: int, vocabulary: int, valid: int, linear: bool, device: torch.device
    ) -> None:
        self.device = device
        self._fill_cache = cache_filler(device)
        if linear:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            self._batch = draw(rows, hidden, vocabulary, valid, device, dtype)
        else:
            self._batch = draw_logp(rows, valid, device)
        self.seconds()

    def refresh(self) -> None:
        """Drop the gradients of the last pass."""
        for x in self._batch.leaves:
            x.grad = None
        self._fill_cache()
        self.synchronize()

    def step(self) -> None:
        """One pass, to its end."""
        b = self._batch
        rest = (b.old_logp, b.advantages, b.mask)
        if b.weight.numel():
            loss, _ = muonrl_kernels.linear_policy_loss(
                b.hidden, b.weight, b.targets, *rest, rollout_logp=b.rollout_logp
            )
        else:
            loss, _ = muonrl_kernels.policy_loss(b.logp, *rest, rollout_logp=b.rollout_logp)
        loss.backward()
        self.synchronize()


_STEPPERS: Final[dict[str, Callable[..., _Timed]]] = {"muon": Stepper, "loss": LossStepper}


def main(argv: Sequence[str] | None = None) -> int:
    """Answer requests on standard input until it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    stepper: _Timed | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if "suite" in request:
            stepper = None  # what was measured before makes room first
            make = _STEPPERS[request["suite"]]
            stepper = make(**request["problem"], device=torch.device(arguments.device))
            answer = muonrl_kernels.__file__
        else:
            assert stepper is not None
            answer = stepper.seconds()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

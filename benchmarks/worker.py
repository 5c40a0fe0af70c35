"""One side of a comparison: steps muonrl_kernels.Muon of whatever source tree comes first on its path, on request.

Reads one JSON request a line and answers with one JSON value a line: {"shapes": [...]} prepares an optimizer, warms it up
and answers the path of the package, {"step": true} answers the seconds of one step. Imports as little of the package as it
can, so that old commits can be measured as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import muonrl_kernels
from benchmarks.workload import Workload
from muonrl_kernels import Muon

__all__ = ["Stepper", "main"]


class Stepper:
    """An optimizer on a workload."""

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        self._workload = Workload(tuple((r, c, n) for r, c, n in shapes), device)
        self._pairs = self._workload.parameters(self._workload.shapes)
        self._optimizer: Any = Muon([p for p, _ in self._pairs], lr=1e-3, weight_decay=0.1, momentum=0.95)
        self.seconds()

    def refresh(self) -> None:
        """Write the gradients anew."""
        self._workload.refill()
        for p, grad in self._pairs:
            p.grad = grad
        self._synchronize()

    def step(self) -> None:
        """One step of the optimizer, to its end."""
        self._optimizer.step()
        self._synchronize()

    def seconds(self) -> float:
        """Duration of one step on fresh gradients."""
        self.refresh()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._workload.device.type == "cuda":
            torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Answer requests on standard input until it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    stepper: Stepper | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if "shapes" in request:
            stepper = Stepper(request["shapes"], torch.device(arguments.device))
            answer = muonrl_kernels.__file__
        else:
            assert stepper is not None
            answer = stepper.seconds()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

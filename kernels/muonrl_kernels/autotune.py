"""Measure the tiles of the products on this machine's GPU and save the fastest: ``python -m muonrl_kernels.autotune``.

Nothing else in the package measures anything. What is saved is read by `tuning_for` in the next process.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from triton.errors import TritonError

from muonrl_kernels.coefficients import KJ
from muonrl_kernels.triton_layout import panel_layout
from muonrl_kernels.triton_ops import Panels, TritonOps
from muonrl_kernels.tuning import Tile, Tuning, device_slug, tuned_folder, tuning_for

__all__ = ["autotune", "candidates", "main"]

SIDES: Final = {"large": (2048, 2560), "medium": (192, 576)}
MATRICES: Final = 8
Timer = Callable[[Callable[[], object]], float]


def candidates(tile: Tile) -> list[Tile]:
    """Variations of a tile that keep its shape, which decides how matrices are padded and summed."""
    grid = itertools.product((32, 64), (4, 8), (2, 3, 4, 5), (1, 2, 3))
    return [
        Tile(tile.block, depth, warps, stages, programs)
        for depth, warps, stages, programs in grid
        if depth <= tile.block
    ]


def _time(tile: Tile, tuning: Tuning, sides: Sequence[int], device: torch.device, timer: Timer) -> float:
    """Milliseconds of a Gram phase's kinds of product over all sides; infinite where the tile does not fit the GPU."""
    total = 0.0
    for m in sides:
        padded = -(-m // tile.block) * tile.block
        layout = panel_layout(((m, 3 * m),) * MATRICES, padded, tile.block, torch.float16, device)
        it = Panels(layout.new_panels(torch.float16).normal_(), layout.first)
        ops = TritonOps(layout, tile, tma=tuning.tma)

        def products(ops: TritonOps = ops, it: Panels = it) -> object:
            r = ops.gram(it)
            z = ops.polynomial(r, KJ.coefficients[0])
            return ops.apply(ops.times(z, z), it)

        try:
            total += timer(products)
        except (TritonError, RuntimeError) as error:  # too much shared memory, a compiler's refusal
            print(f"  {tile} does not run: {type(error).__name__}", file=sys.stderr)
            return float("inf")
    return total


def _fastest(tiles: Iterable[Tile], measure: Callable[[Tile], float]) -> tuple[Tile, float]:
    timed = [(measure(tile), tile) for tile in tiles]
    best, tile = min(timed, key=lambda pair: pair[0])
    if best == float("inf"):
        raise RuntimeError("no tile runs on this GPU")
    return tile, best


def autotune(device: torch.device, folder: Path, timer: Timer, name: str) -> Path:
    """Measure all candidates on `device` and write the fastest to `folder`; returns the file.

    Raises:
        RuntimeError: nothing runs.
    """
    tuning = tuning_for(device)
    found = {}
    for kind, sides in SIDES.items():
        measure = partial(_time, tuning=tuning, sides=sides, device=device, timer=timer)
        tile, best = _fastest(candidates(getattr(tuning, kind)), measure)
        found[kind] = dataclasses.asdict(tile)
        print(f"{kind}: {tile}, {best:.3f} ms", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{device_slug(name)}.json"
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found, indent=2) + "\n")
    unfinished.replace(file)
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m muonrl_kernels.autotune", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=tuned_folder(), help="where to save (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("autotune: error: there is no GPU to measure on", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    device = torch.device("cuda", torch.cuda.current_device())
    file = autotune(device, chosen.folder, do_bench, torch.cuda.get_device_name(device))
    print(f"saved {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

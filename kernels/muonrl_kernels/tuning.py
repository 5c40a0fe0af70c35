"""Launch parameters of the Triton kernels: static per kind of GPU, refined by measured files in `tuned/`.

Nothing is tuned while a program runs. The static values were chosen from compiled code (no spills, two programs on a
multiprocessor's shared memory where possible); a file <name of the GPU>.json overrides fields for that GPU, from the user's
own measurements (`python -m muonrl_kernels.autotune`) or from the package's folder `tuned/`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["TUNINGS", "Tile", "Tuning", "choose_tile", "device_slug", "tuned_folder", "tuning_for"]


@dataclass(frozen=True)
class Tile:
    """Launch parameters of the products: tiles are block x block, loaded block_k deep."""

    block: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    """Persistent programs on each multiprocessor."""


@dataclass(frozen=True)
class Tuning:
    """Everything that differs between kinds of GPU.

    Attributes:
        tma: operands arrive through tensor descriptors.
        large, medium: tiles; `choose_tile` takes the one that wastes less on padding.
        small_side: largest short side that `small_newton_schulz` takes as a whole.
        small_columns: panel width there.
        small_panels: most panels there; one program reads them one after the other while the rest of the GPU may be idle.
        rows, prep_warps: height of a band and warps of the elementwise kernels.
        fuses_half: whether the last product's epilogue has the registers for 16-bit weights.
        row_block, row_warps: columns of a row of logits that are looked at at once, and warps.
        logits: tile of the product that reduces its logits in registers.
    """

    tma: bool
    large: Tile
    medium: Tile
    small_side: int
    small_columns: int = 64
    small_panels: int = 256
    rows: int = 64
    prep_warps: int = 8
    fuses_half: bool = True
    row_block: int = 4096
    row_warps: int = 8
    logits: Tile = Tile(128, 64, 8, 3, 1)


_POINTERS: Final = Tuning(
    tma=False, large=Tile(128, 64, 8, 3, 1), medium=Tile(64, 64, 4, 4, 2), small_side=128
)

TUNINGS: Final[dict[str, Tuning]] = {
    "sm_80": _POINTERS,
    "sm_90": Tuning(tma=True, large=Tile(128, 64, 8, 3, 2), medium=Tile(64, 64, 4, 4, 3), small_side=128),
    "sm_100": Tuning(tma=True, large=Tile(128, 64, 8, 3, 2), medium=Tile(64, 64, 4, 4, 3), small_side=128),
    "gfx942": Tuning(
        tma=False,
        large=Tile(128, 64, 8, 2, 2),
        medium=Tile(64, 64, 4, 2, 2),
        small_side=64,
        fuses_half=False,
        logits=Tile(128, 64, 8, 2, 1),
    ),
    # Triton's interpreter pays by the program, so tiles are only as large as the tests need.
    "interpreter": Tuning(
        tma=False,
        large=Tile(64, 32, 4, 1, 2),
        medium=Tile(32, 16, 4, 1, 2),
        small_side=32,
        rows=32,
        row_block=128,
        logits=Tile(32, 32, 4, 1, 1),
    ),
}


def choose_tile(tuning: Tuning, m: int) -> Tile:
    """The tile for short side m: large unless its padding costs over 15 % more products than the medium one's."""
    large, medium = (-(-m // t.block) * t.block for t in (tuning.large, tuning.medium))
    return tuning.large if large**2 <= 1.15 * medium**2 else tuning.medium


def _target(device: torch.device) -> str:
    """The key of TUNINGS whose code suits a device."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    # Consumer Blackwell (sm_120) has neither wgmma nor tcgen05 and little shared memory: Ampere's code suits it.
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def _override(tuning: Tuning, fields: dict[str, Any]) -> Tuning:
    """Replace fields by a tuned file's values; ValueError for a name that does not exist."""
    known = {f.name for f in dataclasses.fields(Tuning)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"unknown tuning fields {unknown}; the fields are {sorted(known)}")
    tiles = {k: Tile(**v) for k, v in fields.items() if k in ("large", "medium", "logits")}
    return dataclasses.replace(tuning, **{**fields, **tiles})


@lru_cache
def tuning_for(device: torch.device) -> Tuning:
    """Launch parameters for a device, with the measured file of exactly that GPU if there is one."""
    tuning = TUNINGS[_target(device)]
    if device.type == "cpu":
        return tuning
    name = f"{device_slug(torch.cuda.get_device_name(device))}.json"
    for folder in (tuned_folder(), resources.files("muonrl_kernels") / "tuned"):
        if (folder / name).is_file():
            return _override(tuning, json.loads((folder / name).read_text()))
    return tuning


def device_slug(name: str) -> str:
    """A GPU's name as the stem of its file: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def tuned_folder() -> Path:
    """Where `python -m muonrl_kernels.autotune` saves what it measures: $MUONRL_TUNED, or a folder of the user's cache."""
    chosen = os.environ.get("MUONRL_TUNED")
    return Path(chosen) if chosen else Path.home() / ".cache" / "muonrl_kernels" / "tuned"

"""What a compiled kernel is made of: registers, spills, stack, shared memory and the instructions that matter.

NVIDIA binaries are read with the cuobjdump and nvdisasm that come with Triton; AMD's assembly states its metadata itself.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["NARROW", "SHARED_LIMIT", "TENSOR_CORE", "Anatomy", "read_amd", "read_nvidia"]

SHARED_LIMIT: Final = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory (LDS) that one block may have, from the vendors' tables of device limits."""
TENSOR_CORE: Final = {
    "sm_80": ("HMMA",),
    "sm_90": ("HGMMA",),
    "sm_100": ("UTCHMMA",),
    "gfx942": ("MFMA",),
}
"""Matrix instructions of each target: HMMA on Ampere, HGMMA (wgmma) on Hopper, UTCHMMA (tcgen05) on Blackwell."""
NARROW: Final = {"sm_90": ("HMMA",), "sm_100": ("HMMA",)}
"""What is there for tiles of less than 64 rows, which the wide instructions cannot take."""

_OPCODE: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)")
_TMA_LOADS: Final = ("UTMALDG", "UBLKCP")
_MATRIX: Final = ("HMMA", "HGMMA", "UTCHMMA")


@dataclass(frozen=True)
class Anatomy:
    """Of one kernel: `spills` are loads and stores of spilled registers, `stack` and `shared` bytes a thread and a block."""

    registers: int
    spills: int
    stack: int
    shared: int
    matrix: Mapping[str, int]
    tma: int


def _tool(name: str) -> Path:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise RuntimeError(f"Triton's own {name} is not at {path}")
    return path


def _field(name: str, text: str) -> int:
    found = re.search(rf"(?<!\w){re.escape(name)}\s*:\s*(\d+)", text)
    if found is None:
        raise RuntimeError(f"the disassembler did not report {name}")
    return int(found.group(1))


def read_nvidia(cubin: bytes, shared: int) -> Anatomy:
    """The anatomy of a cubin; `shared` is the dynamic shared memory that Triton asks for, in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        listing = subprocess.run(
            [_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    opcodes = _OPCODE.findall(listing)
    return Anatomy(
        _field("REG", usage),
        sum(opcode in ("LDL", "STL") for opcode in opcodes),
        _field("STACK", usage),
        shared,
        {name: opcodes.count(name) for name in _MATRIX if name in opcodes},
        sum(opcode in _TMA_LOADS for opcode in opcodes),
    )


def read_amd(assembly: str, shared: int) -> Anatomy:
    """The anatomy of amdgcn assembly; `shared` is the LDS that Triton asks for, in bytes."""
    count = len(re.findall(r"^\s*v_mfma_", assembly, re.MULTILINE))
    scratch = len(re.findall(r"^\s*scratch_(?:load|store)_", assembly, re.MULTILINE))
    return Anatomy(
        # On gfx942 one file holds both kinds of vector registers, and vgpr_count is the whole of it.
        _field(".vgpr_count", assembly),
        # Scalar registers that are parked in lanes of vector registers touch no memory and do not count.
        max(_field(".vgpr_spill_count", assembly), scratch),
        _field(".private_segment_fixed_size", assembly),
        max(shared, _field(".group_segment_fixed_size", assembly)),
        {"MFMA": count} if count else {},
        0,
    )

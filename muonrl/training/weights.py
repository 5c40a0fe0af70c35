"""Publishing weights in two phases: stage a file, let the sampler acknowledge what it holds, then use it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muonrl.trajectory import PolicyId


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes. Tied tensors count under each of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stage(folder: Path, policy: PolicyId, state: Mapping[str, Tensor]) -> tuple[Path, str]:
    """Write ``state`` for the sampler -> (file, fingerprint). The file appears under its name only when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{policy.epoch:03d}-{policy.step:06d}.safetensors"
    copy = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    part = path.with_suffix(".part")
    save_file(copy, part)
    part.replace(path)
    return path, fingerprint(copy)


def fetch(path: Path) -> dict[str, Tensor]:
    """The tensors of a staged file."""
    return load_file(path)

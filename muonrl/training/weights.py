"""Publishing weights in two phases: stage a file, let the sampler acknowledge what it holds, then use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from muonrl.errors import MuonrlError
from muonrl.reporting.files import clear_faults
from muonrl.trajectory import PolicyId


@contextmanager
def clear_save_faults(path: Path) -> Iterator[None]:
    """Turn a refused write of weights, model config or tokenizer below ``path`` into one clear line (MuonrlError)."""
    with clear_faults(path):
        try:
            yield
        except SafetensorError as fault:
            raise MuonrlError(f"{path} cannot be written: {fault}") from fault
        except Exception as fault:
            if type(fault) is not Exception:  # the bare class is how tokenizers reports a failed write
                raise
            raise MuonrlError(f"{path} cannot be written: {fault}") from fault


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes. Tied tensors count under each of their names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stage(folder: Path, policy: PolicyId, state: Mapping[str, Tensor]) -> tuple[Path, str]:
    """Write ``state`` for the sampler -> (file, fingerprint). The file appears under its name only when complete.

    Raises MuonrlError, with nothing half-written left, where the disk refuses.
    """
    path = folder / f"{policy.epoch:03d}-{policy.step:06d}.safetensors"
    copy = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    part = path.with_suffix(".part")
    with clear_save_faults(path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(copy, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path, fingerprint(copy)


def fetch(path: Path) -> dict[str, Tensor]:
    """The tensors of a staged file."""
    return load_file(path)

"""Checkpoints as folders that are either whole or absent, and optimizer states without pickle.

A checkpoint is written into a temporary folder, synced to disk, described by ``manifest.json`` (written last, with the size and
SHA-256 of every file) and only then renamed into place. Whatever the trainer saves (model folder, optimizer, value tracker,
random generators, store offset, configuration) is a file below that folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from muonrl.errors import CheckpointError, MuonrlError

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
# Leftovers of a writer that died: a checkpoint not yet whole, or one being deleted.
_TEMPORARY = ".tmp-"
# The previous folder of the same step while a new one takes its place.
_REPLACED = ".old-"


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a folder and put it in place as ``root/step-NNNNNN``, replacing one of the same step.

    Returns the folder. A full disk or a read-only folder raises MuonrlError; then, or when ``write`` itself raises, earlier
    checkpoints are as they were and nothing half-written is left. One process writes below ``root`` at a time.
    """
    final = root / f"step-{step:06d}"
    temporary = root / f"{_TEMPORARY}{final.name}"
    with _clear_errors(f"cannot write checkpoint {final}"):
        root.mkdir(parents=True, exist_ok=True)
        _recover(root)
        temporary.mkdir()
        try:
            write(temporary)
            _seal(temporary, step)
            _put_in_place(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return final


def verify_checkpoint(path: Path, require: Collection[str] = ()) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file of it was read and hashed.

    ``require`` names files (posix paths) that must be part of it. Raises CheckpointError naming the component that is
    missing or altered.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such folder")
    manifest = _read_manifest(path)
    lacking = sorted(set(require) - set(manifest["files"]))
    if lacking:
        raise CheckpointError(f"checkpoint {path}: {', '.join(lacking)} is not part of it")
    for name, entry in manifest["files"].items():
        file = path / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"checkpoint {path}: {MANIFEST} names {name}, outside of the checkpoint")
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
        with _clear_errors(f"cannot read checkpoint {file}"):
            size, digest = file.stat().st_size, _sha256(file)
        if size != entry["bytes"] or digest != entry["sha256"]:
            raise CheckpointError(f"checkpoint {path}: {name} does not match {MANIFEST} (altered or damaged)")
    return manifest


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint folder of the highest step below ``root``, or None. It is not verified here."""
    if not root.is_dir():
        return None
    with _clear_errors(f"cannot read checkpoints in {root}"):
        _recover(root)
        return max(_steps(root).items(), default=(0, None))[1]


def prune(root: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Delete all but the last ``keep`` (>= 1) checkpoints and those of the steps in ``protect``; returns what went."""
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least the last checkpoint stays")
    steps = _steps(root) if root.is_dir() else {}
    old = [path for step, path in sorted(steps.items())[:-keep] if step not in protect]
    with _clear_errors(f"cannot delete old checkpoints in {root}"):
        for path in old:
            # Renamed first: a deletion cut short must not leave a folder that looks like a checkpoint.
            doomed = root / f"{_TEMPORARY}{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed)
    return old


def write_json(path: Path, value: object) -> None:
    """Write a component as strict JSON (no NaN, no infinity)."""
    path.write_text(json.dumps(value, allow_nan=False, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a component that :func:`write_json` wrote. Raises CheckpointError if it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is no valid JSON: {error}") from error


def save_optimizer(folder: Path, state_dict: Mapping[str, Any], stem: str = "optimizer") -> None:
    """Write an optimizer's (or scheduler's) ``state_dict()`` as ``stem.safetensors`` and ``stem.json``."""
    tensors, skeleton = optimizer_to_tensors(state_dict)
    save_file(tensors, folder / f"{stem}.safetensors")
    write_json(folder / f"{stem}.json", skeleton)


def load_optimizer(folder: Path, stem: str = "optimizer") -> dict[str, Any]:
    """What :func:`save_optimizer` wrote, with its tensors on the CPU. Raises CheckpointError for a missing or bad file."""
    skeleton = read_json(folder / f"{stem}.json")
    try:
        tensors = load_file(folder / f"{stem}.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder}: {stem}.safetensors cannot be read: {error}") from error
    return optimizer_from_tensors(tensors, skeleton)


def optimizer_to_tensors(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a state into (tensors by path, JSON-able skeleton): contiguous CPU copies, so the state itself may train on.

    Dicts, lists, tuples, numbers, text, booleans and None survive with their types. Raises CheckpointError naming the path of
    anything else (a function, for one).
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _encode(dict(state_dict), "", tensors)


def optimizer_from_tensors(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> dict[str, Any]:
    """The exact inverse of :func:`optimizer_to_tensors`. Raises CheckpointError where a tensor is missing."""
    state = _decode(skeleton, tensors)
    if not isinstance(state, dict):
        raise CheckpointError(f"optimizer state is a {type(state).__name__}, expected a mapping")
    return state


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        # As pairs, since JSON would turn the integer keys of optimizer states into text.
        pairs = [[_encode(k, path, tensors), _encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(f"optimizer state {path or '/'}: a {type(value).__name__} cannot be saved")


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        if content not in tensors:
            raise CheckpointError(f"optimizer state: tensor {content} is missing")
        return tensors[content]
    if tag == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in content}
    if tag == "tuple":
        return tuple(_decode(v, tensors) for v in content)
    return float(content)


@contextmanager
def _clear_errors(doing: str) -> Iterator[None]:
    """Turn the operating system's refusals into one line for the user."""
    try:
        yield
    except OSError as error:
        raise MuonrlError(f"{doing}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise MuonrlError(f"{doing}: {error}") from error


def _seal(folder: Path, step: int) -> None:
    """Sync every file and folder below ``folder`` and write its manifest, last."""
    files: dict[str, dict[str, Any]] = {}
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(f"checkpoint component {path.relative_to(folder)} is no regular file")
        if path.is_dir():
            folders.append(path)
            continue
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    write_json(folder / MANIFEST, {"format": _FORMAT, "step": step, "files": files})
    _sync(folder / MANIFEST)
    for path in reversed(folders):
        _sync(path)


def _put_in_place(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    try:
        temporary.rename(final)
    except BaseException:
        if replaced.exists():
            replaced.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _recover(root: Path) -> None:
    """Finish what a killed writer left: put a replaced folder back if its successor never arrived, drop the leftovers."""
    for path in root.glob(f"{_REPLACED}*"):
        original = path.with_name(path.name.removeprefix(_REPLACED))
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _steps(root: Path) -> dict[int, Path]:
    found = ((_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return {int(match[1]): path for match, path in found if match and path.is_dir()}


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is missing (incomplete, or not a checkpoint)")
    manifest = read_json(path / MANIFEST)
    entries = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(entries, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is not of format {_FORMAT}")
    if any(not isinstance(e, dict) or not {"bytes", "sha256"} <= set(e) for e in entries.values()):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} lacks sizes or hashes")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

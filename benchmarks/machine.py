"""The machine: its description, what it can do at most (measured), and the memory that a call needs beyond what is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

__all__ = [
    "ISA_VARIABLES",
    "Ceilings",
    "better",
    "busy_warning",
    "cache_filler",
    "describe_machine",
    "extra_memory",
    "free_memory",
    "git_commit",
    "measure_ceilings",
    "restart_with_isa",
    "seconds_of",
]

ISA_VARIABLES: Final = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
"""Environment by which a CPU with bf16 instructions behaves like one without; read when torch is loaded."""
_PACKAGES: Final = (
    "torch",
    "triton",
    "numpy",
    "gram-newton-schulz",
    "quack-kernels",
    "dion",
    "heavyball",
    "pytorch-optimizer",
    "optimuon",
    "muon-optimizer",
    "transformers",
    "trl",
    "liger-kernel",
)
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_CPU_PROBE_SIZE: Final = 512
_LARGE_CPU_PROBE: Final = 1536
_FAST_PROBE: Final = 0.02
"""Seconds of the small product above which the large one, 27 times the work, is left out."""
_GPU_PROBE_SIZE: Final = 8192
_BATCH, _SIDE = 32, 64
_QUIET: Final = 0.3
"""Load a core above which a machine is not quiet."""
_COPY_BYTES: Final = 256 << 20
_CACHE_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class Ceilings:
    """Best rates measured in this run: FLOP/s of products by dtype name, bytes/s of a copy (read + written)."""

    gemm: dict[str, float]
    copy: float


def restart_with_isa(isa: str) -> None:
    """Replace this process by the same command under the variables of `isa`; returns if they are set already.

    Raises:
        ValueError: an unknown instruction set.
    """
    if isa not in ISA_VARIABLES:
        raise ValueError(f"--isa must be one of {', '.join(ISA_VARIABLES)}, got {isa!r}")
    wanted = ISA_VARIABLES[isa]
    if all(os.environ.get(key) == value for key, value in wanted.items()):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def git_commit(folder: Path) -> str:
    """The commit that is checked out in `folder`, with "+changes" where files differ; "unknown" outside of git."""
    try:
        commit = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changes else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, instruction set in force, threads, GPU, versions and commit, as plain data."""
    described: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "isa_environment": {
            key: os.environ[key] for names in ISA_VARIABLES.values() for key in names if key in os.environ
        },
        "device": device.type,
        "versions": _versions(),
        "commit": git_commit(Path(__file__).resolve().parents[1]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described["gpu"] = properties.name
        described["gpu_memory"] = properties.total_memory
        described["cuda"] = torch.version.cuda or torch.version.hip
    return described


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Duration of one call: wall clock on a CPU, CUDA events on a GPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def cache_filler(device: torch.device) -> Callable[[], None]:
    """A call that overwrites a GPU's L2 cache, and does nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    filler = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)

    def fill() -> None:
        filler.zero_()

    return fill


def _best(call: Callable[[], object], device: torch.device, repeats: int = 50, enough: float = 0.3) -> float:
    """Shortest of up to `repeats` calls after one to warm up; slow calls are repeated for `enough` seconds only."""
    samples = [seconds_of(call, device)]
    if samples[0] < enough:
        samples = []
        while len(samples) < repeats and sum(samples) < enough:
            samples.append(seconds_of(call, device))
    return min(samples)


def measure_ceilings(device: torch.device) -> Ceilings:
    """The machine's own GEMM rate in each dtype and its copy rate, measured now."""
    rates = {}
    for dtype in _DTYPES:
        size = _GPU_PROBE_SIZE if device.type == "cuda" else _CPU_PROBE_SIZE
        a = torch.full((size, size), 0.5, dtype=dtype, device=device)
        out = torch.empty_like(a)
        if device.type == "cpu" and _best(lambda a=a: a @ a, device, repeats=1) < _FAST_PROBE:  # type: ignore[misc]
            size = _LARGE_CPU_PROBE
            a = torch.full((size, size), 0.5, dtype=dtype, device=device)
            out = torch.empty_like(a)
        large = 2.0 * size**3 / _best(lambda a=a, out=out: torch.mm(a, a, out=out), device)  # type: ignore[misc]
        # Where a CPU has no instructions for a dtype, small batched products go another and faster way.
        b = torch.full((_BATCH, _SIDE, _SIDE), 0.5, dtype=dtype, device=device)
        batch = 2.0 * _BATCH * _SIDE**3 / _best(lambda b=b: torch.bmm(b, b), device)  # type: ignore[misc]
        rates[str(dtype).removeprefix("torch.")] = max(large, batch)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Ceilings(rates, 2.0 * _COPY_BYTES / _best(lambda: target.copy_(source), device))


def better(a: Ceilings, b: Ceilings) -> Ceilings:
    """The higher of two measurements of each rate: whatever else runs on a machine only lowers them."""
    return Ceilings({name: max(rate, b.gemm[name]) for name, rate in a.gemm.items()}, max(a.copy, b.copy))


def busy_warning(load: float, cores: int) -> str:
    """What to say where other processes share the processor (load average of a minute before a run); empty if few do."""
    if load <= _QUIET * cores:
        return ""
    return (
        f"WARNING: the machine was busy when the run began (load {load:.1f} on {cores} cores). "
        "Threads that wait for one another then lose orders of magnitude: take no figure from this run"
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _give_back_freed_memory() -> None:
    """Make the C allocator return what was freed, so that a later allocation shows as new resident memory."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def extra_memory(call: Callable[[], object], device: torch.device) -> int:
    """Peak bytes during one call beyond what was in use before it.

    On a CPU that is the high-water mark of resident memory, reset before the call, minus the resident memory before it,
    which was first freed of what the allocator kept. On a GPU it is what PyTorch's allocator handed out at most.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - int(before)
    _give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)

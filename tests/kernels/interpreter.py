"""Triton's kernels as Python: the modules that hold them, imported anew under the interpreter for as long as a test needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

KERNEL_MODULES = (
    "update_tile",
    "symmetric_matmul",
    "muon_prep",
    "small_ns",
    "triton_ops",
    "muon_triton",
    "autotune",
    "loss_math",
    "loss_kernels",
    "loss_rows",
    "loss_gemm",
    "loss_triton",
    "linear_triton",
)


@contextmanager
def interpreted() -> Iterator[None]:
    """Let ``backend="triton"`` run on the CPU: what TRITON_INTERPRET=1 does for a whole process.

    Compiled and interpreted kernels cannot share a process by themselves: `triton.jit` asks once, when it decorates, and
    Triton's own functions (`tl.sum`) were decorated when it was imported.
    """
    import muonrl_kernels

    names = [f"muonrl_kernels.{name}" for name in KERNEL_MODULES]
    with pytest.MonkeyPatch.context() as patch:
        for space in (tl, tl.standard):
            for name, value in list(vars(space).items()):
                if isinstance(value, triton.JITFunction):
                    patch.setattr(space, name, InterpretedFunction(value.fn))
        patch.setattr(triton.knobs.runtime, "interpret", True)
        for short, name in zip(KERNEL_MODULES, names, strict=True):
            if name in sys.modules:
                patch.delitem(sys.modules, name)
                patch.delattr(muonrl_kernels, short, raising=False)
        try:
            for name in names:
                importlib.import_module(name)
            yield
        finally:
            for short, name in zip(KERNEL_MODULES, names, strict=True):
                sys.modules.pop(name, None)
                vars(muonrl_kernels).pop(short, None)

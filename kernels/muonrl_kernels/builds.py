"""Every Triton kernel of the package as it is launched, for compiling ahead of time without a GPU.

What an audit of registers, spills and tensor-core instructions compiles is what a user's first step compiles: the same
kernels, constants, tiles and types of arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from muonrl_kernels.loss_builds import loss_builds
from muonrl_kernels.muon_prep import matrix_norms, matrix_scales, write_iterate
from muonrl_kernels.small_ns import small_newton_schulz
from muonrl_kernels.symmetric_matmul import panel_product, symmetric_product
from muonrl_kernels.tuning import TUNINGS, Tile, Tuning
from muonrl_kernels.update_tile import update_panels

__all__ = ["TARGETS", "Build", "builds"]

TARGETS: Final[dict[str, GPUTarget]] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Build:
    """One compilation: what ``triton.compile(ASTSource(kernel, signature, constexprs, attrs))`` needs, and what it must show.

    Attributes:
        matrix: must contain tensor-core instructions.
        tma: must contain loads through tensor descriptors.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    num_stages: int
    matrix: bool
    tma: bool


_TYPES: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("weight_ptr", "stride_ptr", "grad_ptr", "grad_stride_ptr", "momentum_ptr", "momentum_stride_ptr"),
        "*i64",
    ),
    **dict.fromkeys(("starts_ptr", "counts_ptr", "owners_ptr", "size_ptr", "finite_ptr", "key_ptr"), "*i32"),
    **dict.fromkeys(
        (
            "scale_ptr",
            "ratio_ptr",
            "hyper_ptr",
            "gain_ptr",
            "first_gain_ptr",
            "later_gain_ptr",
            "peak_ptr",
            "square_ptr",
            "mu_ptr",
            "steps_ptr",
        ),
        "*fp32",
    ),
    **dict.fromkeys(("alpha", "beta", "gamma", "shift", "eps"), "fp32"),
    **dict.fromkeys(("matrices", "panels", "m_pad", "bands", "steps", "schatten4"), "i32"),
}
"""Types of the arguments by name; those of the iterates depend on the build."""

_DIVISIBLE: Final = ("m_pad", "vocabulary", "pitch", "out_pitch", "width", "count")
"""Integers that are multiples of 16 in every launch."""


def _build(name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **rest: Any) -> Build:
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {n: "constexpr" if n in constants else {**_TYPES, **types}[n] for n in names}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in _DIVISIBLE
    }
    return Build(name, kernel, signature, constants, attrs, **rest)


def _products(tile: Tile, tuning: Tuning, element: str) -> Iterator[Build]:
    """The products of one tile shape: X X^T, m x m products, to panels and fused with the update."""
    pointer = f"*{element}"
    wide = f"tensordesc<{element}[{tile.block},{tile.block_k}]>" if tuning.tma else pointer
    deep = f"tensordesc<{element}[{tile.block_k},{tile.block}]>" if tuning.tma else pointer
    rest = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "matrix": True, "tma": tuning.tma}
    shape = f"{tile.block}x{tile.block}x{tile.block_k} {element}"
    base = {"BLOCK": tile.block, "BLOCK_K": tile.block_k, "USE_TMA": tuning.tma}
    types = dict.fromkeys(("a_ptr", "b_ptr", "x_ptr", "out_ptr"), pointer)
    for ragged in (True, False):
        operands = {"a_source": wide, "b_source": wide if ragged else deep}
        constants: dict[str, Any] = {**base, "RAGGED": ragged, "ADD_OPERANDS": not ragged}
        if not ragged:
            constants["scale_ptr"] = None
        label = "syrk" if ragged else "symm_mm"
        yield _build(f"{label} {shape}", symmetric_product, {**types, **operands}, constants, **rest)
    operands = {"p_source": wide, "x_source": deep}
    for label, constants in _targets().items():
        if constants["WEIGHT_DTYPE"] == tl.bfloat16 and not tuning.fuses_half:
            continue
        yield _build(f"{label} {shape}", panel_product, {**types, **operands}, {**base, **constants}, **rest)


def _targets() -> dict[str, dict[str, Any]]:
    """Constants of the last product by what it is fused with."""
    plain = {
        "ALIGNED": True,
        "WIDE": False,
        "CAUTIOUS": False,
        "STOCHASTIC": False,
        "key_ptr": None,
        "WEIGHT_DTYPE": tl.float32,
    }
    nothing = dict.fromkeys(("finite_ptr", "ratio_ptr", "hyper_ptr"))
    unused = dict.fromkeys(("weight_ptr", "stride_ptr", "size_ptr"))
    return {
        "gemm_qx": {**plain, **nothing, **unused, "MODE": "panels", "ALIGNED": False},
        "gemm_qx_update": {**plain, "MODE": "update", "out_ptr": None},
        "gemm_qx_update cautious": {**plain, "CAUTIOUS": True, "MODE": "update", "out_ptr": None},
        "gemm_qx_update bf16": {**plain, "WEIGHT_DTYPE": tl.bfloat16, "MODE": "update", "out_ptr": None},
        "gemm_qx_write": {**plain, **nothing, "MODE": "write", "out_ptr": None},
    }


def _small(tuning: Tuning) -> Iterator[Build]:
    constants = _targets()["gemm_qx_update"]
    del constants["out_ptr"]
    types = {"x_ptr": "*fp16", "scratch_ptr": "*fp16"}
    side = 16
    while side <= tuning.small_side:
        shape = {"SIDE": side, "COLUMNS": tuning.small_columns}
        warps = 8 if side >= 128 else 4
        yield _build(
            f"small_ns {side}",
            small_newton_schulz,
            types,
            {**constants, **shape},
            num_warps=warps,
            num_stages=1,
            matrix=True,
            tma=False,
        )
        side *= 2


def _preparation(tuning: Tuning) -> Iterator[Build]:
    rest = {"num_stages": 1, "matrix": False, "tma": False}
    constants = {
        "ROWS": tuning.rows,
        "COLUMNS": tuning.large.block,
        "GRAD_DTYPE": tl.float32,
        "MOMENTUM_DTYPE": tl.float32,
        "STYLE": "ema",
        "NESTEROV": True,
        "ALIGNED": True,
        "WIDE": False,
    }
    warps = tuning.prep_warps
    yield _build("muon_prep norms", matrix_norms, {}, constants, num_warps=warps, **rest)
    yield _build("muon_prep scales", matrix_scales, {}, {"CHUNK": 1024}, num_warps=4, **rest)
    rounded = {**_targets()["gemm_qx_update bf16"], "CAUTIOUS": True, "STOCHASTIC": True}
    for name in ("out_ptr", "key_ptr"):
        del rounded[name]
    shape = {"ROWS": tuning.rows, "COLUMNS": tuning.large.block}
    types = {"o_ptr": "*fp16"}
    yield _build("update_panels", update_panels, types, {**rounded, **shape}, num_warps=warps, **rest)
    yield _build("muon_prep iterate", write_iterate, {"out_ptr": "*fp16"}, constants, num_warps=warps, **rest)


def builds(target: str) -> list[Build]:
    """Every kernel of the package in the shapes in which it is launched on a target.

    Raises:
        ValueError: unknown target.
        RuntimeError: Triton's interpreter is on, so there is nothing to compile.
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; the targets are {', '.join(TARGETS)}")
    if not isinstance(symmetric_product, triton.JITFunction):
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET=1 is set")
    tuning = TUNINGS[target]
    return [
        *_products(tuning.large, tuning, "fp16"),
        *_products(tuning.medium, tuning, "fp16"),
        *_products(tuning.large, tuning, "bf16"),
        *_small(tuning),
        *_preparation(tuning),
        *loss_builds(tuning, _build),
    ]

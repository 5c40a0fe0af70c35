"""Kernels whose audit has a known outcome."""

import dataclasses
from typing import Any

import triton
import triton.language as tl

ALIGNED = [["tt.divisibility", 16]]


@dataclasses.dataclass(frozen=True)
class Build:
    """What the audit reads of a build."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int = 4
    num_stages: int = 2
    matrix: bool = False
    tma: bool = False


@triton.jit
def product(a, b, c, lr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        x = tl.load(
            a + rows[:, None] * K + inner[None, :], mask=(rows[:, None] < M) & (inner[None, :] < K), other=0.0
        )
        y = tl.load(
            b + inner[:, None] * N + columns[None, :],
            mask=(inner[:, None] < K) & (columns[None, :] < N),
            other=0.0,
        )
        acc = tl.dot(x, y, acc)
    out = c + rows[:, None] * N + columns[None, :]
    tl.store(out, (acc * lr).to(tl.float16), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def tiles(a, c, N, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    x = a.load([row, column])
    c.store([row, column], tl.dot(x, tl.trans(x)).to(tl.float16))


@triton.jit
def scale(x, lr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < N) * lr, mask=at < N)


@triton.jit
def scale_constant(x, N, lr: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < N) * lr, mask=at < N)


def product_build(size=64, inner=32, **options):
    pointers = dict.fromkeys("abc", "*fp16")
    numbers = {"lr": "fp32", "M": "i32", "N": "i32", "K": "i32"}
    constants = {"BM": size, "BN": size, "BK": inner}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    attrs = {(i,): ALIGNED for i in (0, 1, 2, 4, 5, 6)}
    return Build(
        f"product[{size}x{size}x{inner}]", product, signature, constants, attrs, matrix=True, **options
    )


@triton.jit
def gram(a, c, SIDE: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    x = tl.load(a + at)
    tl.store(c + at, tl.dot(x, tl.trans(x)).to(tl.float16))


def gram_build(side):
    signature = {"a": "*fp16", "c": "*fp16", "SIDE": "constexpr"}
    attrs = {(0,): ALIGNED, (1,): ALIGNED}
    return Build(f"gram {side}", gram, signature, {"SIDE": side}, attrs, matrix=True)


def tiles_build(**options):
    tile = "tensordesc<fp16[64, 64]>"
    signature = {"a": tile, "c": tile, "N": "i32", "BLOCK": "constexpr"}
    return Build("tiles", tiles, signature, {"BLOCK": 64}, {}, matrix=True, tma=True, **options)


def scale_build(**options):
    signature = {"x": "*fp32", "lr": "fp32", "N": "i32", "BLOCK": "constexpr"}
    return Build("scale", scale, signature, {"BLOCK": 1024}, {(0,): ALIGNED}, **options)


def constant_build():
    signature = {"x": "*fp32", "N": "i32", "lr": "constexpr", "BLOCK": "constexpr"}
    constants = {"lr": 1e-3, "BLOCK": 1024}
    return Build("scale_constant", scale_constant, signature, constants, {(0,): ALIGNED})

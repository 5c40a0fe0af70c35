"""Compile every kernel and tuned configuration for GPUs that are not at hand, and look at what came out.

A finding is: a spilled register, more shared memory than a block may have, a matrix kernel without the target's matrix
instructions, a TMA kernel without TMA loads, a compilation that fails, and a kernel that would be compiled again when a
learning rate, a weight decay or a coefficient changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from benchmarks.disassembly import NARROW, SHARED_LIMIT, TENSOR_CORE, Anatomy, read_amd, read_nvidia
from benchmarks.report import table

__all__ = ["Build", "Row", "audit", "inspect_build", "recompiling_arguments", "to_table"]

RATES: Final = (1e-3, 2.5e-4, 1.0)
"""Values of a scalar between which no kernel may be compiled again."""
_ALIGNED: Final = 16
_TILE_SIDES: Final = ("BLOCK", "SIDE")
"""Constants by which the kernels are told the side of their tile."""
_WIDE_ROWS: Final = 64


class Build(Protocol):
    """What is read of a build; muonrl_kernels.builds makes them."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> Any: ...
    @property
    def signature(self) -> dict[str, str]: ...
    @property
    def constexprs(self) -> dict[str, Any]: ...
    @property
    def attrs(self) -> dict[tuple[int, ...], list[list[Any]]]: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def matrix(self) -> bool: ...
    @property
    def tma(self) -> bool: ...


@dataclass(frozen=True)
class Row:
    """One build on one target: its anatomy (None if it did not compile) and what is wrong with it."""

    target: str
    name: str
    num_warps: int
    num_stages: int
    anatomy: Anatomy | None
    problems: tuple[str, ...]


def _compile(build: Build, gpu: Any) -> Anatomy:
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(build.kernel, build.signature, build.constexprs, build.attrs)
    options = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        # Triton is about to change this default.
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=gpu, options=options)
    shared = int(compiled.metadata.shared)
    if gpu.backend == "hip":
        return read_amd(compiled.asm["amdgcn"], shared)
    return read_nvidia(compiled.asm["cubin"], shared)


def _is_scalar(kind: str) -> bool:
    return kind in ("fp16", "bf16", "fp32", "fp64")


def recompiling_arguments(build: Build, gpu: Any) -> list[str]:
    """Names of float arguments on whose value the compiled code depends.

    Float constants are baked into the code by definition. For every other float argument Triton's own binder is asked
    for the cache key under several values.
    """
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import compute_cache_key, create_function_from_signature

    kernel = build.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(gpu))
    values = {
        name: build.constexprs[name] if kind == "constexpr" else 1.5 if _is_scalar(kind) else _ALIGNED
        for name, kind in build.signature.items()
    }

    def key(changed: Mapping[str, float]) -> str:
        _, specialization, options = bind(**{**values, **changed})
        return str(compute_cache_key({}, specialization, options))

    baked = [n for n, kind in build.signature.items() if kind == "constexpr" and isinstance(values[n], float)]
    scalars = [name for name, kind in build.signature.items() if _is_scalar(kind)]
    return baked + [name for name in scalars if len({key({name: rate}) for rate in RATES}) > 1]


def _matrix_instructions(build: Build, target: str) -> tuple[str, ...]:
    """The instructions one of which a matrix kernel must have: the target's wide ones, unless its tile is too small."""
    sides = [build.constexprs[name] for name in _TILE_SIDES if name in build.constexprs]
    narrow = bool(sides) and max(sides) < _WIDE_ROWS
    return TENSOR_CORE[target] + (NARROW.get(target, ()) if narrow else ())


def _problems(build: Build, target: str, anatomy: Anatomy) -> list[str]:
    found = []
    if anatomy.spills or anatomy.stack:
        found.append(f"spills ({anatomy.spills} instructions, {anatomy.stack} B of stack)")
    if anatomy.shared > SHARED_LIMIT[target]:
        found.append(f"{anatomy.shared} B of shared memory, the limit is {SHARED_LIMIT[target]}")
    needed = _matrix_instructions(build, target)
    if build.matrix and not any(anatomy.matrix.get(name) for name in needed):
        found.append(f"no {' or '.join(needed)} instruction")
    if build.tma and not anatomy.tma:
        found.append("no TMA load")
    return found


def inspect_build(build: Build, target: str, gpu: Any) -> Row:
    """Compile one build for one target and judge it."""
    try:
        anatomy = _compile(build, gpu)
    except Exception as error:  # noqa: BLE001 - a compiler's failure of any kind is a finding
        text = (str(error).strip().splitlines() or [""])[0]
        problem = f"does not compile: {type(error).__name__}: {text}"
        return Row(target, build.name, build.num_warps, build.num_stages, None, (problem,))
    problems = _problems(build, target, anatomy)
    again = recompiling_arguments(build, gpu)
    if again:
        problems.append(f"compiled again when {', '.join(again)} changes")
    return Row(target, build.name, build.num_warps, build.num_stages, anatomy, tuple(problems))


def audit(
    targets: Sequence[str] | None,
    builds_for: Callable[[str], Sequence[Build]],
    gpus: Mapping[str, Any],
    log: Callable[[str], None],
) -> list[Row]:
    """Inspect all builds of the targets (None: every target).

    Raises:
        ValueError: an unknown target.
    """
    unknown = [target for target in targets or () if target not in gpus]
    if unknown:
        raise ValueError(f"--target must be among {', '.join(gpus)}; got {', '.join(unknown)}")
    rows = []
    for target in targets or gpus:
        for build in builds_for(target):
            rows.append(inspect_build(build, target, gpus[target]))
            log(f"{target} {build.name}: {'; '.join(rows[-1].problems) or 'clean'}")
    return rows


_HEAD: Final = (
    "kernel",
    "target",
    "warps",
    "stages",
    "registers",
    "spills",
    "stack",
    "shared",
    "matrix",
    "TMA",
    "",
)


def _cells(row: Row) -> tuple[str, ...]:
    known = (row.name, row.target, str(row.num_warps), str(row.num_stages))
    verdict = "; ".join(row.problems) or "clean"
    if row.anatomy is None:
        return (*known, "", "", "", "", "", "", verdict)
    a = row.anatomy
    matrix = ", ".join(f"{count} {name}" for name, count in a.matrix.items()) or "-"
    shared = f"{a.shared / 1024:.0f} KiB"
    return (
        *known,
        str(a.registers),
        str(a.spills),
        f"{a.stack} B",
        shared,
        matrix,
        str(a.tma or "-"),
        verdict,
    )


def to_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return table(_HEAD, [_cells(row) for row in rows])

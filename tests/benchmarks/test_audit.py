"""The audit: clean for what ships, and every kind of finding is really found."""

import dataclasses

import pytest
from triton.backends.compiler import GPUTarget

from benchmarks import audit
from benchmarks.cli import main
from benchmarks.disassembly import SHARED_LIMIT, TENSOR_CORE, Anatomy
from tests.benchmarks import audit_kernels as kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def inspect(build, target="sm_90"):
    return audit.inspect_build(build, target, TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
def test_a_matrix_product_is_clean_and_uses_the_matrix_cores(target):
    row = inspect(kernels.product_build(), target)
    assert row.problems == ()
    a = row.anatomy
    assert a.registers > 16 and a.spills == 0 and a.stack == 0 and 0 < a.shared <= SHARED_LIMIT[target]
    assert sum(a.matrix[name] for name in TENSOR_CORE[target]) > 0 and set(a.matrix) == set(
        TENSOR_CORE[target]
    )


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_tma_loads_are_seen(target):
    row = inspect(kernels.tiles_build(), target)
    assert row.problems == () and row.anatomy.tma > 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_spill_is_found(target):
    # 256 x 256 accumulators in fp32 are more than the registers of two (one) warps hold.
    warps = 1 if target == "gfx942" else 2
    row = inspect(kernels.product_build(256, 32, num_warps=warps, num_stages=1), target)
    assert row.anatomy.spills > 0 and any("spills" in problem for problem in row.problems)


@pytest.mark.parametrize("target", TARGETS)
def test_missing_matrix_instructions_are_found(target):
    row = inspect(kernels.scale_build(matrix=True), target)
    assert row.problems == (f"no {TENSOR_CORE[target][0]} instruction",)
    assert inspect(kernels.scale_build(), target).problems == ()


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_a_small_tile_may_use_the_narrow_instruction_and_a_large_one_may_not(target):
    small = inspect(kernels.gram_build(32), target)
    assert small.problems == () and set(small.anatomy.matrix) == {"HMMA"}
    large = inspect(kernels.gram_build(64), target)
    assert large.problems == () and set(large.anatomy.matrix) == set(TENSOR_CORE[target])
    # The same code for a kernel that says its tile is large.
    claimed = dataclasses.replace(kernels.gram_build(32), constexprs={"SIDE": 32, "BLOCK": 128})
    assert audit._problems(claimed, target, small.anatomy) == [f"no {TENSOR_CORE[target][0]} instruction"]


def test_missing_tma_is_found():
    assert inspect(kernels.product_build(tma=True)).problems == ("no TMA load",)


def test_too_much_shared_memory_is_found():
    row = inspect(kernels.product_build(128, 128, num_warps=8, num_stages=4))
    assert row.anatomy.shared > SHARED_LIMIT["sm_90"]
    assert any("of shared memory, the limit is 232448" in problem for problem in row.problems)


def test_a_kernel_that_does_not_compile_is_a_finding():
    build = dataclasses.replace(kernels.product_build(), constexprs={"BM": 63, "BN": 64, "BK": 32})
    row = inspect(build)
    assert row.anatomy is None and row.problems[0].startswith("does not compile: ")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_baked_learning_rate_is_found(target):
    gpu = TARGETS[target]
    assert audit.recompiling_arguments(kernels.product_build(), gpu) == []
    assert audit.recompiling_arguments(kernels.scale_build(), gpu) == []
    assert audit.recompiling_arguments(kernels.constant_build(), gpu) == ["lr"]
    assert "compiled again when lr changes" in inspect(kernels.constant_build(), target).problems


def test_the_binder_sees_values_that_matter(monkeypatch):
    # An integer argument is specialised on being 1: the comparison of keys would notice a float that is treated so.
    integers = dataclasses.replace(
        kernels.scale_build(), signature={**kernels.scale_build().signature, "N": "fp32"}
    )
    monkeypatch.setattr(audit, "RATES", (16, 7, 1))
    assert "N" in audit.recompiling_arguments(integers, TARGETS["sm_90"])


def test_the_table_and_the_targets():
    rows = audit.audit(
        ["sm_90", "gfx942"],
        lambda target: [kernels.scale_build(), kernels.constant_build()],
        TARGETS,
        lambda _: None,
    )
    assert [(row.target, row.name) for row in rows] == [
        ("sm_90", "scale"),
        ("sm_90", "scale_constant"),
        ("gfx942", "scale"),
        ("gfx942", "scale_constant"),
    ]
    text = audit.to_table(rows)
    assert text.count("clean") == 2 and text.count("compiled again when lr changes") == 2
    with pytest.raises(ValueError, match="--target must be among sm_80, .*; got sm_70"):
        audit.audit(["sm_70"], lambda target: [], TARGETS, lambda _: None)


def test_a_failed_row_has_a_place_in_the_table():
    failed = audit.Row("sm_90", "k", 4, 2, None, ("does not compile: x",))
    good = audit.Row("sm_90", "g", 4, 2, Anatomy(90, 0, 0, 1 << 17, {"HGMMA": 8}, 4), ())
    lines = audit.to_table([failed, good]).splitlines()
    assert "does not compile: x" in lines[2] and "128 KiB" in lines[3] and "8 HGMMA" in lines[3]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_everything_that_ships_is_clean(target):
    from muonrl_kernels import builds

    found = builds.builds(target)
    assert found and len({build.name for build in found}) == len(found)
    rows = audit.audit([target], builds.builds, builds.TARGETS, lambda _: None)
    dirty = [row for row in rows if row.problems]
    assert not dirty, "\n" + audit.to_table(dirty)


def test_the_command_prints_a_table_and_fails_on_a_finding(monkeypatch, capsys):
    import types

    fake = types.SimpleNamespace(builds=lambda target: [kernels.scale_build()], TARGETS=TARGETS)
    monkeypatch.setitem(__import__("sys").modules, "muonrl_kernels.builds", fake)
    assert main(["audit", "--target", "sm_90", "--markdown"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("| kernel") and "clean" in out.out and out.err == ""
    fake.builds = lambda target: [kernels.constant_build()]
    assert main(["audit", "--target", "sm_90"]) == 1
    assert "sm_90 scale_constant: compiled again when lr changes" in capsys.readouterr().err

"""The cost model against numbers worked out by hand."""

import pytest
import torch

from benchmarks.cases import CASES, flops_of
from benchmarks.cost import ALGORITHMS, WORKSPACE_BYTES, Op, executed_flops, step_ops, total
from benchmarks.estimate import GPUS, Assumptions, Gpu, estimate, estimate_text
from benchmarks.flops import gram_flops, standard_flops, symmetric_flops
from muonrl_kernels import iteration
from muonrl_kernels.coefficients import KJ


def test_formulas_on_one_matrix_by_hand():
    # m = 2, n = 6: 4 m^2 n = 96, 2 m^3 = 16; five steps.
    assert standard_flops(2, 6) == 5 * (96 + 16)
    assert symmetric_flops(2, 6) == 5 * (72 + 8)
    # (6 alpha + 14) m^3 with alpha = 3.
    assert gram_flops(2, 6) == (18 + 14) * 8
    assert gram_flops(2, 6, restarts=0) == 72 + (5 + 12) * 8


@pytest.mark.parametrize(
    ("case", "matrices", "parameters", "tera"),
    [
        ("qwen3-60m", 98, 44.04e6, 0.531),
        ("minicpm5-2b", 294, 1.982e9, 97.6),
        ("qwen3.5-4b", 200, 3.565e9, 212.3),
    ],
)
def test_models_have_the_published_sizes(case, matrices, parameters, tera):
    found = CASES[case]
    assert sum(count for *_, count in found.shapes) == matrices
    assert found.parameters == pytest.approx(parameters, rel=1e-3)
    assert flops_of(found.shapes) == pytest.approx(tera * 1e12, rel=1e-3)


@pytest.mark.parametrize(("m", "n"), [(256, 256), (256, 1024), (384, 500)])
def test_products_add_up_to_the_formulas(m, n):
    def flops(name):
        return total(step_ops(name, [(m, n, 3)])).flops / 3

    assert flops("torch") == pytest.approx(standard_flops(m, n))
    assert flops("eager batched") == pytest.approx(standard_flops(m, n))
    assert flops("symmetric batched") == pytest.approx(symmetric_flops(m, n))
    expected = symmetric_flops(m, n) if m == n else gram_flops(m, n)
    assert flops("gram batched") == pytest.approx(expected)
    assert flops("fused") == pytest.approx(expected)


def test_the_plain_gram_form_has_no_triangles():
    # X X^T twice and Q X twice: 8 m^2 n; 5 squares and 9 commuting products: 28 m^3.
    m, n = 100, 300
    assert total(step_ops("plain gram batched", [(m, n, 1)])).flops == 8 * m * m * n + 28 * m**3


def test_bytes_outside_of_products():
    x = 512 * 2048
    assert total(step_ops("fused", [(512, 2048, 1)])).elementwise == 30 * x
    # 54 bytes a parameter, and each addmm copies its addend: 5 x 4 bytes of X and 5 x 4 of the Gram matrix.
    assert total(step_ops("torch", [(512, 2048, 1)])).elementwise == 54 * x + 20 * x + 20 * 512 * 512


def test_a_product_moves_each_operand_once():
    (outer,) = [op for op in step_ops("gram batched", [(100, 300, 1)]) if op.name == "X X^T"][:1]
    assert outer.nbytes == 2 * (100 * 300 + 100 * 100)
    assert outer.flops == 100 * 100 * 300
    assert outer.kind == "triangle"


def test_launches_are_shared_by_shape_up_to_transposition():
    one = total(step_ops("fused", [(256, 1024, 1)])).launches
    assert total(step_ops("fused", [(256, 1024, 7), (1024, 256, 2)])).launches == one
    # 7 kernels before the iteration, 15 products, 10 copies of addends, 2 for the update.
    assert total(step_ops("torch", [(256, 1024, 7), (1024, 256, 2)])).launches == 9 * 34


def test_small_matrices_take_one_launch_for_the_iteration():
    found = total(step_ops("fused", [(64, 192, 32)]))
    assert found.launches == 4  # norms, scales, first iterate, iteration with the update
    assert found.flops == 32 * (8 * 64 * 64 * 192 + 28 * 64**3)


def test_the_workspace_bounds_what_shares_a_launch():
    # 2 x 2560 x (2 x 9216 + 4 x 2560) bytes: 146.8 MB each, 14 in 2 GiB, so 96 matrices take seven times the launches.
    one = total(step_ops("fused", [(9216, 2560, 1)])).launches
    assert total(step_ops("fused", [(9216, 2560, 14)])).launches == one
    assert total(step_ops("fused", [(9216, 2560, 64), (2560, 9216, 32)])).launches == 7 * one
    from muonrl_kernels import muon_triton

    assert WORKSPACE_BYTES == muon_triton._WORKSPACE_BYTES


def test_executed_operations_are_what_the_package_counts():
    shapes = [(1536, 512, 28), (512, 512, 4)]
    found = executed_flops(shapes, torch.float32)
    by_hand = sum(
        count
        * iteration.flops(
            512, max(rows, columns), KJ, iteration.choose_method(512, max(rows, columns), KJ, torch.float32)
        )
        for rows, columns, count in shapes
    )
    assert found == by_hand
    # More than the Gram form with perfect triangles and no restart, fewer than the standard form.
    assert sum(gram_flops(512, max(r, c), restarts=0) * n for r, c, n in shapes) < found < flops_of(shapes)
    assert total(step_ops("own", shapes, 4)).flops == pytest.approx(found)


def test_an_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="algorithm must be one of.*'guess'"):
        step_ops("guess", [(1, 1, 1)])
    assert all(step_ops(name, [(130, 260, 2)]) for name in ALGORITHMS)


def test_the_estimate_takes_the_longest_of_arithmetic_traffic_and_launches():
    gpu = Gpu("test", flops=100.0, bandwidth=10.0)
    shares = Assumptions(gemm=0.5, triangle=0.5, bandwidth=0.5, launch=2.0)
    assert estimate([Op("p", "product", 1000.0, 0.0, 1)], gpu, shares) == 20.0
    assert estimate([Op("t", "triangle", 1000.0, 0.0, 1)], gpu, shares) == 40.0
    assert estimate([Op("e", "elementwise", 0.0, 100.0, 1)], gpu, shares) == 20.0
    assert estimate([Op("l", "elementwise", 0.0, 0.0, 3)], gpu, shares) == 6.0


def test_the_floor_on_an_h200_is_that_of_the_design():
    # 212 TFLOP of plain products at 80 % of 989 TFLOP/s take 268 ms, the Gram form with perfect triangles 124 ms.
    h200 = next(gpu for gpu in GPUS if gpu.name.startswith("H200"))
    shapes = CASES["qwen3.5-4b"].shapes
    for name, floor in (("torch", 0.268), ("fused", 0.124)):
        products = [op for op in step_ops(name, shapes) if op.kind != "elementwise"]
        bare = [Op(op.name, "product", op.flops, 0.0, 0) for op in products]
        assert estimate(bare, h200) == pytest.approx(floor, rel=0.01)


def test_an_estimate_says_that_it_is_one():
    text = estimate_text([CASES["qwen3-60m"]])
    assert text.startswith("ESTIMATE") and "not a measurement" in text and "80% of the peak" in text
    assert "~" in text and all(gpu.name in text for gpu in GPUS)

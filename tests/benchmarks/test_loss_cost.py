"""The loss's cost model and cases against numbers worked out by hand."""

import pytest

from benchmarks.cost import Op
from benchmarks.estimate import GPUS, Assumptions, estimate, estimate_loss_text
from benchmarks.loss_cases import (
    LOSS_CASES,
    choose_loss_cases,
    describe_rows,
    shrink_rows,
    valid_rows,
)
from benchmarks.loss_cost import (
    ALGORITHMS,
    Problem,
    elementwise_bytes,
    floor_flops,
    loss_ops,
    recompute_flops,
)


def flops(algorithm, problem):
    return sum(op.flops for op in loss_ops(algorithm, problem))


def nbytes(algorithm, problem):
    return sum(op.nbytes for op in loss_ops(algorithm, problem))


def test_formulas_by_hand():
    # 6 x 2 x 3 x 5 and 8 x 2 x 3 x 5
    assert floor_flops(2, 3, 5) == 180
    assert recompute_flops(2, 3, 5) == 240
    assert elementwise_bytes(1000) == 21000


def test_the_floors_of_the_design():
    # 96.8 and 133.6 ms at 790 TFLOP/s.
    assert LOSS_CASES["h2560-100"].floor / 790e12 == pytest.approx(96.8e-3, rel=1e-3)
    assert LOSS_CASES["h4096-100"].floor / 790e12 == pytest.approx(133.6e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "factor", "rows"),
    [
        ("single pass", 6, 12),
        ("single pass all rows", 6, 40),
        ("fused", 8, 12),
        ("naive", 6, 40),
        ("checkpoint", 8, 12),
        ("recompute", 8, 12),
        ("recompute all rows", 8, 40),
    ],
)
def test_products_add_up_to_the_formulas_over_the_rows_that_enter(algorithm, factor, rows):
    problem = Problem(rows=40, valid=12, hidden=7, vocabulary=11, chunk=5)
    assert flops(algorithm, problem) == factor * rows * 7 * 11


def test_every_algorithm_is_checked():
    assert len(ALGORITHMS) == 7
    with pytest.raises(ValueError, match="algorithm must be one of single pass, .*, got 'magic'"):
        loss_ops("magic", Problem(1, 1, 1, 1))


def test_bytes_of_a_single_pass_by_hand():
    # 4 valid of 8 rows in 2 chunks of 2, H 3, V 5, 2-byte inputs: n V = 20, V H = 15, n H = 12.
    ops = {
        op.name: op for op in loss_ops("single pass", Problem(8, 4, hidden=3, vocabulary=5, size=2, chunk=2))
    }
    assert ops["logits"].nbytes == 2 * 12 + 2 * 2 * 15 + 4 * 20
    assert ops["d hidden"].nbytes == 2 * 20 + 2 * 2 * 15 + 2 * 12
    # The fp32 accumulator is read and written by each chunk.
    assert ops["d weight"].nbytes == 2 * 20 + 2 * 12 + 2 * 8 * 15
    assert ops["statistics"].nbytes == 4 * 20
    assert ops["gradient of the logits"].nbytes == (4 + 2) * 20
    # d weight from fp32 to 2 bytes; d hidden of all 8 rows read and written.
    assert ops["scaled gradients"].nbytes == (4 + 2) * 15 + 2 * 2 * 8 * 3
    assert len(ops) == 6
    assert ops["logits"].launches == 2


def test_the_fused_path_moves_no_fp32_logits():
    # The sizes of the single pass above; only the gradient of the logits is written, in 2 bytes, and read twice.
    weight, rows, logits = 2 * 2 * 15, 2 * 12, 2 * 20
    products = (
        (rows + weight) + (rows + weight + logits) + (logits + weight + rows) + (logits + rows + 2 * 8 * 15)
    )
    assert nbytes("fused", Problem(8, 4, 3, 5, 2, 2)) == products + 6 * 15 + 4 * 24


def test_bytes_of_the_naive_path_by_hand():
    # 8 rows, H 3, V 5, bf16: logits written in 2 bytes, then an fp32 copy, log_softmax, and everything back.
    logits = 8 * 5
    products = (
        (2 * 24 + 2 * 15 + 2 * logits) + (2 * logits + 2 * 15 + 2 * 24) + (2 * logits + 2 * 24 + 2 * 15)
    )
    passes = (6 + 8 + 4 + 12 + 6) * logits
    assert nbytes("naive", Problem(8, 4, 3, 5, 2)) == products + passes
    # fp32 inputs need no copies.
    products = 3 * (4 * 24 + 4 * 15 + 4 * logits)
    assert nbytes("naive", Problem(8, 4, 3, 5, 4)) == products + (8 + 4 + 12) * logits


def test_ours_costs_with_the_valid_rows_and_the_naive_path_does_not():
    whole, third = (Problem(30000, valid, 64, 1000) for valid in (30000, 9000))
    assert flops("single pass", third) == pytest.approx(0.3 * flops("single pass", whole))
    assert flops("naive", third) == flops("naive", whole)
    assert nbytes("naive", third) == nbytes("naive", whole)


@pytest.mark.parametrize(
    ("rows", "share", "valid"),
    [(4096, 1.0, 4096), (4096, 0.3, 1229), (4096, 0.1, 410), (10, 0.3, 3), (2, 0.1, 1), (5, 0.5, 2)],
)
def test_the_share_of_valid_rows(rows, share, valid):
    assert valid_rows(rows, share) == valid


def test_cases_by_name_and_device():
    on_cpu, on_gpu = ([case.name for case in choose_loss_cases(None, kind)] for kind in ("cpu", "cuda"))
    assert on_cpu == ["tokens", "trainer", "h512-100", "h512-30", "h512-10"]
    assert set(on_cpu) & set(on_gpu) == {"tokens", "trainer"} and len(on_gpu) == 8
    assert [case.name for case in choose_loss_cases(["h2560-30"], "cpu")] == ["h2560-30"]
    with pytest.raises(ValueError, match="cases must be among .*; got huge"):
        choose_loss_cases(["huge"], "cpu")


def test_fewer_rows_are_powers_of_two_of_the_case_and_say_so():
    case = LOSS_CASES["h512-30"]
    assert shrink_rows(case, 4096) == 4096 and shrink_rows(case, 4095.9) == 2048
    assert shrink_rows(case, 1) == 1 and shrink_rows(case, 0.5) == 0
    assert describe_rows(case, 1024) == "1024 of 4096 rows, 307 of them valid"


def test_the_floor_counts_valid_rows_only():
    assert LOSS_CASES["h512-10"].floor == 6 * 410 * 512 * 151936
    assert LOSS_CASES["tokens"].floor == 0


def test_estimates_say_what_they_are_and_leave_the_elementwise_case_out():
    text = estimate_loss_text([LOSS_CASES["tokens"], LOSS_CASES["h2560-30"]])
    assert text.startswith("ESTIMATE from the cost model, not a measurement")
    assert "one triangle" not in text and "tokens" not in text
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "h2560-30" in line]
    assert [row[1] for row in rows] == ["muonrl", "muonrl fused", "naive", "checkpoint", "trl"]
    # 6 and 8 x 9830 x 2560 x 151936, and 6 x 32768 x ..., in TFLOP
    assert [row[3] for row in rows[:3]] == ["22.9", "30.6", "76.5"]


def test_a_kernel_takes_the_longest_of_its_costs():
    product = [Op("logits", "product", 989e12 * 0.8, 0.0, 1)]
    assert estimate(product, GPUS[1], Assumptions()) == pytest.approx(1.0)

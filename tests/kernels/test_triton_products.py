"""The Triton kernels one by one: symmetric products, the product with the iterate, norms and first iterates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from muonrl_kernels import triton_layout
from muonrl_kernels.triton_layout import (
    Layout,
    device_table,
    panel_layout,
    places,
    signed_stride,
    viewable,
)
from muonrl_kernels.tuning import TUNINGS, Tile, tuning_for
from tests.numerics import assert_as_good_as

SIZES = ((40, 70), (33, 33), (40, 200))
TILE = Tile(block=32, block_k=16, num_warps=4, num_stages=1, programs=2)
SIDE = 64


@pytest.fixture
def layout(triton_device: torch.device) -> Layout:
    return panel_layout(SIZES, SIDE, TILE.block, torch.float16, triton_device)


def ops(layout: Layout) -> Any:
    from muonrl_kernels.triton_ops import TritonOps

    return TritonOps(layout, TILE, tma=False)


def to_panels(matrices: list[Tensor], layout: Layout) -> Tensor:
    """fp16 panels of zero-padded matrices."""
    parts = []
    for matrix, count in zip(matrices, layout.counts.tolist(), strict=True):
        padded = torch.zeros(layout.side, count * layout.width, dtype=torch.float16, device=matrix.device)
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        parts.extend(padded.split(layout.width, dim=1))
    return torch.cat(parts)


def from_panels(panels: Tensor, counts: list[int], layout: Layout) -> list[Tensor]:
    """The padded matrices."""
    blocks = panels.view(-1, layout.side, layout.width).split(counts)
    return [torch.cat(list(part), dim=1) for part in blocks]


def squares(panels: Tensor, layout: Layout) -> list[Tensor]:
    return from_panels(panels, [layout.side // layout.width] * layout.matrices, layout)


def check_gram_of_many_blocks(device: torch.device) -> None:
    from muonrl_kernels.triton_ops import Panels

    sizes = ((150, 170), (130, 140))
    layout = panel_layout(sizes, 160, TILE.block, torch.float16, device)
    xs = [torch.randn(size, device=device).half() for size in sizes]
    results = squares(ops(layout).gram(Panels(to_panels(xs, layout), layout.first)).w, layout)
    for x, r, (m, n) in zip(xs, results, sizes, strict=True):
        truth = x.double() @ x.double().mT / (m * n)
        assert_as_good_as(r[:m, :m], (x.float() @ x.float().mT / (m * n)).half(), truth)


def random_symmetric(layout: Layout) -> tuple[Any, list[Tensor]]:
    """Commuting symmetric matrices, as panels and as fp16 [side, side]: polynomials of one another."""
    from muonrl_kernels.triton_ops import Symmetric

    found = []
    for m, _ in SIZES:
        a = torch.randn(m, m, device=layout.starts.device) / m**0.5
        padded = torch.zeros(layout.side, layout.side, device=a.device)
        padded[:m, :m] = (a + a.mT) / 2
        found.append(padded.half())
    panels = torch.cat([part for matrix in found for part in matrix.split(layout.width, dim=1)])
    return Symmetric(panels, 0.0), found


def test_gram_is_x_xt_of_every_matrix(layout: Layout) -> None:
    from muonrl_kernels.triton_ops import Panels

    xs = [torch.randn(size, device=layout.starts.device).half() for size in SIZES]
    it = Panels(to_panels(xs, layout), layout.first)
    results = squares(ops(layout).gram(it).w, layout)
    for x, r, (m, n) in zip(xs, results, SIZES, strict=True):
        truth = x.double() @ x.double().mT / (m * n)
        assert_as_good_as(r[:m, :m], (x.float() @ x.float().mT / (m * n)).half(), truth)
        assert not r[m:].any() and not r[:, m:].any()
        assert torch.equal(r[: TILE.block, TILE.block :], r[TILE.block :, : TILE.block].mT)


def test_every_tile_of_a_large_triangle_is_found(triton_device: torch.device) -> None:
    check_gram_of_many_blocks(triton_device)


@pytest.mark.parametrize("error", [-0.5, 2.0])
def test_a_rounded_root_names_the_right_tile(
    triton_device: torch.device, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's square root may be off in the last place; here it is off by a whole row of tiles."""
    if triton_device.type != "cpu":
        pytest.skip("only the interpreter lets a test replace the root")
    monkeypatch.setattr(tl, "sqrt", lambda x: tl.math.sqrt(x) + error)
    check_gram_of_many_blocks(triton_device)


def test_products_of_symmetric_matrices(layout: Layout) -> None:
    from muonrl_kernels.triton_ops import Symmetric

    r, matrices = random_symmetric(layout)
    a, b, c = 3.4445, -4.7750, 2.0315
    z = ops(layout).polynomial(r, (a, b, c))
    assert z.shift == a
    p = Symmetric(r.w, 0.5)
    product = ops(layout).times(p, z)
    assert product.shift == 0.5 * a
    for x, got, whole in zip(matrices, squares(z.w, layout), squares(product.w, layout), strict=True):
        f, d = x.float(), x.double()
        assert_as_good_as(got, (b * f + c * f @ f).half(), b * d + c * d @ d)
        g, h = got.float(), got.double()
        assert_as_good_as(whole, (a * f + 0.5 * g + f @ g).half(), a * d + 0.5 * h + d @ h)


def test_product_with_the_iterate(layout: Layout) -> None:
    from muonrl_kernels.triton_ops import Panels, Symmetric

    r, matrices = random_symmetric(layout)
    xs = [torch.randn(size, device=layout.starts.device).half() for size in SIZES]
    it = Panels(to_panels(xs, layout), layout.first)
    y = ops(layout).apply(Symmetric(r.w, -1.5), it)
    assert y.gain is layout.later
    results = from_panels(y.x, layout.counts.tolist(), layout)
    for p, x, got, (m, n) in zip(matrices, xs, results, SIZES, strict=True):
        truth = (p[:m, :m].double() @ x.double() - 1.5 * x.double()) / m**0.5
        plain = ((p[:m, :m].float() @ x.float() - 1.5 * x.float()) / m**0.5).half()
        assert_as_good_as(got[:m, :n], plain, truth)
        assert not got[m:].any() and not got[:, n:].any()


@pytest.mark.parametrize("scale", [1e-41, 1e-36, 1e-20, 1.0, 1e18, 3e37, 1.1e38])
def test_first_iterates_have_unit_entries_at_any_scale(layout: Layout, scale: float) -> None:
    from muonrl_kernels.triton_ops import Source, first_iterate, prepare

    device = layout.starts.device
    gs = [(torch.randn(size, device=device).clamp(-3, 3) * scale) for size in SIZES]
    source = Source(places(gs), None, "none", False, torch.zeros(1, device=device))
    tuning = tuning_for(device)
    scales, finite = prepare(layout, source, tuning, 1e-7)
    assert finite.tolist() == [1, 1, 1]
    it = first_iterate(layout, source, tuning, torch.float16, scales, finite)
    for g, x, (m, n) in zip(gs, from_panels(it.x, layout.counts.tolist(), layout), SIZES, strict=True):
        truth = g.double() / g.double().norm() * (m * n) ** 0.5
        assert_as_good_as(x[:m, :n], truth.half(), truth)
        assert not x[m:].any() and not x[:, n:].any()


@pytest.mark.parametrize("largest", [5, 2400])
def test_norms_of_matrices_of_many_tiles(triton_device: torch.device, largest: int) -> None:
    """More tiles than are added up at once, whose units differ."""
    from muonrl_kernels.muon_prep import matrix_scales
    from muonrl_kernels.triton_ops import OPTIONS

    counts = torch.tensor([2500, 3], dtype=torch.int32, device=triton_device)
    starts = torch.tensor([0, 2500], dtype=torch.int32, device=triton_device)
    peaks = 2.0 ** torch.randint(-4, 0, (2503,), device=triton_device).float()
    peaks[largest] = 1.0
    sums = torch.rand(2503, device=triton_device)
    gains = torch.tensor([3.0, 5.0], device=triton_device)
    scales, finite = torch.empty(2, 2, device=triton_device), torch.empty_like(counts)
    matrix_scales[(2,)](peaks, sums, starts, counts, gains, scales, finite, 1e-7, 1, CHUNK=1024, **OPTIONS)
    for part, gain, (reciprocal, factor) in zip((peaks[:2500], peaks[2500:]), gains, scales, strict=True):
        tiles = sums[:2500] if part.numel() == 2500 else sums[2500:]
        norm = (tiles.double() * part.double().square()).sum().sqrt()
        assert reciprocal == 1 / part.max()
        assert abs(factor * reciprocal * norm / gain - 1) < 1e-5
    assert finite.tolist() == [1, 1]


def test_each_small_matrix_has_a_scratch_of_its_own(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muonrl_kernels import orthogonalize

    empty, scratch = torch.empty, []

    def recorded(*shape: Any, **options: Any) -> Tensor:
        found = empty(*shape, **options)
        if found.ndim == 4:
            scratch.append(found.zero_())
        return found

    monkeypatch.setattr(torch, "empty", recorded)
    matrices = [torch.randn(24, 30 + 20 * i, device=triton_device) for i in range(3)]
    orthogonalize(matrices, backend="triton", out=[torch.zeros_like(m) for m in matrices])
    (found,) = scratch
    assert found.shape == (3, 4, 32, 32)
    assert all(slot[:24, :24].any() for matrix in found for slot in matrix)


def huge(elements: int, device: torch.device) -> Tensor:
    """An fp16 tensor of so many elements, which costs no memory until it is touched on the CPU."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(elements, dtype=np.float16))
    return torch.empty(elements, dtype=torch.float16, device=device)


def test_panels_beyond_two_to_the_31_elements(triton_device: torch.device) -> None:
    from muonrl_kernels.triton_ops import Panels, Symmetric

    near = panel_layout(SIZES[:1], SIDE, TILE.block, torch.float16, triton_device)
    first = 2**31 // (SIDE * TILE.block) + 3
    x = torch.randn(SIZES[0], device=triton_device).half()
    panels = to_panels([x], near)
    store = huge((first + near.panels) * SIDE * TILE.block, triton_device).view(-1, TILE.block)
    store[first * SIDE :] = panels
    far = Layout(**{**vars(near), "starts": near.starts + first})
    wanted = ops(near).gram(Panels(panels, near.first))
    assert torch.equal(ops(far).gram(Panels(store, near.first)).w, wanted.w)
    assert Symmetric(wanted.w, 0.0).w.any()


@pytest.mark.parametrize("kernel", ["times", "apply"])
def test_results_beyond_two_to_the_31_elements(
    triton_device: torch.device, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last matrix of a workspace is worked on, which spares the interpreter the others."""
    from muonrl_kernels.triton_ops import Panels, Symmetric, TritonOps

    if triton_device.type != "cpu":
        pytest.skip("only the interpreter lets a test choose the programs")
    near = panel_layout(SIZES[:1], SIDE, TILE.block, torch.float16, triton_device)
    blocks = SIDE // TILE.block
    ahead = 2**31 // (SIDE * SIDE) + 3  # matrices, of `blocks` panels each
    tiles, panels = blocks * (blocks + 1) // 2, blocks
    if kernel == "apply":
        panels = near.panels
        ahead, tiles = -(-(2**31) // (SIDE * TILE.block * panels)) + 3, panels * blocks
    p = Symmetric(to_panels([random_symmetric(near)[1][0]], near)[: SIDE * blocks], 0.5)
    x = Panels(to_panels([torch.randn(SIZES[0])], near), near.first)
    operand = p.w if kernel == "times" else x.x
    store = huge((ahead + 1) * operand.numel(), triton_device).view(-1, TILE.block)
    store[-operand.shape[0] :] = operand
    owners = torch.zeros((ahead + 1) * panels, dtype=torch.int32)
    far = Layout(
        **{**vars(near), "starts": torch.zeros(ahead + 1), "owners": owners, "panels": owners.numel()}
    )

    def start_ahead(x: int, y: int, z: int) -> None:
        interpreter_builder.grid_idx = (x + ahead * tiles, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", start_ahead)
    monkeypatch.setattr(torch, "empty_like", lambda t: huge(t.numel(), t.device).view(t.shape))
    monkeypatch.setattr(Layout, "new_symmetric", lambda self, dtype: torch.empty_like(store))
    found = TritonOps(far, TILE, tma=False)
    if kernel == "times":
        got = found.times(Symmetric(store, 0.5), Symmetric(store, 0.25)).w[-operand.shape[0] :]
    else:
        got = found.apply(p, Panels(store, near.first)).x[-operand.shape[0] :]
    monkeypatch.undo()
    if kernel == "times":
        assert torch.equal(got, ops(near).times(p, Symmetric(p.w, 0.25)).w)
    else:
        assert torch.equal(got, ops(near).apply(p, x).x)


def test_tensors_beyond_two_to_the_31_elements(triton_device: torch.device) -> None:
    from muonrl_kernels import orthogonalize

    stride = 2**31 // 15 + 16
    store = huge(16 * stride, triton_device)
    g = store.as_strided((16, 24), (stride, 1))
    g.copy_(torch.randn(16, 24))
    near = g.clone()
    assert viewable(g) and torch.equal(
        orthogonalize(g, backend="triton", out=g), orthogonalize(near, backend="triton")
    )


def test_strides_name_the_side_that_runs_along_memory() -> None:
    wide, tall = torch.zeros(3, 5), torch.zeros(5, 3)
    assert signed_stride(wide) == 5 and signed_stride(tall) == -3
    assert signed_stride(wide.mT) == 5 and signed_stride(tall.mT) == -3
    assert signed_stride(torch.zeros(1, 4)) == 4 and signed_stride(torch.zeros(4, 1)) == -1
    assert signed_stride(torch.zeros(6, 10)[::2, ::2]) is None
    assert not viewable(torch.zeros(6, 10)[::2, ::2])
    assert not viewable(torch.zeros(1, 5).expand(3, 5))
    assert not viewable(torch.zeros(1, 1).expand(3, 1))
    assert viewable(torch.zeros(3, 8)[:, :5]) and viewable(torch.zeros(8, 3).mT[:, :5])


def test_wide_accesses_need_aligned_addresses_strides_and_sides() -> None:
    store = torch.zeros(64 * 64)
    assert places([store.view(64, 64)[:16, :24]]).aligned
    assert not places([store.view(64, 64)[:16, :20]]).aligned
    assert not places([store.view(64, 64)[:20, :24]]).aligned
    assert not places([store[: 16 * 20].view(16, 20)[:, :16]]).aligned
    assert not places([store[1 : 1 + 16 * 24].view(16, 24)]).aligned
    assert not places([store.view(64, 64), store[2:130].view(8, 16)]).aligned


def test_tables_are_kept_but_in_a_graph_written_by_kernels(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = (2**47 + 16, 2**62 + 1, -3, 0)
    kept = device_table(addresses, torch.int64, triton_device)
    assert kept.tolist() == list(addresses)
    assert device_table(addresses, torch.int64, triton_device) is kept
    assert device_table((1, 2), torch.int64, triton_device).dtype == torch.int64
    assert device_table((1.0, 2.0), torch.float32, triton_device).dtype == torch.float32
    before = triton_layout._uploaded.cache_info()
    layout = panel_layout(SIZES, SIDE, TILE.block, torch.float16, triton_device)
    monkeypatch.setattr(triton_layout, "_capturing", lambda device: True)
    monkeypatch.setattr(triton_layout, "_captured", [])
    recorded = device_table(addresses, torch.int64, triton_device)
    assert recorded is not kept and recorded.tolist() == list(addresses)
    rates = device_table((0.02, 1.0 - 0.02 * 0.1), torch.float32, triton_device)
    assert torch.equal(rates.cpu(), torch.tensor([0.02, 1.0 - 0.02 * 0.1]))
    assert triton_layout._uploaded.cache_info() == before
    assert panel_layout(SIZES, SIDE, TILE.block, torch.float16, triton_device) is layout
    assert triton_layout._captured == [layout]


def test_long_matrices_are_not_left_to_one_program(triton_device: torch.device) -> None:
    from muonrl_kernels import muon_triton

    for tuning in (tuning_for(triton_device), TUNINGS["sm_90"]):
        short, longest = tuning.small_side, tuning.small_panels * tuning.small_columns
        for n, small in ((longest, True), (longest + 1, False)):
            tile = muon_triton._shared("auto", short, n, torch.float16, tuning)[3]
            assert (tile is None) is small

"""The Triton kernels one by one: symmetric products, the product with the iterate, norms and first iterates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from muonrl_kernels.triton_layout import Layout, panel_layout, places, signed_stride, viewable
from muonrl_kernels.tuning import Tile, tuning_for
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


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1.0, 1e18, 3e37])
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

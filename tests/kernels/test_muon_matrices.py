"""Which matrices a parameter is made of: fused weights, heads, experts, convolutions and odd layouts in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muonrl_kernels import Muon
from tests.kernels.plain_muon import matrix
from tests.numerics import assert_exactly, relative_error

EVERYTHING: dict[str, Any] = {"lr": 0.1, "cautious_wd": True, "variant": "normuon", "beta2": 0.8}
PLAIN: dict[str, Any] = {"lr": 0.1}


def updated(weights: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], **options: Any) -> list[Tensor]:
    """Parameters that start as `weights` after one step for each entry of `grads`."""
    params = [nn.Parameter(w.clone()) for w in weights]
    optimizer = Muon(params, **options)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(
    ("split", "dim", "sizes"),
    [
        ((12, 4, 4), 0, (12, 4, 4)),
        (5, 0, (4, 4, 4, 4, 4)),
        (lambda p: [10, 10] if p.shape == (20, 12) else None, 0, (10, 10)),
        (lambda p: 2, 0, (10, 10)),
        (3, 1, (4, 4, 4)),
        ([8, 4], 1, (8, 4)),
        (None, 0, (20,)),
    ],
)
def test_blocks_are_updated_as_if_they_were_parameters(
    options: dict[str, Any], split: Any, dim: int, sizes: tuple[int, ...]
) -> None:
    whole = matrix((20, 12), 0, torch.float32)
    grads = [matrix((20, 12), s, torch.float32) for s in (1, 2, 3)]
    [fused] = updated([whole], [[g] for g in grads], split=split, split_dim=dim, **options)
    apart = updated(whole.split(sizes, dim), [g.split(sizes, dim) for g in grads], **options)
    assert_exactly(fused, torch.cat(apart, dim))


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 2, 4, 10)])
@pytest.mark.parametrize("split", [None, 2])
def test_experts_are_separate_matrices(
    options: dict[str, Any], shape: tuple[int, ...], split: int | None
) -> None:
    whole, grads = matrix(shape, 0, torch.float32), [matrix(shape, s, torch.float32) for s in (1, 2)]

    def slices(t: Tensor) -> list[Tensor]:
        return list(t.reshape(-1, *t.shape[-2:]))

    [experts] = updated([whole], [[g] for g in grads], batched_matrices=True, split=split, **options)
    apart = updated(slices(whole), [slices(g) for g in grads], split=split, **options)
    assert_exactly(experts, torch.stack(apart).reshape(shape))


def layouts(t: Tensor) -> dict[str, Tensor]:
    """The values of a [6, 4, 3, 3] tensor in different arrangements in memory."""
    outer = torch.full((6, 4, 5, 7), 9.0, dtype=t.dtype)
    outer[:, :, 1:4, 2:5] = t
    return {
        "contiguous": t.clone(),
        "channels_last": t.contiguous(memory_format=torch.channels_last),
        "permuted": t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        "no_view": outer[:, :, 1:4, 2:5],
    }


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("weight", ["contiguous", "channels_last", "permuted", "no_view"])
@pytest.mark.parametrize("grad", ["contiguous", "channels_last", "no_view"])
def test_convolutions_in_any_layout(options: dict[str, Any], weight: str, grad: str) -> None:
    values, slopes = matrix((6, 4, 3, 3), 0), [matrix((6, 4, 3, 3), s) for s in (1, 2)]
    p = nn.Parameter(layouts(values)[weight])
    optimizer = Muon([p], flatten=True, **options)
    for slope in slopes:
        p.grad = layouts(slope)[grad]
        optimizer.step()
        assert_exactly(p.grad.contiguous(), slope)
    flat = [g.reshape(6, 36) for g in slopes]
    [truth] = updated([values.reshape(6, 36)], [[g] for g in flat], **options)
    assert relative_error(p.detach().reshape(6, 36), truth) < 1e-12
    assert p.stride() == layouts(values)[weight].stride()
    assert optimizer.state[p]["momentum_buffer"].shape == p.shape


def test_a_buffer_loaded_in_another_layout() -> None:
    values, slopes = matrix((6, 4, 3, 3), 0), [matrix((6, 4, 3, 3), s) for s in (1, 2)]
    contiguous = nn.Parameter(values.clone())
    first = Muon([contiguous], flatten=True)
    contiguous.grad = slopes[0]
    first.step()
    last = nn.Parameter(layouts(contiguous.detach())["channels_last"].clone())
    second = Muon([last], flatten=True)
    second.load_state_dict(first.state_dict())
    contiguous.grad = last.grad = slopes[1]
    second.step()
    first.step()
    assert relative_error(last.detach(), contiguous.detach()) < 1e-12


def test_a_parameter_that_is_part_of_a_larger_tensor() -> None:
    outer = torch.full((20, 30), 7.0)
    p = nn.Parameter(outer[2:10, 3:27:2])
    with torch.no_grad():
        p.copy_(matrix((8, 12), 0))
    p.grad = matrix((12, 8), 1, torch.float32).mT
    [alone] = updated([p.detach().contiguous()], [[p.grad]], **PLAIN)
    Muon([p], **PLAIN).step()
    assert_exactly(p.detach().contiguous(), alone)
    outer[2:10, 3:27:2] = 7.0
    assert (outer == 7.0).all()


def test_expanded_gradients() -> None:
    p = nn.Parameter(matrix((8, 12), 0, torch.float32))
    p.grad = matrix((1, 12), 1, torch.float32).expand(8, 12)
    [alone] = updated([p.detach()], [[p.grad.contiguous()]], **PLAIN)
    Muon([p], **PLAIN).step()
    assert_exactly(p.detach(), alone)


def test_learning_rate_follows_the_shape_of_the_matrix() -> None:
    shapes: list[torch.Size] = []

    def ratio(shape: torch.Size) -> float:
        shapes.append(shape)
        return 1.0

    fused, experts, kernel = (nn.Parameter(torch.ones(s)) for s in ((6, 4), (2, 3, 5), (6, 2, 3)))
    groups = [
        {"params": [fused], "split": (4, 2)},
        {"params": [experts], "batched_matrices": True},
        {"params": [kernel], "flatten": True},
    ]
    optimizer = Muon(groups, adjust_lr_fn=ratio)
    for p in (fused, experts, kernel):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert shapes == [(4, 4), (2, 4), (3, 5), (3, 5), (6, 6)]


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((3,), {"flatten": True}, "2D parameters"),
        ((3, 4, 5), {}, "2D parameters.*flatten=True or batched_matrices=True"),
        ((3, 4, 5), {"flatten": True, "batched_matrices": True}, "exclude each other"),
        ((6, 4), {"split": 4}, "rows divisible by it"),
        ((6, 4), {"split": 3, "split_dim": 1}, "columns divisible by it"),
        ((6, 4), {"split": (3, 2)}, r"split \(3, 2\) adds up to 5, but .* has 6 rows"),
        ((6, 4), {"split": lambda p: (3, 2)}, "adds up to 5"),
        ((6, 4), {"split": (7, -1)}, "positive block sizes"),
        ((6, 4), {"split": "qkv"}, "positive block sizes"),
        ((6, 4), {"split": (3.0, 3.0)}, "positive block sizes"),
        ((6, 4), {"split": 0}, "equal blocks"),
        ((6, 4), {"split_dim": 2}, "split_dim must be one of 0, 1"),
        ((2, 6, 4), {"split": (2,), "batched_matrices": True}, "has 6 rows"),
    ],
)
def test_parameters_that_do_not_fit(shape: tuple[int, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Muon([nn.Parameter(torch.zeros(shape))], **options)


def test_batches_and_flattening_may_share_a_group_of_plain_matrices() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    p.grad = torch.ones(3, 4)
    Muon([p], flatten=True, batched_matrices=True).step()
    assert p.isfinite().all()


@pytest.mark.parametrize("make", [lambda p: lambda q: 2, lambda p: (2, 2)])
def test_functions_stay_out_of_the_state_dict(make: Callable[[Tensor], Any]) -> None:
    p = nn.Parameter(torch.eye(4))
    optimizer = Muon([p], split=make(p), adjust_lr_fn=lambda shape: 1.0)
    state = optimizer.state_dict()
    assert "adjust_lr_fn" not in state["param_groups"][0]
    assert ("split" in state["param_groups"][0]) == (not callable(make(p)))
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert callable(group["adjust_lr_fn"]) and group["split"] is not None

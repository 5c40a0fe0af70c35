"""What the loss kernels ask of a device: no look at its numbers from the host, and tensors of more than 2^31 elements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonrl_kernels import linear_compute, linear_logprob, linear_policy_loss, policy_loss
from muonrl_kernels.linear_head import Head
from tests.kernels.cases import Tensors, cast, linear_inputs, token_inputs
from tests.numerics import assert_exactly

WRT = ("hidden", "weight", "bias")
LOOKS = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique", "_unique2", "lift_fresh",
    "bincount", "histc",
)  # fmt: skip
"""Operators whose result, or whose result's size, the host waits for; lift_fresh is a tensor made from a host's numbers."""


class Watch(TorchDispatchMode):
    """Note every operator that makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.looks: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.calls += 1
        flags = [
            x for x in args[1:2] for x in (x if isinstance(x, list | tuple) else [x]) if isinstance(x, Tensor)
        ]
        by_mask = name.startswith(("index", "_index")) and any(x.dtype == torch.bool for x in flags)
        lengths = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in LOOKS or by_mask or lengths:
            self.looks.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(device: torch.device) -> Iterator[Watch]:
    """Record what looks at the device; on a GPU its own check must agree."""
    with Watch() as watch:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield watch
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def gpu_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what is taken on a GPU where the code looks at numbers because they are on the CPU."""
    module = sys.modules["muonrl_kernels.linear_policy_loss"]
    monkeypatch.setattr(module, "check_targets", lambda targets, head: None)


def there(inputs: Tensors, device: torch.device) -> Tensors:
    inputs = cast(inputs, torch.float32)
    wrt = (*WRT, "logp", "entropy")
    return {k: v.to(device).requires_grad_(k in wrt) for k, v in inputs.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entropy_coef": 0.1, "beta": 0.1, "normalizer": 7.0},
        {"agg": "sequence_mean", "is_level": "sequence"},
    ],
    ids=str,
)
def test_the_elementwise_loss_never_waits_for_the_device(
    triton_device: torch.device, options: dict[str, Any]
) -> None:
    inputs = there(token_inputs(3, 7), triton_device)
    policy_loss(**inputs, backend="triton", **options)[0].backward()  # compiles
    inputs["logp"].grad = None
    with watched(triton_device) as watch:
        policy_loss(**inputs, backend="triton", **options)[0].backward()
    assert watch.calls > 3 and watch.looks == []
    assert inputs["logp"].grad is not None and inputs["logp"].grad.any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entropy_coef": 0.1, "beta": 0.1, "normalizer": 7.0, "valid_rows": 9, "chunk_rows": 4},
        {"loss_type": "gspo", "agg": "sequence_mean", "is_level": "sequence"},
    ],
    ids=str,
)
def test_the_linear_loss_never_waits_for_the_device(
    triton_device: torch.device, gpu_branches: None, options: dict[str, Any]
) -> None:
    inputs = there(linear_inputs(9, 4, 11), triton_device)
    bounds = torch.tensor([0, 4, 9], device=triton_device)
    needed = dict(options)
    if options.get("loss_type") == "gspo":
        needed["cu_seqlens"] = bounds
    linear_policy_loss(**inputs, backend="triton", **needed)[0].backward()
    with watched(triton_device) as watch:
        linear_policy_loss(**inputs, backend="triton", **needed)[0].backward()
    # Bounds of sequences are checked where they lie on the CPU, which costs nothing there.
    allowed = ["_local_scalar_dense"] * 2 if triton_device.type == "cpu" and "cu_seqlens" in needed else []
    assert watch.calls > 10 and watch.looks == allowed
    assert inputs["weight"].grad is not None and inputs["weight"].grad.any()


def test_log_probabilities_never_wait_for_the_device(triton_device: torch.device, gpu_branches: None) -> None:
    inputs = there(linear_inputs(9, 4, 11), triton_device)
    given = {k: inputs[k] for k in (*WRT, "targets")}
    linear_logprob(**given, backend="triton")[0].sum().backward()
    with watched(triton_device) as watch:
        linear_logprob(**given, backend="triton")[0].sum().backward()
    assert watch.calls > 10 and watch.looks == []


def test_the_watch_sees_what_it_must(triton_device: torch.device) -> None:
    inputs = there(linear_inputs(9, 4, 11), torch.device("cpu"))
    with Watch() as watch:
        linear_policy_loss(**inputs, backend="torch")[0].backward()
    assert {"nonzero", "_local_scalar_dense"} <= set(watch.looks)
    with Watch() as watch:
        _ = inputs["old_logp"][inputs["mask"]]
    assert watch.looks


def huge(elements: int, device: torch.device) -> Tensor:
    """An fp32 tensor of so many elements, which costs no memory until it is touched on the CPU."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(elements, dtype=np.float32))
    return torch.empty(elements, dtype=torch.float32, device=device)


def test_logits_beyond_two_to_the_31_elements(triton_device: torch.device) -> None:
    """Three rows that lie 2^30 elements apart: the last one starts beyond what int32 can count."""
    from muonrl_kernels import linear_triton, loss_rows

    rows, columns, pitch = 3, 150, 2**30 + 16
    near = torch.randn(rows, columns, device=triton_device)
    store = huge((rows - 1) * pitch + columns, triton_device)
    far = store.as_strided((rows, columns), (pitch, 1))
    far.copy_(near)
    head = Head.make(torch.zeros(columns, 4, device=triton_device), None, 1.0, None, 1.0, None, torch.float32)
    launch = linear_triton._Launch(head, torch.float32)
    targets = torch.tensor([3, 149, 70], device=triton_device)
    slopes = [torch.randn(rows, device=triton_device) for _ in range(3)]
    found = []
    for z, distance in ((near, columns), (far, pitch)):
        outputs = torch.empty(3, rows, device=triton_device)
        shape = {**launch.arguments(z), "pitch": distance}
        gradient = {**shape, "target_ptr": targets, "first": 0}
        statistics = {k: v for k, v in gradient.items() if not k.startswith("out_")}
        loss_rows.logprob_rows[(rows,)](
            z, logp_ptr=outputs[0], entropy_ptr=outputs[1], lse_ptr=outputs[2], **statistics
        )
        named = dict(zip(("d_logp_ptr", "d_entropy_ptr", "d_lse_ptr"), slopes, strict=True))
        loss_rows.logit_gradient[(rows,)](z, **named, **gradient)
        found.append((outputs, z.clone()))
    assert found[0][0].isfinite().all()
    assert_exactly(found[1][0], found[0][0])
    assert_exactly(found[1][1], found[0][1])


def test_the_triton_path_is_taken(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the PyTorch path was taken")

    monkeypatch.setattr(linear_compute, "_run", refuse)
    inputs = there(linear_inputs(4, 4, 11), triton_device)
    assert linear_policy_loss(**inputs, backend="triton")[0].isfinite()
    with pytest.raises(AssertionError, match="PyTorch path"):
        linear_policy_loss(**inputs, backend="torch")

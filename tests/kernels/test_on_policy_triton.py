"""Without old log-probabilities the row kernels take their own."""

from __future__ import annotations

import torch

from muonrl_kernels import linear_policy_loss, reference
from tests.kernels.cases import cast, linear_inputs, values_and_grads
from tests.numerics import assert_as_good_as

WRT = ("hidden", "weight", "bias")


def test_on_policy(triton_device: torch.device) -> None:
    inputs = cast(linear_inputs(11, 16, 40), torch.float32)
    del inputs["rollout_logp"], inputs["ref_logp"]
    inputs["advantages"] += 1.0
    inputs["hidden"][~inputs["mask"]] = torch.nan
    clean = {**inputs, "hidden": inputs["hidden"].nan_to_num()}
    head = {k: clean[k] for k in ("hidden", "weight", "targets", "bias")}
    results = []
    for dtype in (torch.float32, torch.float64):
        old = reference.linear_logprob(**cast(head, dtype))[0]
        given = cast(clean, dtype) | {"old_logp": old}
        results.append(values_and_grads(reference.linear_policy_loss, given, WRT))
    there = {k: v.to(triton_device) for k, v in inputs.items() if k != "old_logp"}
    ours = values_and_grads(linear_policy_loss, there, WRT, old_logp=None, backend="triton")
    for name, a, b, c in zip(("loss", *WRT), ours, *results, strict=True):
        assert_as_good_as(a.cpu(), b, c, what=name)

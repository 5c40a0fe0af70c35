"""The choice between Triton and PyTorch, and how it is explained."""

from __future__ import annotations

import logging

import pytest
import torch

import muonrl_kernels as mk
from muonrl_kernels import backend


@pytest.fixture
def fresh_announcements() -> None:
    backend._announce.cache_clear()


def test_auto_says_once_what_it_chose_and_why(
    fresh_announcements: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="muonrl_kernels.backend"):
        for _ in range(3):
            assert backend.resolve("auto", "orthogonalize").name == "torch"
    assert len(caplog.records) == 1
    assert "orthogonalize on cpu: torch" in caplog.text and "Triton" in caplog.text


def test_explicit_triton_is_a_demand() -> None:
    g = torch.eye(3)
    row = torch.zeros(1)
    calls = (
        lambda: mk.orthogonalize(g, backend="triton"),
        lambda: mk.Muon([torch.nn.Parameter(g)], backend="triton"),
        lambda: mk.policy_loss(row, row, row, row.bool(), backend="triton"),
        lambda: mk.linear_logprob(row[None], row[None], row.long(), backend="triton"),
        lambda: mk.linear_policy_loss(
            row[None], row[None], row.long(), row, row, row.bool(), backend="triton"
        ),
    )
    for call in calls:
        with pytest.raises(
            RuntimeError, match="backend='triton' is not available for .*(no Triton kernel|does not run)"
        ):
            call()


def test_other_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KERNELS", frozenset({"orthogonalize"}))
    assert "CPU" in backend.explain("orthogonalize", "cpu").reason
    assert backend.explain("orthogonalize", "cuda").name == "triton"
    assert backend.resolve("triton", "orthogonalize", "cuda").name == "triton"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in backend.explain("orthogonalize", "cuda").reason


def test_dtypes_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert backend.takes_triton("auto", "muon", gpu, [torch.float32, torch.bfloat16], None)
    assert not backend.takes_triton("auto", "muon", gpu, [torch.float64], None)
    assert not backend.takes_triton("auto", "muon", gpu, [torch.float32], torch.float32)
    assert not backend.takes_triton("torch", "muon", gpu, [torch.float32], None)
    for dtypes, compute in (([torch.float64], None), ([torch.float32], torch.float64)):
        with pytest.raises(RuntimeError, match="muon in torch.float64"):
            backend.takes_triton("triton", "muon", gpu, dtypes, compute)
    assert "mps" in backend.explain("muon", "mps").reason


def test_the_interpreter_is_for_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert backend.resolve("triton", "muon", "cpu").name == "triton"
    assert backend.resolve("auto", "muon", "cpu").name == "torch"


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="auto, triton, torch"):
        backend.resolve("cuda", "orthogonalize")
    assert backend.resolve("torch", "orthogonalize").reason == "requested"


def test_compute_dtype_asks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        backend._cpu_has_bf16.cache_clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, probe, lambda supported=supported: supported, raising=False)
        assert backend.fast_compute_dtype("cpu") == expected
    backend._cpu_has_bf16.cache_clear()
    assert backend.fast_compute_dtype("cuda") == torch.float16


def test_importing_has_no_side_effects_and_needs_torch_only() -> None:
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import sys, torch; before = torch.get_rng_state(); import muonrl_kernels as mk;"
        "assert torch.equal(before, torch.get_rng_state());"
        "assert all(hasattr(mk, n) for n in mk.__all__);"
        "bad = {'transformers', 'muonrl', 'triton'} & set(sys.modules); assert not bad - {'triton'}, bad"
    )
    root = Path(mk.__file__).parents[1]
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=root)

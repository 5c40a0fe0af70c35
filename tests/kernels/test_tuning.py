"""Static launch parameters, what overrides them, and the opt-in measurement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muonrl_kernels import tuning
from muonrl_kernels.tuning import TUNINGS, Tile, choose_tile, tuning_for


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """A device that says it is an H200, and an empty folder of measurements."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("MUONRL_TUNED", str(tmp_path))
    tuning_for.cache_clear()
    return torch.device("cuda", 0)


def test_measured_values_override_static_ones(h200: torch.device, tmp_path: Path) -> None:
    assert tuning_for(h200) == TUNINGS["sm_90"]
    tile = Tile(128, 32, 8, 5, 1)
    (tmp_path / "nvidia_h200.json").write_text(json.dumps({"large": dataclasses.asdict(tile)}))
    tuning_for.cache_clear()
    assert tuning_for(h200) == dataclasses.replace(TUNINGS["sm_90"], large=tile)
    (tmp_path / "nvidia_h200.json").write_text('{"huge": 1}')
    tuning_for.cache_clear()
    with pytest.raises(ValueError, match="huge"):
        tuning_for(h200)
    tuning_for.cache_clear()


def test_every_gpu_finds_its_target(monkeypatch: pytest.MonkeyPatch, h200: torch.device) -> None:
    for major, target in ((8, "sm_80"), (9, "sm_90"), (10, "sm_100"), (12, "sm_80")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        assert tuning._target(h200) == target
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert tuning._target(h200) == "gfx942"


def test_the_tile_that_wastes_less_is_chosen() -> None:
    sizes = {2560: 128, 256: 128, 192: 64, 320: 64}
    assert {m: choose_tile(TUNINGS["sm_90"], m).block for m in sizes} == sizes


def test_autotune_saves_the_fastest(
    triton_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muonrl_kernels import autotune

    calls = 0

    def timer(run: Callable[[], object]) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of shared memory")
        run()
        return 1.0 if calls in (2, 6) else 2.0

    monkeypatch.setattr(autotune, "SIDES", {"large": (40,), "medium": (20,)})
    monkeypatch.setattr(autotune, "MATRICES", 1)
    monkeypatch.setattr(
        autotune, "candidates", lambda tile: [dataclasses.replace(tile, programs=n) for n in (1, 2, 3)]
    )
    file = autotune.autotune(triton_device, tmp_path, timer, "NVIDIA H200")
    saved = json.loads(file.read_text())
    assert file.name == "nvidia_h200.json" and saved["large"]["programs"] == 2
    assert saved["medium"]["programs"] == 3
    monkeypatch.setattr(autotune, "candidates", lambda tile: [tile])

    def broken(run: Callable[[], object]) -> float:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no tile"):
        autotune.autotune(triton_device, tmp_path / "other", broken, "NVIDIA H200")
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_autotune_without_a_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from muonrl_kernels import autotune

    assert autotune.main([]) == 2
    assert "no GPU" in capsys.readouterr().err

"""Every code block about Muon in docs/muon.md and the README runs as it stands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from muonrl_kernels import Muon
from muonrl_kernels.muon_convert import LR_CONVENTIONS
from muonrl_kernels.muon_options import ADJUST_NAMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "muon.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def muon_section() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.split("\n## Muon\n")[1].split("\n## ")[0]


def run(code: list[str], names: dict[str, object]) -> None:
    for block in code:
        exec(compile(block, "block", "exec"), names)


def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(PAGE)
    assert len(code) >= 10 and PAGE.count("```") == 2 * len(code)
    run(code, {})


def test_the_readmes_section_runs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    names: dict[str, object] = {"model": model}
    code = blocks(muon_section())
    assert code
    run(code, names)
    assert isinstance(names["optimizer"], Muon)


def test_a_broken_block_would_fail() -> None:
    with pytest.raises(ValueError, match="split"):
        run(["from muonrl_kernels import Muon\nimport torch\nMuon([torch.eye(3)], split=2)"], {})


def test_every_option_and_convention_is_on_the_page() -> None:
    table = PAGE.split("## Options")[1].split("### ")[0]
    for name in list(inspect.signature(Muon.__init__).parameters)[2:]:
        assert re.search(rf"^\|[^|]*`{name}`", table, re.MULTILINE), name
    for name in (*ADJUST_NAMES, *LR_CONVENTIONS):
        assert f'"{name}"' in PAGE, name

"""Every code block about the loss in docs/loss.md and the README runs as it stands."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from muonrl_kernels import LossOptions, linear_policy_loss, presets
from muonrl_kernels.metrics import LossMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "loss.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(code: list[str], names: dict[str, Any]) -> None:
    for block in code:
        exec(compile(block, "block", "exec"), names)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for verl, which is not installed: what was registered."""
    found: dict[str, Any] = {}

    def register_policy_loss(name: str) -> Any:
        return lambda function: found.setdefault(name, function)

    parts = ["verl", "trainer", "ppo", "core_algos"]
    for i in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:i]))
        vars(module)["register_policy_loss"] = register_policy_loss
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(PAGE)
    assert len(code) >= 9 and PAGE.count("```") == 2 * len(code)
    run(code, {"__name__": "page"})
    assert set(registry) == {"muonrl"}


def test_the_readmes_section_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = blocks(readme.split("\n## The loss\n")[1].split("\n## ")[0])
    assert code
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "hidden": torch.randn(9, 8, requires_grad=True),
        "lm_head": nn.Linear(8, 30, bias=False),
        "targets": torch.arange(9),
        "mask": torch.arange(9) > 2,
        "tokens_in_update": 6,
    }
    names |= {k: torch.randn(9) for k in ("old_logp", "advantages", "rollout_logp")}
    run(code, names)
    assert names["hidden"].grad.any() and names["lm_head"].weight.grad.any()


def test_a_broken_block_would_fail() -> None:
    with pytest.raises(ValueError, match="agg"):
        run(["from muonrl_kernels import LossOptions\nLossOptions(agg='mean')"], {})


def test_every_option_metric_and_name_is_on_the_page() -> None:
    options, metrics, names = (
        PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in ("Options", "Metrics", "Presets")
    )
    for field in fields(LossOptions):
        assert re.search(rf"^\|[^|]*`{field.name}`", options, re.MULTILINE), field.name
    for name in LossMetrics(torch.zeros(22), torch.zeros(2)).as_dict():
        assert re.search(rf"^\|[^|]*`{name}`", metrics, re.MULTILINE), name
    for preset, entry in presets.items():
        assert f'`"{preset}"` ({entry.version})' in names
        for meanings in entry.names.values():
            for name in meanings:
                if name not in ("gspo", "cispo", "seq-mean-token-sum-norm"):
                    assert f'"{name}"' in names, name


def test_every_argument_is_on_the_page() -> None:
    for name in inspect.signature(linear_policy_loss).parameters:
        assert name == "options" or re.search(rf"\b{name}\b", PAGE), name

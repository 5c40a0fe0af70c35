"""A small tokenizer and small policies for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from muonrl.config import ModelConfig
from muonrl.policy.model import new_model
from muonrl.policy.tokenizer import train_tokenizer

CORPUS = [
    "clamp(1, 2, 3) returned 2, expected 1",
    "def clamp(value, low, high):\n    if value <= low:\n        return low\n    return value - 1\n",
    "def width(first_line, second_line):\n    return max(len(first_line), len(second_line))\n",
    "<function=search><parameter=search_term>def clamp(</parameter></function>",
]
SMALL = ModelConfig(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=340, max_context=96, tied=True
)


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """340 entries at most, trained on a few lines of code."""
    return train_tokenizer(CORPUS, ["window", "ledger"], SMALL.vocab, SMALL.max_context)


def small_model(config: ModelConfig = SMALL, seed: int = 0) -> Any:
    """A new policy in eval mode."""
    return new_model(config, small_tokenizer(), seed).eval()

"""Creating, loading and saving the policy model with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from muonrl.config import ModelConfig
from muonrl.errors import CheckpointError
from muonrl.policy.tokenizer import END, PAD, token_id

EMBEDDING_STD = 0.1
QK_GAIN = 1.5


def new_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3-architecture policy in float32; the same seed gives the same weights."""
    spec = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=config.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=token_id(tokenizer, PAD),
        eos_token_id=token_id(tokenizer, END),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(spec)
    with torch.no_grad():
        # A tied embedding is also the copying head: rare tokens must start distinct enough to be told apart by it.
        model.model.embed_tokens.weight.mul_(EMBEDDING_STD / spec.initializer_range)
        for name, parameter in model.named_parameters():
            # With unit gains the normalised queries and keys cannot attend sharply, and gains grow slowly.
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(QK_GAIN)
    return model.float()


def save_policy(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write weights (safetensors), config and tokenizer so that transformers' Auto classes load the folder."""
    logging.disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def load_policy(folder: Path) -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` in float32 from a folder written by :func:`save_policy`; never asks a model hub.

    Raises :class:`CheckpointError` where the folder or a part of it is missing or cannot be read.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"no model at {folder}: {name} is missing")
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (
        *(OSError, RuntimeError, SafetensorError),
        *(ValueError, TypeError, KeyError, AttributeError),  # JSON of another form than expected
    ) as fault:
        reason = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise CheckpointError(f"the model at {folder} cannot be loaded: {reason}") from fault
    model, report = loaded
    # transformers fills what the file lacks with random numbers.
    if lacking := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"the model at {folder} cannot be loaded: its weights lack {', '.join(lacking)}"
        )
    return model, tokenizer

"""Small random models whose attention matters, and their forward pass written out in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from muonrl.sampling.decoder import Shape, Weights

CONTEXT = 64
_SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen3-untied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen3-one-kv-head": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 6, "num_key_value_heads": 1}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-tied-no-gqa": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
}


def random_model(kind: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32 with weights large enough that every part of it shows in the logits."""
    config, model_class, extra = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config(**_SIZES | extra | changes)).float().eval()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.ndim == 1:
                    # A small last norm leaves the next token open.
                    parameter.uniform_(0.5, 1.5).mul_(0.3 if name == "model.norm.weight" else 1.0)
                else:
                    parameter.normal_(std=0.7 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5)
    return model


def weights_of(model: Any) -> Weights:
    return Weights(model.state_dict(), Shape.of(model.config))


def exact_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab] in float64, from the definition of the architecture."""
    c = model.config
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}
    n, heads, kv = len(tokens), c.num_attention_heads, c.num_key_value_heads
    d = getattr(c, "head_dim", None) or c.hidden_size // heads
    rates = c.rope_parameters["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * rates  # [n, d / 2]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight

    def turn(x: Tensor) -> Tensor:  # [n, heads, d]: the pairs (i, i + d / 2) rotate by their angle
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"{at}self_attn.{p}_proj.weight"].T).view(n, m, d)
            for p, m in zip("qkv", (heads, kv, kv), strict=True)
        )
        if at + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[at + "self_attn.q_norm.weight"]), norm(k, w[at + "self_attn.k_norm.weight"])
        q, k = turn(q), turn(k)
        mixed = torch.empty(n, heads, d, dtype=torch.float64)
        for head in range(heads):
            group = head // (heads // kv)
            scores = q[:, head] @ k[:, group].T / d**0.5
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
            mixed[:, head] = scores.softmax(-1) @ v[:, group]
        x = x + mixed.flatten(1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, w[at + "post_attention_layernorm.weight"])
        up, gate = h @ w[at + "mlp.up_proj.weight"].T, h @ w[at + "mlp.gate_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

"""A decoder forward pass over cache slots, for Qwen3- and Llama-architecture weights.

transformers' ``generate`` spends most of its time on a small model in Python. This pass takes the tokens of all slots as
one flat batch (some slots feed a whole observation, most feed one token), so that the linear layers run once a step, and
keeps keys and values in static tensors that outlive a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SUPPORTED = ("qwen3", "llama")


@dataclass(frozen=True)
class Shape:
    """The sizes that the forward pass needs; read from a transformers config."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: Any) -> Shape:
        if config.model_type not in SUPPORTED:
            raise ValueError(
                f"model_type {config.model_type!r}: the embedded sampler runs {', '.join(SUPPORTED)}"
            )
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise ValueError(
                f"rope_type {rope['rope_type']!r}: the embedded sampler runs the default rope only"
            )
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r}: the embedded sampler runs silu only")
        for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if getattr(config, name, False):
                raise ValueError(f"{name}: the embedded sampler does not run it")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
        )


@dataclass(frozen=True)
class _Layer:
    norm_attention: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 kv_heads) head_dim, H]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [H, heads head_dim]
    norm_mlp: Tensor
    gate_up: Tensor  # [2 ffn, H]
    down: Tensor  # [H, ffn]


class Weights:
    """One policy's weights, with the projections that share an input fused. Immutable once built."""

    def __init__(self, state: Mapping[str, Tensor], shape: Shape) -> None:
        self.shape = shape
        self.embed = state["model.embed_tokens.weight"].clone()
        self.norm = state["model.norm.weight"].clone()
        self.head = state.get("lm_head.weight", self.embed).clone()
        self.layers = [self._layer(state, f"model.layers.{i}.") for i in range(shape.layers)]

    @staticmethod
    def _layer(state: Mapping[str, Tensor], at: str) -> _Layer:
        attention, mlp = at + "self_attn.", at + "mlp."
        q_norm, k_norm = state.get(attention + "q_norm.weight"), state.get(attention + "k_norm.weight")
        return _Layer(
            norm_attention=state[at + "input_layernorm.weight"].clone(),
            qkv=torch.cat([state[f"{attention}{p}_proj.weight"] for p in "qkv"]),
            q_norm=None if q_norm is None else q_norm.clone(),
            k_norm=None if k_norm is None else k_norm.clone(),
            out=state[attention + "o_proj.weight"].clone(),
            norm_mlp=state[at + "post_attention_layernorm.weight"].clone(),
            gate_up=torch.cat([state[mlp + "gate_proj.weight"], state[mlp + "up_proj.weight"]]),
            down=state[mlp + "down_proj.weight"].clone(),
        )


@dataclass(frozen=True)
class Feed:
    """The tokens that one slot feeds in a step: ``tokens`` [n] at positions ``start .. start + n - 1``."""

    slot: int
    start: int
    tokens: list[int]


class SlotCache:
    """Static key/value storage ``[layers, slots, kv_heads, max_context, head_dim]`` and the rotary tables."""

    def __init__(self, shape: Shape, slots: int, max_context: int) -> None:
        size = (shape.layers, slots, shape.kv_heads, max_context, shape.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.slots, self.max_context = slots, max_context
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
        angles = torch.outer(torch.arange(max_context).double(), inverse)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()  # [max_context, head_dim]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@torch.inference_mode()
def forward(weights: Weights, cache: SlotCache, feeds: list[Feed]) -> Tensor:
    """Feed tokens and return the logits ``[len(feeds), vocab]`` after the last token of each feed (float32)."""
    s = weights.shape
    # Single tokens first: they attend together; longer feeds follow, one attention call each.
    order = sorted(range(len(feeds)), key=lambda i: len(feeds[i].tokens) > 1)
    feeds_sorted = [feeds[i] for i in order]
    plan = _Plan(cache, feeds_sorted)
    x = F.embedding(plan.tokens, weights.embed)
    for index, layer in enumerate(weights.layers):
        h = F.rms_norm(x, (s.hidden,), layer.norm_attention, s.eps)
        qkv = F.linear(h, layer.qkv).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(q, (s.head_dim,), layer.q_norm, s.eps)
            k = F.rms_norm(k, (s.head_dim,), layer.k_norm, s.eps)
        q, k = _rotate(q, plan.cos, plan.sin), _rotate(k, plan.cos, plan.sin)
        keys, values = cache.keys[index], cache.values[index]
        keys[plan.slots, :, plan.positions] = k
        values[plan.slots, :, plan.positions] = v
        x = x + F.linear(plan.attend(q, keys, values).flatten(1), layer.out)
        h = F.rms_norm(x, (s.hidden,), layer.norm_mlp, s.eps)
        gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    last = F.rms_norm(x[plan.last], (s.hidden,), weights.norm, s.eps)
    logits = F.linear(last, weights.head)
    result = torch.empty_like(logits)
    result[torch.tensor(order)] = logits
    return result


class _Plan:
    """Indices of one step, shared by all layers."""

    def __init__(self, cache: SlotCache, feeds: list[Feed]) -> None:
        self.tokens = torch.tensor([t for f in feeds for t in f.tokens])
        self.slots = torch.tensor([f.slot for f in feeds for _ in f.tokens])
        self.positions = torch.tensor([f.start + i for f in feeds for i in range(len(f.tokens))])
        self.cos, self.sin = cache.cos[self.positions, None], cache.sin[self.positions, None]
        self.last = torch.tensor([len(f.tokens) for f in feeds]).cumsum(0) - 1
        self.cache = cache
        self.single = sum(len(f.tokens) == 1 for f in feeds)
        self.long = feeds[self.single :]
        if self.single:
            self.single_slots = self.slots[: self.single]
            ends = self.positions[: self.single] + 1
            self.span = int(ends.max())
            # A single token attends over the cache of all slots as it lies, without a gather; unused rows are discarded.
            limit = torch.ones(cache.slots, dtype=torch.long)
            limit[self.single_slots] = ends
            self.mask = (torch.arange(self.span) < limit[:, None])[:, None, None]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of ``q`` [N, heads, head_dim] over the slots' caches -> [N, heads, head_dim]."""
        parts = []
        if self.single:
            # The query heads that share a key head stand where a sequence of queries would: nothing is repeated for them.
            query = q.new_zeros(self.cache.slots, keys.shape[1], q.shape[1] // keys.shape[1], q.shape[2])
            query[self.single_slots] = q[: self.single].view(self.single, *query.shape[1:])
            k, v = keys[:, :, : self.span], values[:, :, : self.span]
            full = F.scaled_dot_product_attention(query, k, v, attn_mask=self.mask)
            parts.append(full[self.single_slots].flatten(1, 2))
        at = self.single
        for feed in self.long:
            n, end = len(feed.tokens), feed.start + len(feed.tokens)
            query = q[at : at + n].transpose(0, 1)[None]
            k, v = keys[feed.slot, None, :, :end], values[feed.slot, None, :, :end]
            if feed.start == 0:
                out = F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=True)
            else:
                mask = torch.arange(end) <= torch.arange(feed.start, end)[:, None]
                out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
            at += n
        return torch.cat(parts)

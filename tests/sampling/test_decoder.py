"""The decoder against transformers and against the architecture written out in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from muonrl.sampling.decoder import Feed, Shape, SlotCache, forward
from tests.numerics import assert_as_good_as, relative_error
from tests.sampling.cases import CONTEXT, KINDS, exact_logits, random_model, weights_of

SLOTS = 5


def _tokens(n, seed):
    return torch.randint(0, 23, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# Steps of (slot, how many tokens): openings, single tokens, long feeds behind a cached prefix, and all of them mixed; the
# order of slots within a step is not that of their numbers.
STEPS = [
    [(3, 7)],
    [(3, 1), (0, 4)],
    [(4, 1), (0, 1), (3, 5)],
    [(0, 6), (4, 1), (3, 1), (1, 9)],
    [(1, 1), (4, 1), (3, 1), (0, 1)],
    [(1, 2), (3, 30), (0, 1)],
    [(3, 17), (4, 3)],
    [(3, 2), (1, 1)],
]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_as_exact_as_transformers(kind):
    model = random_model(kind, seed=1)
    weights = weights_of(model)
    cache = SlotCache(weights.shape, SLOTS, CONTEXT)
    # What an earlier episode left in the slots must not be seen.
    cache.keys.normal_()
    cache.values.normal_()
    text = {slot: _tokens(CONTEXT, slot) for slot in range(SLOTS)}
    exact = {slot: exact_logits(model, text[slot]) for slot in range(SLOTS)}
    with torch.no_grad():
        eager = {slot: model(torch.tensor([text[slot]])).logits[0] for slot in range(SLOTS)}
    at = dict.fromkeys(range(SLOTS), 0)
    got, theirs, truth = [], [], []
    for step in STEPS:
        feeds = [Feed(slot, at[slot], text[slot][at[slot] : at[slot] + n]) for slot, n in step]
        logits = forward(weights, cache, feeds)
        assert logits.shape == (len(feeds), 23) and logits.dtype == torch.float32
        for (slot, n), row in zip(step, logits, strict=True):
            at[slot] += n
            got.append(row)
            theirs.append(eager[slot][at[slot] - 1])
            truth.append(exact[slot][at[slot] - 1])
            assert relative_error(row, truth[-1]) < 1e-5, (step, slot)
    assert at[3] == CONTEXT, "the steps reach the end of the cache"
    assert_as_good_as(torch.stack(got), torch.stack(theirs), torch.stack(truth), what=kind)


def test_attention_heads_and_positions_matter_to_these_models():
    """The comparison above could not fail on a model that ignores its context."""
    model = random_model(seed=1)
    text = _tokens(12, 9)
    last = exact_logits(model, text)[-1]
    assert relative_error(exact_logits(model, [5 - text[0] % 5, *text[1:]])[-1], last) > 0.05
    assert relative_error(exact_logits(model, [text[1], text[0], *text[2:]])[-1], last) > 0.05


@pytest.mark.parametrize("n", [1, 6])
def test_a_feed_does_not_depend_on_its_neighbours(n):
    weights = weights_of(random_model(seed=2))
    results = []
    for slot, neighbours in ((0, []), (4, [Feed(0, 0, _tokens(11, 1)), Feed(2, 0, [7]), Feed(1, 0, [8])])):
        cache = SlotCache(weights.shape, SLOTS, CONTEXT)
        forward(weights, cache, [Feed(slot, 0, _tokens(5, 3)), *neighbours])
        again = [Feed(f.slot, len(f.tokens), [1]) for f in neighbours]
        logits = forward(weights, cache, [*again, Feed(slot, 5, _tokens(n, 4))])
        results.append(logits[-1])
    assert relative_error(results[0], results[1]) < 1e-6


def test_feeding_at_once_equals_feeding_one_by_one():
    weights = weights_of(random_model("llama", seed=3))
    text = _tokens(20, 5)
    whole = forward(weights, SlotCache(weights.shape, 1, CONTEXT), [Feed(0, 0, text)])
    cache = SlotCache(weights.shape, 1, CONTEXT)
    for i, token in enumerate(text):
        single = forward(weights, cache, [Feed(0, i, [token])])
    assert relative_error(single, whole) < 1e-5


def test_weights_are_a_copy():
    model = random_model(seed=4)
    weights = weights_of(model)
    before = forward(weights, SlotCache(weights.shape, 1, CONTEXT), [Feed(0, 0, [1, 2, 3])])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after = forward(weights, SlotCache(weights.shape, 1, CONTEXT), [Feed(0, 0, [1, 2, 3])])
    assert torch.equal(before, after)


def test_a_tied_head_may_be_absent_from_the_state():
    model = random_model("qwen3", seed=5)
    state = model.state_dict()
    del state["lm_head.weight"]
    weights = type(weights_of(model))(state, Shape.of(model.config))
    assert torch.equal(weights.head, model.lm_head.weight)


def test_the_shape_follows_the_config():
    shape = Shape.of(random_model("qwen3").config)
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (24, 3, 4, 2, 10)
    assert (shape.eps, shape.rope_theta) == (1e-5, 500.0)
    assert Shape.of(LlamaConfig(hidden_size=24, num_attention_heads=4)).head_dim == 6


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (Qwen2Config(), "model_type 'qwen2'"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rope_type"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
        (Qwen3Config(attention_bias=True), "attention_bias"),
        (Qwen3Config(use_sliding_window=True), "use_sliding_window"),
    ],
)
def test_what_the_decoder_does_not_run_is_refused(config, word):
    with pytest.raises(ValueError, match=word):
        Shape.of(config)

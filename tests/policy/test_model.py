"""A policy is an ordinary transformers folder, and a damaged one is named in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from muonrl.errors import CheckpointError
from muonrl.policy.model import load_policy, save_policy
from muonrl.policy.tokenizer import SPECIAL, ChatFormat
from tests.numerics import assert_exactly
from tests.policy.cases import SMALL, small_model, small_tokenizer

TEXTS = ("clamp(1, 2) returned <|end|> 'ß'", " <function=search> \n\t x", "")


def _same_weights(one, two):
    a, b = one.state_dict(), two.state_dict()
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_seed_alone_makes_the_weights():
    state = torch.get_rng_state()
    one = small_model(seed=3)
    assert torch.equal(torch.get_rng_state(), state), (
        "creating a model must not draw from the global generator"
    )
    torch.manual_seed(99)
    assert _same_weights(one, small_model(seed=3))
    assert not _same_weights(one, small_model(seed=4))


def test_the_model_has_the_configured_shape():
    model = small_model()
    assert model.config.model_type == "qwen3"
    assert model.model.embed_tokens.weight.shape == (len(small_tokenizer()), 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert small_model(replace(SMALL, tied=False)).lm_head.weight is not model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    attention = model.model.layers[1].self_attn
    assert attention.q_proj.weight.shape == (32, 32) and attention.k_proj.weight.shape == (16, 32)
    assert model.config.eos_token_id == ChatFormat(small_tokenizer()).end_id
    assert model.config.max_position_embeddings == 96


@pytest.mark.parametrize("tied", [True, False])
def test_auto_classes_load_what_was_saved(tmp_path, tied):
    model = small_model(replace(SMALL, tied=tied), seed=5)
    with torch.no_grad():  # an untied head that differs from the embedding for certain
        model.lm_head.weight.mul_(1.5)
    save_policy(tmp_path, model, small_tokenizer())
    auto = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded, tokenizer = load_policy(tmp_path)
    assert _same_weights(model, auto) and _same_weights(model, loaded)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    ids = torch.randint(0, len(tokenizer), (2, 20))
    with torch.no_grad():
        assert_exactly(loaded.eval()(ids).logits, model(ids).logits)
    for reader in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert reader.get_vocab() == small_tokenizer().get_vocab()
        before, after = ChatFormat(small_tokenizer()), ChatFormat(reader)
        for text in TEXTS:
            assert after.encode(text) == before.encode(text)
            assert after.prompt(text) == before.prompt(text)
            assert after.observation(text, close_reply=True) == before.observation(text, close_reply=True)
            assert after.decode(after.encode(text)) == text
        messages = [{"role": "user", "content": "clamp(1)"}, {"role": "tool", "content": "edited x"}]
        made = reader.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert made == before.prompt("clamp(1)")[:-1] + before.observation("edited x")
        assert reader.pad_token_id == 0 and reader.eos_token_id == 4 and reader.model_max_length == 96
        assert set(reader.all_special_tokens) == set(SPECIAL)


def _saved(folder):
    save_policy(folder, small_model(), small_tokenizer())
    return folder


def _refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        load_policy(folder)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    for word in words:
        assert word in text


def test_a_missing_folder_is_refused(tmp_path):
    _refused(tmp_path / "nothing", "config.json is missing")


def test_missing_weights_are_refused(tmp_path):
    (_saved(tmp_path) / "model.safetensors").unlink()
    _refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, 20_000])
def test_truncated_weights_are_refused(tmp_path, keep):
    path = _saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    _refused(tmp_path)


def test_weights_that_lack_a_tensor_are_refused(tmp_path):
    path = _saved(tmp_path) / "model.safetensors"
    state = load_file(path)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, path, metadata={"format": "pt"})
    _refused(tmp_path, "model.layers.1.mlp.up_proj.weight")


def test_weights_of_another_shape_are_refused(tmp_path):
    path = _saved(tmp_path) / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"] = torch.ones(16)
    save_file(state, path, metadata={"format": "pt"})
    _refused(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_damaged_json_is_refused(tmp_path, name, text):
    (_saved(tmp_path) / name).write_text(text)
    _refused(tmp_path)


def test_a_missing_tokenizer_is_refused(tmp_path):
    for path in _saved(tmp_path).glob("tokenizer*"):
        path.unlink()
    _refused(tmp_path)

"""Examples, batches, the supervised training and its cache."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from muonrl.config import load_recipe
from muonrl.policy.model import load_policy
from muonrl.policy.tokenizer import ChatFormat
from muonrl.tasks.load import load_tasks
from muonrl.warmstart.demonstrations import make_demonstrations
from muonrl.warmstart.train import batches, cache_key, cut, default_cache, encode, warm_start
from tests.policy.cases import small_tokenizer

TASKS = load_tasks("shipped", "train")[:5]
CHAT = ChatFormat(small_tokenizer())
(PLAIN,) = make_demonstrations(
    TASKS, 1, oracle_share=0.0, rename_share=0.0, view_lines=10, max_chars=500, seed=0
)
TALK = replace(
    PLAIN,
    statement="clamp(1) returned <|end|>",
    steps=(("<function=search>def clamp", "def clamp(value, low)"), ("return low", "edited"), ("submit", "")),
)


def _config(folder, *overrides):
    small = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.head_dim=8"]
    small += ["model.ffn=24", "model.vocab=400", "warmstart.demonstrations=10", "warmstart.steps=3"]
    small += ["warmstart.batch_tokens=600", f"warmstart.cache_dir={folder}"]
    return load_recipe("tiny", [*small, *overrides])


class Steps:
    """Counts progress; raises ``fault`` at step ``at``."""

    def __init__(self, at=0, fault=KeyboardInterrupt):
        self.losses, self.at, self.fault = [], at, fault

    def __call__(self, step, steps, loss):
        self.losses.append(loss)
        assert step == len(self.losses) <= steps
        if step == self.at:
            raise self.fault


# --- examples and batches ---------------------------------------------------------------------------------------------


def test_an_example_marks_what_the_demonstrator_said():
    ids, mask = encode(TALK, CHAT)
    assert len(ids) == len(mask)
    (one, seen), (two, then), (three, _) = TALK.steps
    said = [[*CHAT.encode(reply), CHAT.end_id] for reply in (one, two, three)]
    expected = [(CHAT.prompt(TALK.statement), False), (said[0], True), (CHAT.observation(seen), False)]
    expected += [(said[1], True), (CHAT.observation(then), False), (said[2], True)]
    assert ids == [i for part, _ in expected for i in part]
    assert mask == [marked for part, marked in expected for _ in part]


def test_cut_keeps_the_first_replies():
    ids, mask = example = encode(TALK, CHAT)
    for replies in (1, 2, 3):
        short, marks = cut(example, replies)
        assert (short, marks) == (ids[: len(short)], mask[: len(short)])
        assert marks[-1] and short[-1] == CHAT.end_id
        assert sum(a and not b for a, b in itertools.pairwise([*marks, False])) == replies
    assert cut(example, 3) == example


def _examples(count):
    rng = random.Random(5)
    made = []
    for number in range(count):
        size = rng.randint(4, 40)
        # The first id tells the examples apart.
        made.append(
            ([100 + number, *rng.choices(range(1, 99), k=size - 1)], [i % 3 == 1 for i in range(size)])
        )
    return made


@pytest.mark.parametrize("limit", [30, 50, 160, 10_000])
def test_batches_show_every_example_once_a_pass(limit):
    examples = _examples(25)
    stream = batches(examples, limit, random.Random(0))
    orders = []
    for _ in range(2):
        left = {ids[0]: (ids, mask) for ids, mask in examples}
        order = []
        while left:
            ids, mask = next(stream)
            assert ids.dtype == torch.long and mask.dtype == torch.bool and ids.shape == mask.shape
            assert ids.shape[0] == 1 or ids.numel() <= limit
            for row, marks in zip(ids.tolist(), mask.tolist(), strict=True):
                tokens, said = left.pop(row[0])
                order.append(row[0])
                assert row[: len(tokens)] == tokens and marks[: len(said)] == said
                assert not any(row[len(tokens) :]) and not any(marks[len(said) :]), "padding is masked"
        orders.append(order)
    if limit < 10_000:
        assert orders[0] != orders[1], "each pass has its own order"


def test_batches_follow_from_the_seed():
    def first(seed):
        return [
            ids.tolist() for ids, _ in itertools.islice(batches(_examples(20), 100, random.Random(seed)), 8)
        ]

    assert first(1) == first(1) != first(2)


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss(tmp_path):
    steps = Steps()
    warm_start(_config(tmp_path, "warmstart.steps=60", "model.hidden=32"), TASKS, steps)
    assert len(steps.losses) == 60
    assert max(steps.losses[-5:]) < 0.75 * min(steps.losses[:5])


# --- cache ------------------------------------------------------------------------------------------------------------


def test_a_warm_start_is_trained_once(tmp_path):
    config, steps = _config(tmp_path / "cache"), Steps()
    folder, cached = warm_start(config, TASKS, steps)
    assert not cached and len(steps.losses) == 3
    assert folder.parent == tmp_path / "cache" and [p.name for p in folder.parent.iterdir()] == [folder.name]
    record = json.loads((folder / "warmstart.json").read_text())
    assert record["loss"] == steps.losses[-1] and 0 <= record["oracle_demonstrations"] <= 10
    model, tokenizer = load_policy(folder)
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert len(tokenizer) == model.config.vocab_size <= 400
    again = Steps()
    assert warm_start(config, TASKS, again) == (folder, True) and not again.losses


def test_the_same_config_gives_the_same_weights(tmp_path):
    states = []
    for name in ("a", "b"):
        torch.manual_seed(len(states))
        random.seed(len(states))
        folder, _ = warm_start(_config(tmp_path / name), TASKS, Steps())
        states.append(load_file(folder / "model.safetensors"))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_key_follows_what_the_warm_start_depends_on(tmp_path):
    def key(*overrides, tasks=TASKS):
        return cache_key(_config(tmp_path, *overrides), tasks)

    changed = [
        key("warmstart.seed=1"),
        key("warmstart.steps=4"),
        key("warmstart.oracle_share=0.5"),
        key("model.hidden=24"),
        key("model.tied=false"),
        key("agent.view_lines=9"),
        key("agent.max_observation_chars=700"),
        key(tasks=TASKS[:4]),
        key(tasks=[replace(TASKS[0], base={**TASKS[0].base, "README.md": b"other\n"}), *TASKS[1:]]),
        key(tasks=[*TASKS[:4], replace(TASKS[4], task_id="another")]),
    ]
    same = [
        key(),
        key(f"warmstart.cache_dir={tmp_path}/elsewhere"),
        key("run.seed=9"),
        key("optimizer.lr_muon=0.5"),
    ]
    assert len(set(same)) == 1
    assert len({same[0], *changed}) == 1 + len(changed)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_warm_start_leaves_nothing(tmp_path, fault):
    config = _config(tmp_path)
    with pytest.raises(fault):
        warm_start(config, TASKS, Steps(at=2, fault=fault))
    assert list(tmp_path.iterdir()) == []
    folder, cached = warm_start(config, TASKS, Steps())
    assert not cached and (folder / "warmstart.json").is_file()


def test_a_folder_without_its_record_is_no_hit(tmp_path):
    config = _config(tmp_path)
    folder, _ = warm_start(config, TASKS, Steps())
    (folder / "warmstart.json").unlink()
    (folder / "left.over").write_text("x")
    again, cached = warm_start(config, TASKS, Steps())
    assert again == folder and not cached and not (folder / "left.over").exists()


def test_the_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "muonrl"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "muonrl"

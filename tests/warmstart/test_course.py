"""The course of the warm start: which examples come when, and what the loss is taken over."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from muonrl.config import Config, ModelConfig, WarmstartConfig
from muonrl.policy.model import new_model
from muonrl.policy.tokenizer import ChatFormat, train_tokenizer
from muonrl.warmstart.demonstrations import Demonstration
from muonrl.warmstart.train import batches, cut, encode, fit, stages

SHAPE = ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=320, max_context=128)


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(train_tokenizer(["def clamp(x, lo, hi):"], ["clamp"], SHAPE.vocab, SHAPE.max_context))


def demonstration(name="clamp", practice=2):
    steps = (("look", f"{name} seen"), ("view", "lines"), ("replace", "edited"), ("finish", ""))
    return Demonstration(
        f"{name}(1) returned 2", steps, tuple(("again", "edited") for _ in range(practice)), False
    )


def replies(example):
    ids, mask = example
    return sum(1 for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1]))


def test_the_stages_go_from_one_reply_to_whole_episodes(chat):
    whole = [encode(demonstration(n), chat) for n in ("a", "bb", "ccc")]
    drills = [encode(demonstration(n).drill(), chat) for n in ("a", "bb", "ccc")]
    course = stages(whole, drills)
    assert sum(share for share, _ in course) == pytest.approx(1.0)
    assert [replies(examples[0]) for _, examples in course] == [1, 2, 5, 4]
    assert course[-1][1] == whole
    assert all(ids == full[0][: len(ids)] for (ids, _), full in zip(course[0][1], whole, strict=True))


def test_a_drill_ends_with_the_practice_and_never_finishes():
    drill = demonstration(practice=2).drill()
    assert [reply for reply, _ in drill.steps] == ["look", "view", "replace", "again", "again"]


def test_cut_keeps_the_end_of_the_reply_and_nothing_behind_it(chat):
    ids, mask = cut(encode(demonstration(), chat), replies=2)
    assert ids[-1] == chat.end_id and mask[-1] and not mask[0]
    assert chat.decode(ids).endswith("view")


def test_an_example_longer_than_a_batch_comes_alone():
    stream = batches([([5] * 40, [True] * 40), ([6] * 3, [True] * 3)], 8, random.Random(0))
    shapes = sorted(tuple(next(stream)[0].shape) for _ in range(2))
    assert shapes == [(1, 3), (1, 40)]


def test_the_loss_is_taken_over_what_the_demonstrator_said_alone(chat):
    example = encode(demonstration(), chat)
    frozen = replace(
        Config(), model=SHAPE, warmstart=WarmstartConfig(steps=1, batch_tokens=64, lr_muon=0.0, lr_adamw=0.0)
    )
    model = new_model(SHAPE, chat.tokenizer, seed=3)
    value = fit(model, [(1.0, [example])], frozen, lambda *_: None)
    ids, mask = torch.tensor([example[0]]), torch.tensor(example[1])
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[0]
    said = mask[1:]
    assert value == pytest.approx(float(F.cross_entropy(logits[said], ids[0, 1:][said])), rel=1e-5)
    assert value != pytest.approx(float(F.cross_entropy(logits, ids[0, 1:])), rel=1e-3)


def test_fit_learns_the_course_and_reports_every_step(chat):
    whole = [encode(demonstration(n), chat) for n in ("a", "bb")]
    course = stages(whole, [encode(demonstration(n).drill(), chat) for n in ("a", "bb")])
    config = replace(Config(), model=SHAPE, warmstart=WarmstartConfig(steps=60, batch_tokens=256))
    heard = []
    fit(new_model(SHAPE, chat.tokenizer, seed=3), course, config, lambda *report: heard.append(report))
    assert [step for step, _, _ in heard] == list(range(1, 61))
    assert heard[-1][2] < 0.75 * heard[0][2]

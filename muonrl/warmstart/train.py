"""Supervised training of a new policy on scripted demonstrations, cached by everything that it depends on."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muonrl.config import Config
from muonrl.policy.model import new_model, save_policy
from muonrl.policy.tokenizer import ChatFormat, train_tokenizer, word_pieces
from muonrl.tasks.schema import RepairTask
from muonrl.warmstart.demonstrations import KNOWN_WORDS, Demonstration, make_demonstrations
from muonrl_kernels import Muon, split_params

# The code and words that a cached warm start depends on.
SOURCES = (
    "warmstart/train.py",
    "warmstart/demonstrations.py",
    "warmstart/words.txt",
    "policy/tokenizer.py",
    "policy/model.py",
    "agents/actions.py",
    "agents/guest_tools.py",
    "tasks/operators.py",
)
Example = tuple[list[int], list[bool]]  # token ids, and which of them the demonstrator said
Progress = Callable[[int, int, float], None]  # (step, steps, loss)


def cache_key(config: Config, tasks: Sequence[RepairTask]) -> str:
    """A digest of all that the warm start depends on: its config, the model's, the agent's limits, tasks and code."""
    digest = hashlib.sha256()
    spec = {
        "warmstart": asdict(config.warmstart),
        "model": asdict(config.model),
        "agent": asdict(config.agent),
    }
    del spec["warmstart"]["cache_dir"]
    digest.update(json.dumps(spec, sort_keys=True).encode())
    for task in tasks:
        digest.update(task.task_id.encode())
        for part in (task.base, task.gold_patch):
            for path in sorted(part):
                digest.update(path.encode() + part[path])
    package = Path(__file__).parent.parent
    for source in SOURCES:
        digest.update((package / source).read_bytes())
    return digest.hexdigest()[:16]


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/muonrl`` or ``~/.cache/muonrl``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muonrl"


def warm_start(config: Config, tasks: Sequence[RepairTask], progress: Progress) -> tuple[Path, bool]:
    """The folder of a warm-started policy for ``config`` -> (folder, whether it came from the cache)."""
    root = Path(config.warmstart.cache_dir) if config.warmstart.cache_dir else default_cache()
    folder = root / f"warmstart-{cache_key(config, tasks)}"
    if (folder / "warmstart.json").is_file():
        return folder, True
    part = root / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _train(config, tasks, part, progress)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder, False


def _train(config: Config, tasks: Sequence[RepairTask], folder: Path, progress: Progress) -> None:
    began = time.perf_counter()
    w = config.warmstart
    corpus = [
        text for task in tasks for text in (task.problem_statement, *(d.decode() for d in task.base.values()))
    ]
    tokenizer = train_tokenizer(corpus, KNOWN_WORDS, config.model.vocab, config.model.max_context)
    demonstrations = make_demonstrations(
        tasks,
        w.demonstrations,
        oracle_share=w.oracle_share,
        rename_share=w.rename_share,
        view_lines=config.agent.view_lines,
        max_chars=config.agent.max_observation_chars,
        seed=w.seed,
        pieces=word_pieces(tokenizer),
    )
    model = new_model(config.model, tokenizer, w.seed)
    chat = ChatFormat(tokenizer)
    examples = [encode(d, chat) for d in demonstrations]
    final = fit(model, stages(examples, [encode(d.drill(), chat) for d in demonstrations]), config, progress)
    save_policy(folder, model, tokenizer)
    record = {
        "loss": final,
        "seconds": round(time.perf_counter() - began, 1),
        "oracle_demonstrations": sum(d.oracle for d in demonstrations),
        "parameters": sum(p.numel() for p in model.parameters()),
        "mean_tokens": sum(len(e[0]) for e in examples) / len(examples),
    }
    (folder / "warmstart.json").write_text(json.dumps(record, indent=1) + "\n")


def encode(demonstration: Demonstration, chat: ChatFormat) -> Example:
    """Token ids and which of them the demonstrator 'sampled'."""
    ids = chat.prompt(demonstration.statement)
    mask = [False] * len(ids)
    for reply, observation in demonstration.steps:
        said = [*chat.tokenizer.encode(reply, add_special_tokens=False), chat.end_id]
        seen = chat.observation(observation) if observation else []
        ids += said + seen
        mask += [True] * len(said) + [False] * len(seen)
    return ids, mask


def fit(
    model: Any,
    course: Sequence[tuple[float, Sequence[Example]]],
    config: Config,
    progress: Progress,
) -> float:
    """``warmstart.steps`` steps of next-token prediction on the demonstrator's tokens -> the last step's loss.

    ``course`` lists (share of the steps, examples) in the order in which they are learned from.
    """
    w = config.warmstart
    split = split_params(model)
    adamw = {"lr": w.lr_adamw, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = Muon(
        [{"params": split.muon}, {"params": split.adamw, "algorithm": "adamw", **adamw}],
        lr=w.lr_muon,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    base = [group["lr"] for group in optimizer.param_groups]
    rng = random.Random(w.seed)
    streams = [batches(stage, w.batch_tokens, rng) for _, stage in course]
    ends = list(itertools.accumulate(share for share, _ in course))
    value = 0.0
    model.train()
    for step in range(w.steps):
        passed = step / w.steps
        # Short warm-up, a plateau, then a linear descent to a tenth over the last third.
        scale = min(1.0, (step + 1) / 20) * min(1.0, 0.1 + 2.7 * (1.0 - passed))
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * scale
        ids, mask = next(streams[bisect.bisect_right(ends, passed)])
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        chosen = mask[:, 1:]
        logits = F.linear(hidden[chosen], model.lm_head.weight)
        loss = F.cross_entropy(logits, ids[:, 1:][chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        progress(step + 1, w.steps, value)
    return value


def stages(whole: Sequence[Example], drills: Sequence[Example]) -> list[tuple[float, Sequence[Example]]]:
    """The course of the warm start: (share of the steps, examples), easy to hard.

    Copying takes longest to learn, and the first two replies are nothing else: cut off there, a batch holds several times
    as many copies. Drills then repeat the replacement of a line. Whole episodes come last.
    """
    cuts = [[cut(example, replies) for example in whole] for replies in (1, 2)]
    return [(0.18, cuts[0]), (0.18, cuts[1]), (0.34, drills), (0.30, whole)]


def cut(example: Example, replies: int) -> Example:
    """The example up to the end of its first ``replies`` replies."""
    ids, mask = example
    ends = [i for i in range(1, len(mask) + 1) if mask[i - 1] and (i == len(mask) or not mask[i])]
    end = ends[replies - 1]
    return ids[:end], mask[:end]


def batches(
    examples: Sequence[Example], max_tokens: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless padded batches of about ``max_tokens`` tokens: ids int64 [B, T], loss mask bool [B, T].

    Examples of similar length share a batch, so that little of it is padding; the batches come in random order.
    """
    while True:
        order = sorted(range(len(examples)), key=lambda i: (len(examples[i][0]), rng.random()))
        groups: list[list[int]] = [[]]
        for i in order:
            if groups[-1] and (len(groups[-1]) + 1) * len(examples[i][0]) > max_tokens:
                groups.append([])
            groups[-1].append(i)
        rng.shuffle(groups)
        for group in groups:
            yield _pad([examples[i] for i in group])


def _pad(chosen: Sequence[Example]) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in chosen)
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    mask = torch.zeros(len(chosen), width, dtype=torch.bool)
    for row, (tokens, said) in enumerate(chosen):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(said)] = torch.tensor(said)
    return ids, mask

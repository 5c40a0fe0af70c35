"""TRL's own trainer with our loss in place, against its own loss: value and the gradient of every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from muonrl_kernels.adapters.trl import GRPOLossMixin, grpo_options
from tests.numerics import assert_as_good_as, assert_exactly, relative_error

# TRL sets an argument by a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")

ROWS, PROMPT, LENGTH, VOCAB = 4, 5, 9, 43


class Ours(GRPOLossMixin, GRPOTrainer):
    """Their trainer, our loss."""


class Exact(GRPOTrainer):
    """Their formula in fp64, on log-probabilities of whole logits."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        log_p = torch.log_softmax(logits[:, -logits_to_keep - 1 : -1].double() / self.temperature, -1)
        targets = input_ids[:, -logits_to_keep:].unsqueeze(-1)
        return log_p.gather(-1, targets).squeeze(-1), -(log_p.exp() * log_p).sum(-1), None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def make(kind: Any, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": ROWS,
        "num_generations": ROWS,
        "max_completion_length": LENGTH,
        "logging_steps": 1,
    }
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    model.train()
    trainer = kind(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**(arguments | settings)),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 8),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def batch(folder: Path, **changes: Any) -> dict[str, Any]:
    """A batch as `_prepare_inputs` hands it to the loss; the last completion is not trained on at all."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT + LENGTH), generator=generator)
    lengths = torch.tensor([9, 4, 7, 5]).unsqueeze(1)
    mask = (torch.arange(LENGTH) < lengths).long()
    tool_mask = torch.ones_like(mask)
    tool_mask[0, 2:5] = 0
    tool_mask[3] = 0
    inputs: dict[str, Any] = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([4.0, -0.7, -0.9, 2.0]),
        "num_items_in_batch": torch.tensor(31.0),
    }
    exact = make(Exact, folder, torch.float64)
    with torch.no_grad():
        logp, _, _ = exact._get_per_token_logps_and_entropies(
            exact.model, ids, torch.cat((inputs["prompt_mask"], mask), 1), LENGTH
        )
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        inputs[name] = (logp + 0.4 * torch.randn(logp.shape, generator=generator)).float()
    weights = torch.rand(ROWS, LENGTH, generator=generator) * 2
    weights[0, 0] = 0.0
    inputs |= {k: weights for k in changes if k == "importance_sampling_ratio"}
    return {k: v for k, v in inputs.items() if not (k in changes and changes[k] is None)}


def loss_and_grads(trainer: Any, inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    grads = {k: p.grad for k, p in trainer.model.named_parameters()}
    return {"loss": loss.detach(), **grads}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, {}),
    "dapo, two steps": (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "epsilon_high": 0.28},
        {},
    ),
    "on policy": ({}, {"old_per_token_logps": None}),
    "weights of the sampler": ({}, {"importance_sampling_ratio": True}),
    "grpo with a reference": (
        {"loss_type": "grpo", "beta": 0.3, "temperature": 0.7, "gradient_accumulation_steps": 2},
        {},
    ),
    "plain KL": ({"beta": 0.3, "use_bias_correction_kl": False}, {}),
    "bnpo, two-sided": ({"loss_type": "bnpo", "delta": 1.3, "gradient_accumulation_steps": 2}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo", "epsilon": 0.1}, {}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.4}, {}),
    "cispo, bound below 1": ({"loss_type": "cispo"}, {"importance_sampling_ratio": True}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1}, {}),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {}),
    "luspo by token": ({"loss_type": "luspo"}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient(folder: Path, name: str) -> None:
    settings, changes = CASES[name]
    inputs = batch(folder, **changes)
    trainers = {
        "ours": make(Ours, folder, **settings),
        "theirs": make(GRPOTrainer, folder, **settings),
        "exact": make(Exact, folder, torch.float64, **settings),
    }
    for trainer in trainers.values():
        if "importance_sampling_ratio" in changes:
            trainer.use_vllm = True
    results = {
        k: loss_and_grads(t, inputs, torch.float64 if k == "exact" else torch.float32)
        for k, t in trainers.items()
    }
    assert relative_error(results["theirs"]["loss"], results["exact"]["loss"]) < 1e-4
    for key, truth in results["exact"].items():
        assert_as_good_as(results["ours"][key], results["theirs"][key], truth, what=key)
    mine, yours = (trainers[k]._metrics["train"] for k in ("ours", "theirs"))
    for key in set(mine) & set(yours):
        assert mine[key] == pytest.approx(yours[key], rel=1e-5, abs=1e-7), key
    assert mine["policy_loss/clip_dual"][0] > 0 or "delta" not in settings
    expected = {"entropy"} | ({"kl"} if name == "plain KL" else set())
    assert expected <= set(mine) & set(yours)


def test_steps_of_training(folder: Path) -> None:
    settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "num_iterations": 3, "beta": 0.1}
    settings |= {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    before = Qwen3ForCausalLM.from_pretrained(folder).state_dict()
    moved, logs = [], []
    for kind in (Ours, GRPOTrainer):
        trainer = make(kind, folder, **settings)
        trainer.train()
        moved.append({k: v.detach() - before[k] for k, v in trainer.model.state_dict().items()})
        logs.append([entry for entry in trainer.state.log_history if "entropy" in entry])
    for key, theirs in moved[1].items():
        assert relative_error(moved[0][key], theirs) < 1e-4, key
    assert len(logs[0]) == len(logs[1]) == 3
    for mine, yours in zip(*logs, strict=True):
        for key in ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "loss"):
            assert mine[key] == pytest.approx(yours[key], rel=1e-4, abs=1e-6), key
    assert logs[0][2]["clip_ratio/region_mean"] > 0  # the policy has left the ratio's range


def test_a_head_that_fsdp_keeps_in_parts(folder: Path, tmp_path: Path) -> None:
    inputs = batch(folder)
    plain = loss_and_grads(make(Ours, folder), inputs, torch.float32)
    trainer = make(Ours, folder)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole = trainer.model.lm_head.weight.detach()
        parts = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        trainer.model.lm_head.weight = torch.nn.Parameter(parts)
        found = loss_and_grads(trainer, inputs, torch.float32)
        assert isinstance(found["lm_head.weight"], DTensor)
        found["lm_head.weight"] = found["lm_head.weight"].full_tensor()
    finally:
        dist.destroy_process_group()
    for key, value in plain.items():
        assert_exactly(found[key], value, key)


def test_nothing_to_train_on(folder: Path) -> None:
    inputs = batch(folder)
    inputs["tool_mask"] = torch.zeros_like(inputs["tool_mask"])
    results = loss_and_grads(make(Ours, folder), inputs, torch.float32)
    assert results.pop("loss") == 0 and not any(g.any() for g in results.values())


def test_the_model_is_otherwise_what_it_was(folder: Path) -> None:
    trainer = make(Ours, folder)
    ids = torch.tensor([[5, 6, 7]])
    before = trainer.model(input_ids=ids).logits
    forward = [loss_and_grads(trainer, batch(folder), torch.float32), trainer.model.forward][1]
    torch.testing.assert_close(trainer.model(input_ids=ids).logits, before)
    loss_and_grads(trainer, batch(folder), torch.float32)
    assert trainer.model.forward is forward  # put in once


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss_type": "sapo"}, "loss_type='sapo'.* allowed: grpo, bnpo"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"entropy_coef": 0.1}, "entropy_coef"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy"),
        ({"delta": 1.1}, r"delta must be >= 1 \+ epsilon_high = 1.2, got 1.1"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **settings)
    with pytest.raises(ValueError, match=text):
        grpo_options(config)


def test_images_are_refused(folder: Path) -> None:
    trainer = make(Ours, folder)
    with pytest.raises(ValueError, match="takes text .* got \\['pixel_values'\\]"):
        trainer._compute_loss(trainer.model, {**batch(folder), "pixel_values": torch.zeros(1)})

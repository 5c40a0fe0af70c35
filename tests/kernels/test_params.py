"""What split_params puts where."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from muonrl_kernels import Muon, split_params


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.q_proj = nn.Linear(8, 8)
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.gate_proj = nn.Linear(8, 16, bias=False)
        self.gate = nn.Linear(8, 4, bias=False)
        self.conv1d = nn.Conv1d(8, 8, 4, groups=8)
        self.A_log = nn.Parameter(torch.zeros(4))
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.kernel = nn.Parameter(torch.zeros(2, 8, 8))


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def test_every_kind_of_parameter() -> None:
    split = split_params(Model(tied=False))
    assert [n for n, _ in split.named("muon")] == [
        f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("q_proj", "up_proj", "gate_proj")
    ]
    reasons = {a.name: a.reason for a in split.assignments}
    assert "embedding" in reasons["embed.weight"] and "head" in reasons["lm_head.weight"]
    assert "norm" in reasons["blocks.0.norm.weight"] and "bias" in reasons["blocks.0.q_proj.bias"]
    assert "gate" in reasons["blocks.0.gate.weight"] and "convolution" in reasons["blocks.0.conv1d.weight"]
    assert "vector" in reasons["blocks.0.A_log"] and "experts" in reasons["blocks.0.experts"]
    assert "3-D" in reasons["blocks.0.kernel"]


def test_each_tensor_is_in_exactly_one_group() -> None:
    for tied in (True, False):
        model = Model(tied)
        split = split_params(model)
        grouped = [id(p) for group in split for p in group["params"]]
        assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_tied_weights_count_once_and_go_to_adamw() -> None:
    split = split_params(Model(tied=True))
    tied = [a for a in split.assignments if a.tied_to]
    assert [(a.name, a.where, a.tied_to) for a in tied] == [("embed.weight", "adamw", ("lm_head.weight",))]
    assert "embed.weight [11, 8]: embedding (Embedding) (tied to lm_head.weight)" in str(split)


def test_a_head_that_the_model_names() -> None:
    model = Model(tied=False)
    model.weird = nn.Linear(8, 11)
    model.get_output_embeddings = lambda: model.weird  # type: ignore[operator]
    where = {a.name: a.where for a in split_params(model).assignments}
    assert where["weird.weight"] == "adamw"
    linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert [n for n, _ in split_params(linear).named("muon")] == ["0.weight", "1.weight"]


def test_a_hidden_matrix_tied_to_the_head_goes_to_adamw() -> None:
    model = nn.Module()
    model.inner, model.lm_head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.inner.weight = model.lm_head.weight
    [only] = split_params(model).assignments
    assert only.where == "adamw" and only.tied_to == ("inner.weight",)


def test_choices_of_the_caller() -> None:
    def override(name: str, p: Tensor) -> str | None:
        return "adamw" if "q_proj" in name else "muon" if p.ndim == 2 and ".gate." in name else None

    model = Model(tied=False)
    model.embed.weight.requires_grad_(False)
    split = split_params(model, conv="muon", override=override)  # type: ignore[arg-type]
    where = {a.name: a.where for a in split.assignments}
    assert where["blocks.0.q_proj.weight"] == "adamw" and where["blocks.0.gate.weight"] == "muon"
    assert where["blocks.1.conv1d.weight"] == "muon" and where["embed.weight"] == "frozen"
    assert all(p.requires_grad for group in split for p in group["params"])
    forced = split_params(
        Model(tied=True), override=lambda name, p: "muon" if name == "embed.weight" else None
    )
    assert "embed.weight" in [n for n, _ in forced.named("muon")]


def test_the_split_is_what_muon_takes() -> None:
    model = Model(tied=True)
    split = split_params(model)
    assert len(split) == 2 and split[0]["algorithm"] == "muon" and list(split) == split.groups()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Muon(split, lr=0.01)
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    groups = Muon(split.groups(muon={"lr": 0.5}, adamw={"lr": 0.25, "weight_decay": 0.0})).param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.5, 0.1), (0.25, 0.0)]
    assert [len(g["params"]) for g in groups] == [len(split.muon), len(split.adamw)]


def test_convolutions_and_experts_come_as_groups_of_matrices() -> None:
    model = Model(tied=False)
    split = split_params(
        model, conv="muon", experts="muon", override=lambda n, p: "muon" if "kernel" in n else None
    )
    groups = split.groups(muon={"lr": 0.5})
    assert [(g["algorithm"], g.get("flatten"), g.get("batched_matrices")) for g in groups] == [
        ("muon", None, None),
        ("muon", True, None),
        ("muon", None, True),
        ("adamw", None, None),
    ]
    assert [g.get("lr") for g in groups] == [0.5, 0.5, 0.5, None]
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    Muon(split, lr=0.01).step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_experts_by_the_name_of_their_module() -> None:
    class SomeExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(2, 4, 4))
            self.up_bias = nn.Parameter(torch.zeros(2, 4))

    where = {a.name: (a.where, a.view) for a in split_params(SomeExperts(), experts="muon").assignments}
    assert where == {"up": ("muon", "batched_matrices"), "up_bias": ("adamw", None)}


def test_only_one_kind() -> None:
    assert [g["algorithm"] for g in split_params(nn.LayerNorm(3))] == ["adamw"]
    assert [g["algorithm"] for g in split_params(nn.Linear(3, 3, bias=False))] == ["muon"]
    assert len(split_params(nn.ReLU())) == 0
    assert SimpleNamespace(n=str(split_params(nn.ReLU()))).n.startswith("muon: 0 tensors")

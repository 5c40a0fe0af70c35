"""Which parameters of a model Muon should update, decided by module type, with a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from torch import Tensor, nn

__all__ = ["Assignment", "ParamSplit", "split_params"]

Where = Literal["muon", "adamw", "frozen"]

_HEAD_NAMES: Final = frozenset({"lm_head", "head", "output", "score", "classifier", "unembed", "embed_out"})
_GATE_NAMES: Final = frozenset(
    {"in_proj_a", "in_proj_b", "in_proj_ba", "gate", "router", "shared_expert_gate"}
)
_BY_CALLER: Final = "decided by the caller"


@dataclass(frozen=True)
class Assignment:
    """One parameter: its (first) name, other names it is tied to, where it went and why.

    `view` is the option of :class:`Muon` that makes matrices of a parameter with more than two dimensions.
    """

    name: str
    parameter: Tensor = field(repr=False)
    where: Where
    reason: str
    tied_to: tuple[str, ...] = ()
    view: Literal["flatten", "batched_matrices"] | None = None


@dataclass(frozen=True)
class ParamSplit(Sequence[dict[str, Any]]):
    """The outcome of :func:`split_params`: iterate it to get parameter groups, print it to see what went where.

    ``Muon(split_params(model))`` works as it is; :meth:`groups` adds options of each group first. Empty groups are left
    out. Convolutions and stacked experts that went to Muon are groups of their own, with `flatten` or `batched_matrices`.
    """

    assignments: tuple[Assignment, ...]

    def named(self, where: Where) -> list[tuple[str, Tensor]]:
        """(name, parameter) of everything that went to "muon", "adamw" or "frozen", in the model's order."""
        return [(a.name, a.parameter) for a in self.assignments if a.where == where]

    @property
    def muon(self) -> list[Tensor]:
        """Hidden weight matrices."""
        return [p for _, p in self.named("muon")]

    @property
    def adamw(self) -> list[Tensor]:
        """Everything else that is trained."""
        return [p for _, p in self.named("adamw")]

    def groups(
        self, *, muon: dict[str, Any] | None = None, adamw: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for :class:`Muon`, with the given options (lr, weight_decay, ...) added to each."""
        views: dict[str | None, list[Tensor]] = {None: [], "flatten": [], "batched_matrices": []}
        for a in self.assignments:
            if a.where == "muon":
                views[a.view].append(a.parameter)
        groups = [
            {"params": ps, "algorithm": "muon", **({view: True} if view else {}), **(muon or {})}
            for view, ps in views.items()
            if ps
        ]
        rest = [{"params": self.adamw, "algorithm": "adamw", **(adamw or {})}] if self.adamw else []
        return groups + rest

    def __len__(self) -> int:
        return len(self.groups())

    def __getitem__(self, index: Any) -> Any:
        return self.groups()[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.groups())

    def __str__(self) -> str:
        lines = []
        for where in ("muon", "adamw", "frozen"):
            mine = [a for a in self.assignments if a.where == where]
            total = sum(a.parameter.numel() for a in mine)
            lines.append(f"{where}: {len(mine)} tensors, {total} parameters")
            for a in mine:
                tied = f" (tied to {', '.join(a.tied_to)})" if a.tied_to else ""
                lines.append(f"  {a.name} {list(a.parameter.shape)}: {a.reason}{tied}")
        return "\n".join(lines)


def _are_experts(name: str, p: Tensor, module: nn.Module) -> bool:
    return p.ndim == 3 and ("experts" in type(module).__name__.lower() or "experts" in name.split("."))


def _is_linear(module: nn.Module) -> bool:
    """Linear layers, and Hugging Face's Conv1D, which is one with a transposed weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(
        module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    )


def _head_module(model: nn.Module) -> nn.Module | None:
    """The output head that the model itself names (Hugging Face's get_output_embeddings)."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return head if isinstance(head, nn.Module) else None


def _classify(
    name: str, p: Tensor, module: nn.Module, is_head: bool, conv: Where, experts: Where
) -> tuple[Where, str]:
    """Where one parameter of `module` goes; `name` is its full dotted name."""
    kind = type(module).__name__
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "adamw", f"embedding ({kind})"
    if is_head:
        return "adamw", f"output head ({kind})"
    if "norm" in kind.lower():
        return "adamw", f"norm ({kind})"
    if p.ndim < 2:
        return "adamw", f"{'bias' if name.endswith('bias') else 'vector or scalar'} ({kind})"
    if _is_convolution(module):
        return conv, f"convolution ({kind})"
    if _are_experts(name, p, module):
        return experts, f"stacked experts ({kind})"
    if not _is_linear(module) or p.ndim != 2:
        return "adamw", f"{p.ndim}-D parameter of a module that is no linear layer ({kind})"
    if owner in _GATE_NAMES or min(p.shape) == 1:
        return "adamw", f"gate or router ({kind})"
    return "muon", f"hidden matrix ({kind})"


def split_params(
    model: nn.Module,
    *,
    conv: Literal["muon", "adamw"] = "adamw",
    experts: Literal["muon", "adamw"] = "adamw",
    override: Callable[[str, Tensor], Literal["muon", "adamw"] | None] | None = None,
) -> ParamSplit:
    """Put hidden weight matrices on Muon and everything else on AdamW.

    Embeddings, the output head, norms, biases, vectors, gates and routers, convolutions and parameters of modules that
    are no linear layers go to AdamW. A tensor reachable under several names counts once; if any of them is an embedding
    or the head, it goes to AdamW. Parameters with requires_grad=False are reported as "frozen" and are in no group.

    Args:
        model: any module; for Hugging Face models the head is asked for, otherwise it is a linear layer of a usual name
            (lm_head, head, output, score, classifier, unembed, embed_out).
        conv: where convolution kernels go; to Muon as matrices [A, B*C*...].
        experts: where stacked weights [E, m, n] of mixtures of experts go (3-D parameters that are called experts, or whose
            module is); to Muon as E matrices.
        override: called with (name, parameter); "muon" or "adamw" decides, None leaves the rule in force.
    """
    head = _head_module(model)
    seen: dict[int, list[tuple[str, Tensor, Where, str]]] = {}
    batched: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        is_head = module is head or (_is_linear(module) and prefix.rpartition(".")[2] in _HEAD_NAMES)
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{local}" if prefix else local
            where, reason = _classify(name, p, module, is_head, conv, experts)
            forced = override(name, p) if override is not None else None
            if forced is not None:
                where, reason = forced, _BY_CALLER
            if not p.requires_grad:
                where, reason = "frozen", "requires_grad is False"
            if _are_experts(name, p, module):
                batched.add(id(p))
            seen.setdefault(id(p), []).append((name, p, where, reason))
    assignments = []
    for entries in seen.values():
        decided = [e for e in entries if e[3] == _BY_CALLER]
        name, p, where, reason = next(
            (e for e in decided or entries if e[2] != "muon"), (decided or entries)[0]
        )
        tied = tuple(e[0] for e in entries if e[0] != name)
        view: Any = None if p.ndim <= 2 else "batched_matrices" if id(p) in batched else "flatten"
        assignments.append(Assignment(name, p, where, reason, tied, view))
    return ParamSplit(tuple(assignments))

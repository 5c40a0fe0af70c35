"""The losses as modules that hold their options."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from muonrl_kernels.linear_policy_loss import linear_policy_loss
from muonrl_kernels.metrics import LossMetrics
from muonrl_kernels.options import LossKeywords, choose_options
from muonrl_kernels.parallel import Reduction
from muonrl_kernels.policy_loss import policy_loss

__all__ = ["LinearPolicyLoss", "PolicyLoss"]


def _options(preset: str | None, options: LossKeywords) -> LossKeywords:
    """The options as they are, once they are known to be good; a normaliser may still come with the call."""
    trial = options.copy()
    trial.setdefault("normalizer", 1.0)
    choose_options(preset, trial)
    return options.copy()


class PolicyLoss(nn.Module):
    """:func:`policy_loss` with its options fixed; has no parameters and no state.

    Args:
        preset, backend, dp_group, dp_reduction, **options: as in :func:`policy_loss`.

    Raises:
        ValueError: an unknown name or a number outside its range.
    """

    def __init__(
        self,
        *,
        preset: str | None = None,
        backend: str = "auto",
        dp_group: ProcessGroup | None = None,
        dp_reduction: Reduction = "mean",
        **options: Unpack[LossKeywords],
    ) -> None:
        super().__init__()
        self.preset, self.backend = preset, backend
        self.dp_group, self.dp_reduction = dp_group, dp_reduction
        self.options = _options(preset, options)

    def forward(
        self, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, **rest: Any
    ) -> tuple[Tensor, LossMetrics]:
        """As :func:`policy_loss`; `rest` are its other tensors, and options that this call changes (`normalizer`)."""
        settings: dict[str, Any] = {"preset": self.preset, "backend": self.backend}
        settings |= {"dp_group": self.dp_group, "dp_reduction": self.dp_reduction}
        return policy_loss(logp, old_logp, advantages, mask, **(settings | dict(self.options) | rest))

    def extra_repr(self) -> str:
        """The preset and the options."""
        return ", ".join(f"{k}={v!r}" for k, v in {"preset": self.preset, **self.options}.items())


class LinearPolicyLoss(nn.Module):
    """:func:`linear_policy_loss` with its options fixed; the head's weight comes with each call.

    Args:
        preset, backend, dp_group, dp_reduction, **options: as in :func:`policy_loss`.
        temperature, softcap, logit_scale, vocab_size, chunk_rows, tp_group, vocab_start: as in :func:`linear_logprob`.

    Raises:
        ValueError: an unknown name or a number outside its range.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        vocab_size: int | None = None,
        chunk_rows: int | None = None,
        preset: str | None = None,
        backend: str = "auto",
        tp_group: ProcessGroup | None = None,
        vocab_start: int | None = None,
        dp_group: ProcessGroup | None = None,
        dp_reduction: Reduction = "mean",
        **options: Unpack[LossKeywords],
    ) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {
            "temperature": temperature,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "vocab_size": vocab_size,
            "chunk_rows": chunk_rows,
            "preset": preset,
            "backend": backend,
            "tp_group": tp_group,
            "vocab_start": vocab_start,
            "dp_group": dp_group,
            "dp_reduction": dp_reduction,
        }
        self.options = _options(preset, options)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        **rest: Any,
    ) -> tuple[Tensor, LossMetrics]:
        """As :func:`linear_policy_loss`; `rest` are its other tensors, and arguments that this call changes."""
        return linear_policy_loss(
            hidden,
            weight,
            targets,
            old_logp,
            advantages,
            mask,
            **(self.settings | dict(self.options) | rest),
        )

    def extra_repr(self) -> str:
        """The preset and the options."""
        return ", ".join(f"{k}={v!r}" for k, v in {"preset": self.settings["preset"], **self.options}.items())

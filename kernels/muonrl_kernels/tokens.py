"""What the policy loss knows of its tokens before pi_theta: masks, importance weights and each token's share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muonrl_kernels.options import LossOptions

__all__ = ["Tokens", "check_tokens", "inverse", "prepare", "sequence_index", "sequence_sum"]


@dataclass(frozen=True)
class Tokens:
    """What the loss knows of N tokens before pi_theta: every field is [N], and safe where `valid` is false.

    Attributes:
        valid: mask and not dropped.
        old: log pi_old. advantages: A. ref: log pi_ref, None without it.
        w: detached importance weight. w_log: log pi_old - log pi_rollout, None without a rollout policy.
        w_cut: whether w was cut.
        share: weight of the token's l in the loss (1 / number of tokens for the token mean).
        sequence: index of each token's sequence, None where tokens are independent. sequences: their number.
        dropped: 0-d count of dropped tokens.
        on_policy: pi_old is pi_theta itself, so that `old` is not looked at.
    """

    valid: Tensor
    old: Tensor
    advantages: Tensor
    ref: Tensor | None
    w: Tensor
    w_log: Tensor | None
    w_cut: Tensor
    share: Tensor
    sequence: Tensor | None
    sequences: int
    dropped: Tensor
    on_policy: bool = False

    def take(self, index: Tensor | slice) -> Tokens:
        """The tokens at `index`; the dropped count stays with the whole."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[index]

        return Tokens(
            self.valid[index],
            self.old[index],
            self.advantages[index],
            pick(self.ref),
            self.w[index],
            pick(self.w_log),
            self.w_cut[index],
            self.share[index],
            pick(self.sequence),
            self.sequences,
            self.dropped,
            self.on_policy,
        )


def sequence_index(
    shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[Tensor, int] | None:
    """Index of the sequence of each token of [B, T] (rows) or of packed [N] with cu_seqlens; None if it is unknown."""
    if cu_seqlens is None:
        if len(shape) != 2:
            return None
        return torch.arange(shape[0], device=device).repeat_interleave(shape[1]), shape[0]
    if len(shape) != 1 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError("cu_seqlens is [sequences + 1] and goes with packed tokens [N]")
    lengths = cu_seqlens.diff().to(device=device, dtype=torch.int64)
    if cu_seqlens.device.type == "cpu" and (int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != shape[0]):
        raise ValueError(f"cu_seqlens must run from 0 to the number of tokens, {shape[0]}")
    ids = torch.arange(lengths.numel(), device=device)
    return ids.repeat_interleave(lengths, output_size=shape[0]), lengths.numel()


def sequence_sum(x: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Sum of x [N] over each sequence: [sequences]."""
    return x.new_zeros(sequences).index_add_(0, sequence, x)


def _importance(
    tokens_log: Tensor, valid: Tensor, seq: tuple[Tensor, int] | None, o: LossOptions
) -> tuple[Tensor, Tensor]:
    """Weight w and whether it was cut, [N], from log pi_old - log pi_rollout (0 where not valid)."""
    log_w = tokens_log
    if o.is_level == "sequence":
        assert seq is not None
        log_w = sequence_sum(tokens_log, *seq)[seq[0]]
    raw = log_w.clamp(-o.log_ratio_clamp, o.log_ratio_clamp).exp()
    low = 0.0 if o.is_low is None else o.is_low
    cut = ((raw > o.is_high) | (raw < low)) & valid
    w = torch.where(cut, 0.0, raw) if o.is_mode == "icepop" else raw.clamp(low, o.is_high)
    return w, cut


def inverse(count: Tensor) -> Tensor:
    """1 / count, and 0 for a count of 0: an update without tokens has loss 0."""
    return torch.where(count != 0, count.reciprocal(), 0.0)


def _shares(valid: Tensor, seq: tuple[Tensor, int] | None, o: LossOptions, dtype: torch.dtype) -> Tensor:
    """Weight of each token in the loss, [N]."""
    ones = valid.to(dtype)
    if o.agg == "sequence_mean":
        assert seq is not None
        lengths = sequence_sum(ones, *seq)
        share = ones * inverse(lengths)[seq[0]]
        count = (lengths > 0).sum().to(dtype)
    else:
        share, count = ones, ones.sum()
    if o.normalizer is not None:
        # full() is a kernel on the device; a tensor made from a number would be copied there.
        count = (
            o.normalizer.to(device=valid.device, dtype=dtype).reshape(())
            if isinstance(o.normalizer, Tensor)
            else torch.full((), float(o.normalizer), dtype=dtype, device=valid.device)
        )
    return share * inverse(count)


def check_tokens(
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_logp: Tensor | None,
    ref_logp: Tensor | None,
    cu_seqlens: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, int] | None:
    """:func:`sequence_index` of the tokens, after a look at shapes and at what the options need.

    Raises:
        ValueError: shapes that differ, or an option without the tensor that it needs.
    """
    given = (
        ("advantages", advantages),
        ("mask", mask),
        ("rollout_logp", rollout_logp),
        ("ref_logp", ref_logp),
    )
    for name, x in given:
        if x is not None and x.shape != old_logp.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, old_logp has {tuple(old_logp.shape)}")
    if options.beta != 0.0 and ref_logp is None:
        raise ValueError("beta != 0 needs ref_logp")
    seq = sequence_index(old_logp.shape, cu_seqlens, old_logp.device)
    if options.needs_sequences(weighted=rollout_logp is not None) and seq is None:
        raise ValueError(
            "this option works on sequences: give cu_seqlens with packed tokens, or [B, T] tensors"
        )
    return seq


def prepare(
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rollout_logp: Tensor | None,
    ref_logp: Tensor | None,
    cu_seqlens: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> Tokens:
    """Everything that does not depend on pi_theta, flattened to [N]; masked slots are replaced before any arithmetic."""
    seq = check_tokens(old_logp, advantages, mask, rollout_logp, ref_logp, cu_seqlens, options)
    wanted = mask.reshape(-1).to(torch.bool)
    valid = wanted & old_logp.reshape(-1).isfinite()
    if rollout_logp is not None:
        valid = valid & rollout_logp.reshape(-1).isfinite()

    def clean(x: Tensor) -> Tensor:
        return torch.where(valid, x.detach().reshape(-1), 0.0).to(dtype)

    old = clean(old_logp)
    w_log = None if rollout_logp is None else old - clean(rollout_logp)
    if w_log is None or options.is_mode == "none":
        w, cut = torch.ones_like(old), torch.zeros_like(valid)
    else:
        w, cut = _importance(w_log, valid, seq, options)
    return Tokens(
        valid,
        old,
        clean(advantages),
        None if ref_logp is None else clean(ref_logp),
        w,
        w_log,
        cut,
        _shares(valid, seq, options, dtype),
        seq[0] if seq is not None else None,
        seq[1] if seq is not None else 0,
        wanted.sum() - valid.sum(),
    )

"""Rows of logits of a language-model head, a chunk at a time: statistics forward, gradients back.

    z = logit_scale (h W^T + bias); z <- softcap tanh(z / softcap); columns from vocab_size on are absent; z <- z / temperature

Shapes: h [C, H], W [V, H], bias [V], logits [C, V]. Statistics are fp32 (fp64 for fp64 input). The products of the
backward pass take their operands in the input's dtype and accumulate in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muonrl_kernels.parallel import VocabShard

__all__ = ["Gradients", "Head", "RowStats", "chunks", "matmul", "statistics_dtype"]

_CPU_CHUNK = (1 << 20, 256, 8192)
"""Bytes of a chunk of logits and bounds on its rows: on a CPU it should stay in the cache between its passes."""
_GPU_CHUNK = (1 << 30, 2048, 8192)
"""The same where large products matter and memory is the limit."""


def statistics_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def chunks(rows: int, columns: int, chunk_rows: int | None, device: torch.device) -> list[slice]:
    """Slices of nearly equal size over rows: of at most `chunk_rows`, or of what suits fp32 logits [C, columns] on `device`.

    No rows give no chunk.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be >= 1, got {chunk_rows}")
    budget, fewest, most = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    largest = chunk_rows or min(most, max(fewest, budget // (4 * columns)))
    count = -(-rows // largest)
    size = -(-rows // max(1, count))
    return [slice(lo, min(lo + size, rows)) for lo in range(0, rows, max(1, size))]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result for 16-bit operands (never rounded to 16 bits on the way)."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@dataclass(frozen=True)
class RowStats:
    """Of C rows: log-probabilities and probabilities of all columns [C, V]; the target's log-probability, the entropy in
    nats and the logsumexp [C].
    """

    log_p: Tensor
    logp: Tensor
    entropy: Tensor
    lse: Tensor
    p: Tensor

    def take(self, index: Tensor, *, with_log_p: bool) -> RowStats:
        """The rows at `index`; `log_p` is only copied if the backward pass will read it."""
        log_p = self.log_p[index] if with_log_p else self.log_p[:0]
        return RowStats(log_p, self.logp[index], self.entropy[index], self.lse[index], self.p[index])


@dataclass(frozen=True)
class Head:
    """A head and what is done to its logits; `weight` and `bias` hold the columns of the vocabulary only.

    `columns` is the size of the vocabulary. With `shard` the weight is this rank's part of it, possibly none, and what
    the rows' statistics and the gradient of hidden need from the other ranks is reduced over them.
    """

    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    softcap: float | None
    logit_scale: float
    columns: int
    shard: VocabShard | None = None

    @staticmethod
    def make(
        weight: Tensor,
        bias: Tensor | None,
        temperature: float | Tensor,
        softcap: float | None,
        logit_scale: float,
        vocab_size: int | None,
        dtype: torch.dtype,
        shard: VocabShard | None = None,
    ) -> Head:
        """Check the arguments, leave the padding columns out and bring the weight to the dtype of hidden.

        Raises:
            ValueError: shapes that do not fit, a vocab_size outside 1..V, or a temperature or softcap that is not positive.
        """
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError("weight must be [V, H] and bias [V]")
        size = weight.shape[0] if vocab_size is None else vocab_size
        if shard is None and not 1 <= size <= weight.shape[0]:
            raise ValueError(f"vocab_size must lie in 1..{weight.shape[0]}, got {vocab_size}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap must be > 0, got {softcap}")
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        columns = size if shard is None else shard.columns
        size = size if shard is None else shard.kept(weight.shape[0])
        kept = None if bias is None else bias.detach()[:size]
        return Head(weight.detach()[:size].to(dtype), kept, temperature, softcap, logit_scale, columns, shard)

    def take(self, index: Tensor | slice) -> Head:
        """The head for a subset of the rows: only a temperature [N] differs by row."""
        t = self.temperature
        if not isinstance(t, Tensor) or t.ndim == 0:
            return self
        return replace(self, temperature=t[index])

    def chunks(self, rows: int, chunk_rows: int | None) -> list[slice]:
        """How to cut `rows` rows into chunks; see :func:`chunks`."""
        # Every rank of a shard must come to the same chunks: they differ in what they hold of the vocabulary.
        parts = 1 if self.shard is None else self.shard.group.size()
        return chunks(rows, -(-self.columns // parts), chunk_rows, self.weight.device)

    def _column_temperature(self, dtype: torch.dtype) -> float | Tensor:
        t = self.temperature
        return t.to(dtype).reshape(-1, 1) if isinstance(t, Tensor) else t

    def stats(self, h: Tensor, targets: Tensor) -> RowStats:
        """Statistics of the rows h [C, H] with targets [C] int64."""
        z = matmul(h, self.weight.mT)
        if self.bias is not None:
            z.add_(self.bias)
        if self.logit_scale != 1.0:
            z.mul_(self.logit_scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            z.div_(self._column_temperature(z.dtype))
        lse = torch.logsumexp(z, 1) if self.shard is None else self._whole_logsumexp(z, self.shard)
        log_p = z.sub_(lse.unsqueeze(1))
        if self.bias is not None:
            # A bias of -inf bans a token; keep 0 * log 0 out of the entropy.
            log_p.clamp_(min=-1e30)
        p = log_p.exp()
        entropy = -torch.bmm(p.unsqueeze(1), log_p.unsqueeze(2)).reshape(-1)
        if self.shard is None:
            return RowStats(log_p, log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, lse, p)
        rows, columns = self._own_targets(targets, self.shard, p.shape[1])
        logp = torch.zeros_like(entropy)
        logp[rows] = log_p[rows, columns]
        logp, entropy = self.shard.total_(torch.stack((logp, entropy))).unbind()
        return RowStats(log_p, logp, entropy, lse, p)

    @staticmethod
    def _whole_logsumexp(z: Tensor, shard: VocabShard) -> Tensor:
        """logsumexp [C] over all ranks' columns from this rank's z [C, V_local]."""
        largest = z.new_full(z.shape[:1], -torch.inf) if z.shape[1] == 0 else z.amax(1)
        shard.largest_(largest)
        total = shard.total_(z.sub(largest.unsqueeze(1)).exp_().sum(1))
        return largest + total.log()

    @staticmethod
    def _own_targets(targets: Tensor, shard: VocabShard, size: int) -> tuple[Tensor, Tensor]:
        """Rows whose target is among this rank's `size` columns, and its column there."""
        local = targets - shard.start
        rows = ((local >= 0) & (local < size)).nonzero().squeeze(1)
        return rows, local[rows]

    def logit_grad(
        self,
        s: RowStats,
        targets: Tensor,
        d_logp: Tensor,
        d_entropy: Tensor | None = None,
        d_lse: Tensor | None = None,
    ) -> Tensor:
        """Gradient [C, V] with respect to h W^T + bias, from gradients [C] of the row's outputs; overwrites `s.p`."""
        z_softcap = None
        if self.softcap is not None:
            temperature = self._column_temperature(s.log_p.dtype)
            z_softcap = (s.log_p + s.lse.unsqueeze(1)).mul_(temperature).div_(self.softcap)
        minus = -d_logp if d_lse is None else d_lse - d_logp
        if d_entropy is None:
            dz = s.p.mul_(minus.unsqueeze(1))
        else:
            slope = (minus - d_entropy * s.entropy).unsqueeze(1) - d_entropy.unsqueeze(1) * s.log_p
            dz = s.p.mul_(slope)
        if self.shard is None:
            dz.scatter_add_(1, targets.unsqueeze(1), d_logp.unsqueeze(1))
        else:
            rows, columns = self._own_targets(targets, self.shard, dz.shape[1])
            dz[rows, columns] += d_logp[rows]
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            dz.div_(self._column_temperature(dz.dtype))
        if z_softcap is not None:
            dz.mul_(1.0 - z_softcap.square_())
        return dz if self.logit_scale == 1.0 else dz.mul_(self.logit_scale)


@dataclass
class Gradients:
    """Gradients of hidden [N, H], weight [V, H] and bias [V], filled a chunk at a time; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def zeros(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> Gradients:
        """Accumulators in the statistics' dtype; hidden's rows are written once and keep its own dtype."""
        kind = statistics_dtype(hidden)
        return Gradients(
            torch.zeros_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None,
            torch.zeros(weight.shape, dtype=kind, device=weight.device) if wanted[1] else None,
            torch.zeros(bias.shape, dtype=kind, device=bias.device)
            if wanted[2] and bias is not None
            else None,
        )

    def add(self, head: Head, dz: Tensor, h: Tensor, rows: Tensor) -> None:
        """Add one chunk: dz [C, V] at rows h [C, H], which are `rows` [C] of hidden."""
        size = dz.shape[1]
        if self.bias is not None:
            self.bias[:size] += dz.sum(0)
        operand = dz.to(h.dtype)
        if self.hidden is not None:
            d_hidden = matmul(operand, head.weight)
            if head.shard is not None:
                head.shard.total_(d_hidden)
            self.hidden[rows] = d_hidden.to(self.hidden.dtype)
        if self.weight is not None:
            if h.dtype == self.weight.dtype:
                self.weight[:size].addmm_(operand.mT, h)
            else:
                self.weight[:size] += matmul(operand.mT, h)

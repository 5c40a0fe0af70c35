"""Rows of logits of a language-model head, a chunk at a time: statistics forward, gradients back.

    z = logit_scale (h W^T + bias); z <- softcap tanh(z / softcap); columns from vocab_size on are absent; z <- z / temperature

Shapes: h [C, H], W [V, H], bias [V], logits [C, V]. Statistics are fp32 (fp64 for fp64 input). The products of the
backward pass take their operands in the input's dtype and accumulate in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muonrl_kernels.parallel import VocabShard

__all__ = ["Gradients", "Head", "RowStats", "chunks", "matmul", "statistics_dtype"]

_CPU_CHUNK = (1 << 20, 128, 8192)
"""Bytes of a chunk of logits and bounds on its rows: on a CPU it should stay in the cache between its passes. Each chunk also
reads and writes the whole gradient of the weight, hence the lower bound, which decides where the vocabulary is large."""
_GPU_CHUNK = (1 << 30, 2048, 8192)
"""The same where large products matter and memory is the limit."""
_BLOCK_BYTES = 1 << 20
_BLOCK_COLUMNS = 1024
"""Bytes, and fewest columns, of a block of logits whose passes follow each other in the cache of a CPU."""
_SELECTED_BYTES = 8 << 20
"""Rows of a larger buffer are moved in place instead of copied."""


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
    """Of C rows: the logits less each row's largest [C, V], in the one buffer that a chunk has, and the logarithm of the sum
    of their exponentials; the target's log-probability, the entropy in nats and the logsumexp of the logits [C].
    """

    z: Tensor
    log_sum: Tensor
    logp: Tensor
    entropy: Tensor
    lse: Tensor

    def take(self, index: Tensor) -> RowStats:
        """The rows at `index`, ascending; a large buffer is overwritten."""
        if self.z.numel() * self.z.itemsize <= _SELECTED_BYTES:
            z = self.z[index]
        else:
            z = self.z[: index.numel()]
            for to, row in enumerate(index.tolist()):
                if to != row:
                    z[to] = self.z[row]
        return RowStats(z, self.log_sum[index], self.logp[index], self.entropy[index], self.lse[index])


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

    def _row_temperature(self, dtype: torch.dtype) -> float | Tensor:
        t = self.temperature
        return t.to(dtype).reshape(-1) if isinstance(t, Tensor) else t

    def _column_temperature(self, dtype: torch.dtype) -> float | Tensor:
        t = self._row_temperature(dtype)
        return t.unsqueeze(1) if isinstance(t, Tensor) else t

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
        largest = z.new_full(z.shape[:1], -torch.inf) if z.shape[1] == 0 else z.amax(1)
        if self.shard is not None:
            self.shard.largest_(largest)
        sums = z.new_zeros(2, z.shape[0])
        for block in self._blocks(z):
            part = block.sub_(largest.unsqueeze(1))
            if self.bias is not None:
                part.clamp_(min=-1e30)  # a bias of -inf bans a token; keep 0 * inf out of the entropy
            e = part.exp()
            sums[0] += e.sum(1)
            sums[1] += torch.bmm(e.unsqueeze(1), part.unsqueeze(2)).reshape(-1)
        if self.shard is not None:
            self.shard.total_(sums)
        log_sum = sums[0].log()
        if self.shard is None:
            at_target = z.gather(1, targets.unsqueeze(1)).squeeze(1)
        else:
            rows, columns = self._own_targets(targets, self.shard, z.shape[1])
            at_target = torch.zeros_like(log_sum)
            at_target[rows] = z[rows, columns]
            self.shard.total_(at_target)
        return RowStats(z, log_sum, at_target - log_sum, log_sum - sums[1] / sums[0], largest + log_sum)

    @staticmethod
    def _blocks(z: Tensor) -> Iterator[Tensor]:
        """Blocks of columns of [C, V], small enough for their passes to stay in the cache, or the whole on a GPU."""
        width = z.shape[1]
        if z.device.type == "cpu":
            width = max(_BLOCK_COLUMNS, _BLOCK_BYTES // (z.itemsize * max(1, z.shape[0])))
        for lo in range(0, z.shape[1], max(1, width)):
            yield z[:, lo : lo + width]

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
        """Gradient [C, V] with respect to h W^T + bias, from gradients [C] of the row's outputs; overwrites `s.z`."""
        minus = (-d_logp if d_lse is None else d_lse - d_logp).unsqueeze(1)
        log_sum = s.log_sum.unsqueeze(1)
        temperature = self._column_temperature(s.z.dtype)
        scale = self.logit_scale / temperature
        for part in self._blocks(s.z):
            bend = None
            if self.softcap is not None:
                # The logits before temperature, over the softcap: the hyperbolic tangent itself.
                bend = (part + (s.lse - s.log_sum).unsqueeze(1)).mul_(temperature / self.softcap)
                bend = bend.square_().neg_().add_(1.0)
            part.sub_(log_sum)
            if d_entropy is None:
                part.exp_().mul_(minus * scale)
            else:
                slope = (minus - (d_entropy * s.entropy).unsqueeze(1)) - d_entropy.unsqueeze(1) * part
                part.exp_().mul_(slope.mul_(scale))
            if bend is not None:
                part.mul_(bend)
        return self._add_target(s, targets, d_logp, scale)

    def _add_target(self, s: RowStats, targets: Tensor, d_logp: Tensor, scale: float | Tensor) -> Tensor:
        """Add what the target's own column gets beyond its probability."""
        own = d_logp * (scale.squeeze(1) if isinstance(scale, Tensor) and scale.ndim else scale)
        if self.softcap is not None:
            at_target = (s.logp + s.lse) * self._row_temperature(s.z.dtype) / self.softcap
            own = own * (1.0 - at_target.square())
        if self.shard is None:
            return s.z.scatter_add_(1, targets.unsqueeze(1), own.unsqueeze(1))
        rows, columns = self._own_targets(targets, self.shard, s.z.shape[1])
        s.z[rows, columns] += own[rows]
        return s.z


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

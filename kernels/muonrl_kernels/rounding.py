"""Stochastic rounding to half precision with noise that is a function of its place and of the step, never of a generator.

The noise of element i of stream s at step t under a seed is a hash of (seed, s, t, i), the same on every device and for
any order of work, so a run that resumes from a checkpoint repeats it to the bit. With 32-bit arithmetic that wraps:

    (h1, h2) = the halves of splitmix64(seed xor splitmix64(s));  k1 = mix(t xor h1);  k2 = mix(t xor h2)
    x = i xor k1;  x ^= x >> 16;  x *= 0x7feb352d;  x ^= k2;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16

where mix is the same without k2 (the constants are Chris Wellons's "lowbias32").
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["noise_key_halves", "noise_key_table", "noise_keys", "rounding_noise", "store_rounded"]

_FIRST: Final = 0x7FEB352D
_SECOND: Final = 0x846CA68B - 2**32
_BLOCK: Final = 1 << 20
"""Elements rounded at a time, so that the noise takes a bounded amount of memory."""
_FP16_MANTISSA: Final = 11
_FP16_SMALLEST: Final = -24


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def _signed(x: int) -> int:
    """The low 32 bits as a signed integer."""
    return (x + 2**31) % 2**32 - 2**31


def _fold(x: Tensor, bits: int) -> Tensor:
    """x ^= x >> bits, in place, with a logical shift of an int32 tensor."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << 32 - bits) - 1))


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    _fold(x, 16).mul_(_FIRST)
    if key is not None:
        x.bitwise_xor_(key)
    return _fold(_fold(x, 15).mul_(_SECOND), 16)


def noise_key_halves(seed: int, stream: int) -> tuple[int, int]:
    """(h1, h2) of a stream, as signed 32-bit integers."""
    halves = _splitmix64(seed ^ _splitmix64(stream))
    return _signed(halves >> 32), _signed(halves)


def noise_keys(seed: int, stream: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """The keys (k1, k2) of a stream at a step: 0-d int32 tensors where `step` (0-d, any dtype) is."""
    count = step.to(torch.int32)
    first, second = noise_key_halves(seed, stream)
    return _mix(count ^ first), _mix(count ^ second)


def noise_key_table(halves: Tensor, steps: Tensor) -> Tensor:
    """The keys of many streams at once: int32 [streams, 2] from halves int32 [streams, 2] and steps [streams]."""
    return _mix(steps.to(torch.int32)[:, None] ^ halves)


def rounding_noise(keys: tuple[Tensor, Tensor], start: int, stop: int, device: torch.device) -> Tensor:
    """32 random bits for each of the elements start..stop of a stream: int32 [stop - start]."""
    x = torch.arange(stop - start, dtype=torch.int32, device=device).add_(_signed(start))
    return _mix(x.bitwise_xor_(keys[0]), keys[1])


def store_rounded(target: Tensor, exact: Tensor, keys: tuple[Tensor, Tensor]) -> None:
    """Write fp32 values to a bf16 or fp16 matrix, each rounded up or down so that its expectation is exact.

    Args:
        target: [rows, columns], bf16 or fp16; elements are numbered row by row.
        exact: [rows, columns], fp32; overwritten.
        keys: of :func:`noise_keys`.
    """
    columns = target.shape[1]
    rows = max(1, _BLOCK // max(1, columns))
    for lo in range(0, target.shape[0], rows):
        place, values = target[lo : lo + rows], exact[lo : lo + rows]
        start = lo * columns
        noise = rounding_noise(keys, start, start + values.numel(), values.device).reshape(values.shape)
        place.copy_((_to_bf16 if target.dtype == torch.bfloat16 else _to_fp16)(values, noise))


def _to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """bf16 is the upper half of fp32: add noise below it, then cut."""
    bits = values.contiguous().view(torch.int32)
    return bits.add_(noise.bitwise_and_(0xFFFF)).bitwise_and_(-0x10000).view(torch.float32)


def _to_fp16(values: Tensor, noise: Tensor) -> Tensor:
    """Count in units of the last place, which stop shrinking at the subnormal numbers, and floor after adding noise."""
    unit = (torch.frexp(values).exponent - _FP16_MANTISSA).clamp_(min=_FP16_SMALLEST)
    counted = torch.ldexp(values, -unit).add_(noise.bitwise_and_(0x1FFF) * 2.0**-13)
    return torch.ldexp(counted.floor_(), unit)

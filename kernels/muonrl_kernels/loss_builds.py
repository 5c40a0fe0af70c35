"""The kernels of the policy losses as they are launched, for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from muonrl_kernels.linear_triton import TILES, gradient_tile
from muonrl_kernels.loss_gemm import combine_tiles, tile_gradient, tile_statistics
from muonrl_kernels.loss_kernels import reduce_terms, token_loss
from muonrl_kernels.loss_rows import logit_gradient, logprob_rows, loss_rows
from muonrl_kernels.loss_triton import BLOCK, ROWS, WARPS
from muonrl_kernels.tuning import Tile, Tuning

__all__ = ["loss_builds"]

_SCALARS: Final = (
    "temperature",
    "scale",
    "softcap",
    "low",
    "high",
    "dual",
    "is_low",
    "is_high",
    "beta",
    "entropy_coef",
    "limit",
)
_TYPES: Final[dict[str, str]] = {
    **dict.fromkeys(_SCALARS, "fp32"),
    **dict.fromkeys(
        (
            "count", "programs", "first", "vocabulary", "pitch", "out_pitch", "temperature_stride", "rows", "width",
            "tiles",
        ),
        "i32",
    ),
    **dict.fromkeys(("mask_ptr", "cut_ptr"), "*u8"),
    **dict.fromkeys(("index_ptr", "target_ptr", "valid_count_ptr"), "*i64"),
    **dict.fromkeys(
        (
            "logp_ptr", "old_ptr", "advantage_ptr", "rollout_ptr", "ref_ptr", "entropy_ptr", "w_ptr", "w_log_ptr",
            "share_ptr", "unit_ptr", "d_logp_ptr", "d_entropy_ptr", "d_lse_ptr", "partial_ptr", "normalizer_ptr",
            "loss_ptr", "scale_ptr", "tile_ptr", "slope_ptr", "lse_ptr", "z_ptr", "bias_ptr", "temperature_ptr",
        ),
        "*fp32",
    ),
}  # fmt: skip

_PREPARED: Final = ("w_ptr", "w_log_ptr", "cut_ptr", "share_ptr")
_Make = Callable[..., Any]


def _tokens(make: _Make) -> Iterator[Any]:
    """The elementwise loss: raw tokens with all that can be given, prepared tokens, and the sum over programs."""
    rest = {"num_warps": WARPS, "num_stages": 1, "matrix": False, "tma": False}
    raw = {**dict.fromkeys(_PREPARED), "BLOCK": BLOCK, "IS_MODE": "tis"}
    plain = {**raw, **dict.fromkeys(("ref_ptr", "entropy_ptr", "d_entropy_ptr")), "KL": "none"}
    yield make("policy_loss ppo", token_loss, _TYPES, {**plain, "LOSS_TYPE": "ppo"}, **rest)
    yield make("policy_loss cispo", token_loss, _TYPES, {**plain, "LOSS_TYPE": "cispo"}, **rest)
    whole = {**raw, "LOSS_TYPE": "ppo", "KL": "k3"}
    yield make("policy_loss ppo, kl, entropy", token_loss, _TYPES, whole, **rest)
    prepared = {"rollout_ptr": None, "BLOCK": BLOCK, "IS_MODE": "none", "LOSS_TYPE": "ppo", "KL": "k3"}
    yield make("policy_loss prepared", token_loss, _TYPES, prepared, **rest)
    types = {**_TYPES, "out_ptr": "*fp32"}
    yield make("policy_loss reduce", reduce_terms, types, {"PREPARED": False, "ROWS": ROWS}, **rest)


def _rows(make: _Make, tuning: Tuning) -> Iterator[Any]:
    """The row pass: statistics, gradients from given slopes, and the whole loss."""
    rest = {"num_warps": tuning.row_warps, "num_stages": 1, "matrix": False, "tma": False}
    bare = {"bias_ptr": None, "temperature_ptr": None, "SOFTCAP": False, "BLOCK": tuning.row_block}
    full = {"SOFTCAP": True, "BLOCK": tuning.row_block}
    half = {**_TYPES, "out_ptr": "*bf16"}
    yield make("logprob_rows", logprob_rows, _TYPES, bare, **rest)
    yield make("logprob_rows softcap, bias", logprob_rows, _TYPES, full, **rest)
    yield make("logit_gradient bf16", logit_gradient, half, bare, **rest)
    loss = {**bare, "ref_ptr": None, "LOSS_TYPE": "ppo", "KL": "none", "WITH_ENTROPY": False}
    yield make("loss_rows bf16", loss_rows, half, loss, **rest)
    yield make("loss_rows fp32", loss_rows, {**_TYPES, "out_ptr": "*fp32"}, loss, **rest)
    whole = {**full, "LOSS_TYPE": "ppo", "KL": "k3", "WITH_ENTROPY": True}
    yield make("loss_rows bf16 softcap, bias, kl, entropy", loss_rows, half, whole, **rest)


def _tile(tile: Tile, tuning: Tuning) -> tuple[dict[str, Any], dict[str, str], dict[str, Any], str]:
    """Constants, types, launch parameters and the name of a tile's shape."""
    source = f"tensordesc<bf16[{tile.block},{tile.block_k}]>" if tuning.tma else "*bf16"
    types = {**_TYPES, **dict.fromkeys(("h_source", "w_source"), source), "out_ptr": "*bf16"}
    rest = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "matrix": True, "tma": tuning.tma}
    constants = {"BLOCK": tile.block, "BLOCK_K": tile.block_k, "USE_TMA": tuning.tma}
    return constants, types, rest, f"{tile.block}x{tile.block}x{tile.block_k} bf16"


def _tiles(make: _Make, tuning: Tuning) -> Iterator[Any]:
    """The product that reduces its logits in registers, and what puts its tiles together."""
    for variant in ("", " softcap, bias"):
        constants, types, rest, shape = _tile(tuning.logits, tuning)
        given = {} if variant else {"bias_ptr": None, "temperature_ptr": None}
        constants.update(given, SOFTCAP=bool(variant))
        yield make(f"logit_tiles {shape}{variant}", tile_statistics, types, constants, **rest)
    for variant in ("", " bias, entropy", " softcap, bias, entropy"):
        softcap = "softcap" in variant
        constants, types, rest, shape = _tile(gradient_tile(tuning, softcap), tuning)
        given = {} if variant else {"bias_ptr": None, "temperature_ptr": None}
        constants.update(given, SOFTCAP=softcap, WITH_ENTROPY=bool(variant))
        yield make(f"logit_tiles_gradient {shape}{variant}", tile_gradient, types, constants, **rest)
    plain = {"num_warps": 4, "num_stages": 1, "matrix": False, "tma": False}
    joined = {"ref_ptr": None, "LOSS_TYPE": "ppo", "KL": "none", "TILES": TILES, "BLOCK": tuning.logits.block}
    yield make("combine_tiles", combine_tiles, _TYPES, joined, **plain)


def loss_builds(tuning: Tuning, make: _Make) -> Iterator[Any]:
    """Every loss kernel in the shapes in which it is launched; `make` makes a Build of one."""
    yield from _tokens(make)
    yield from _rows(make, tuning)
    yield from _tiles(make, tuning)

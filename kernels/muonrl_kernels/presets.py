"""Conventions of other systems, by name: what ``preset="trl"`` and ``preset="verl"`` put in place of the defaults.

Each entry was read from the named release of the system and says so. Nothing of the system is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

__all__ = ["Preset", "presets"]

Names = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Preset:
    """One system's conventions.

    Attributes:
        source, version: the package and the release that the entry was read from.
        options: the options that differ from :class:`LossOptions`' defaults, or that the system fixes.
        names: for an option, what each of the system's own names stands for: ``names["agg"]["token-mean"]``.
        cispo_raw_bound: with loss_type "cispo" clip_high is the bound on the ratio itself, and there is no lower bound.
    """

    source: str
    version: str
    options: Mapping[str, Any]
    names: Names
    cispo_raw_bound: bool


def _frozen(table: dict[str, dict[str, dict[str, Any]]]) -> Names:
    return MappingProxyType(
        {
            field: MappingProxyType({name: MappingProxyType(meaning) for name, meaning in names.items()})
            for field, names in table.items()
        }
    )


_TRL: Final = Preset(
    source="trl, trainer/grpo_config.py and grpo_trainer.py",
    version="1.16.0",
    options=MappingProxyType(
        {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": None,
            "is_mode": "icepop",
            "is_level": "sequence",
            "is_high": 3.0,
            "is_low": None,
            "agg": "token_mean",
            "beta": 0.0,
            "kl": "k3",
            "kl_weighted": True,
            "entropy_coef": 0.0,
        }
    ),
    names=_frozen(
        {
            "loss_type": {
                "dapo": {"loss_type": "ppo", "agg": "token_mean"},
                "bnpo": {"loss_type": "ppo", "agg": "token_mean"},
                "grpo": {"loss_type": "ppo", "agg": "sequence_mean"},
                "dr_grpo": {"loss_type": "ppo", "agg": "constant"},
                "luspo": {"loss_type": "gspo", "agg": "constant"},
            },
            "is_mode": {
                "token_truncate": {"is_mode": "tis", "is_level": "token"},
                "token_mask": {"is_mode": "icepop", "is_level": "token"},
                "sequence_truncate": {"is_mode": "tis", "is_level": "sequence"},
                "sequence_mask": {"is_mode": "icepop", "is_level": "sequence"},
            },
        }
    ),
    cispo_raw_bound=True,
)

_VERL: Final = Preset(
    source="verl, trainer/ppo/core_algos.py, rollout_corr_helper.py and workers/config/actor.py",
    version="0.9.1",
    options=MappingProxyType(
        {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 3.0,
            "is_mode": "tis",
            "is_level": "sequence",
            "is_high": 2.0,
            "is_low": None,
            "agg": "token_mean",
            "beta": 0.0,
            "kl": "k3",
            "entropy_coef": 0.0,
            "log_ratio_clamp": 20.0,
        }
    ),
    names=_frozen(
        {
            "loss_type": {
                "vanilla": {"loss_type": "ppo"},
                "gspo": {"loss_type": "gspo", "dual_clip": None, "log_ratio_clamp": 10.0},
                "cispo": {"loss_type": "cispo", "dual_clip": None},
            },
            "agg": {
                "token-mean": {"agg": "token_mean"},
                "token-sum": {"agg": "constant", "normalizer": 1.0},
                "seq-mean-token-mean": {"agg": "sequence_mean"},
                "seq-mean-token-sum": {"agg": "constant"},
                "seq-mean-token-sum-norm": {"agg": "constant"},
            },
            "kl": {
                "kl": {"kl": "k1"},
                "mse": {"kl": "k2"},
                "low_var_kl": {"kl": "k3"},
            },
        }
    ),
    cispo_raw_bound=False,
)

presets: Final[Mapping[str, Preset]] = MappingProxyType({"trl": _TRL, "verl": _VERL})
"""The presets by name; immutable."""

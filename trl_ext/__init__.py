"""Alignment training on top of TRL: the same class names, more options.

`from trl_ext import GRPOConfig, GRPOTrainer` replaces `from trl import GRPOConfig, GRPOTrainer`; nothing else changes.
Every other public name of TRL is available here too, so that one import line serves. Imports are lazy.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("trl-ext")
except PackageNotFoundError:
    __version__ = "0.0.0+source"

_OURS = {
    "DPOConfig": "trl_ext.trainers.dpo_config",
    "DPOTrainer": "trl_ext.trainers.dpo_trainer",
    "GRPOConfig": "trl_ext.trainers.grpo_config",
    "GRPOTrainer": "trl_ext.trainers.grpo_trainer",
    "RLOOConfig": "trl_ext.trainers.rloo_config",
    "RLOOTrainer": "trl_ext.trainers.rloo_trainer",
    "RewardConfig": "trl_ext.trainers.reward_config",
    "RewardEnsemble": "trl_ext.rewards.ensemble",
    "RewardGate": "trl_ext.trainers.reward_gate",
    "RewardModelScorer": "trl_ext.rewards.model_scorer",
    "RewardTrainer": "trl_ext.trainers.reward_trainer",
}

# TRL has modules of these names too.
_SUBMODULES = {
    path.stem
    for path in Path(__file__).parent.iterdir()
    if (path.suffix == ".py" or path.is_dir()) and not path.name.startswith("_")
}

if TYPE_CHECKING:
    from trl import *  # noqa: F403

    from trl_ext.rewards.ensemble import RewardEnsemble
    from trl_ext.rewards.model_scorer import RewardModelScorer
    from trl_ext.trainers.dpo_config import DPOConfig
    from trl_ext.trainers.dpo_trainer import DPOTrainer
    from trl_ext.trainers.grpo_config import GRPOConfig
    from trl_ext.trainers.grpo_trainer import GRPOTrainer
    from trl_ext.trainers.reward_config import RewardConfig
    from trl_ext.trainers.reward_gate import RewardGate
    from trl_ext.trainers.reward_trainer import RewardTrainer
    from trl_ext.trainers.rloo_config import RLOOConfig
    from trl_ext.trainers.rloo_trainer import RLOOTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardEnsemble",
    "RewardGate",
    "RewardModelScorer",
    "RewardTrainer",
]


def __getattr__(name: str) -> Any:
    if name in _OURS:
        value = getattr(importlib.import_module(_OURS[name]), name)
    elif name in _SUBMODULES:
        return importlib.import_module(f"trl_ext.{name}")
    elif name.startswith("_"):
        raise AttributeError(f"module 'trl_ext' has no attribute {name!r}")
    else:
        trl = importlib.import_module("trl")
        try:
            value = getattr(trl, name)
        except AttributeError:
            raise AttributeError(f"Neither trl_ext nor trl {trl.__version__} has an attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OURS, *importlib.import_module("trl").__dir__()})

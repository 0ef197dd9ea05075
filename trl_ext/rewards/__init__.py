"""Reward functions for any TRL trainer that takes `reward_funcs`; those of `trl.rewards` are here too.

Importing this package loads no optional package.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "SandboxedReward": "sandbox",
    "answer_reward": "answers",
    "completion_text": "text",
    "gated": "gating",
    "group_diversity": "gating",
    "instruction_reward": "instructions",
    "keyword_rules": "rules",
    "length_reward": "length",
    "length_window": "length",
    "math_reward": "verifiers",
    "reasoning_gym_reward": "verifiers",
    "repetition_penalty": "rules",
    "soft_length_window": "rules",
    "tone_reward": "tone",
}

# Lowest and highest value of each reward, to put rewards of different scales on one 0..1 axis in reports.
REWARD_RANGES: dict[str, tuple[float, float]] = {
    "answer_reward": (0.0, 1.0),
    "instruction_reward": (0.0, 1.0),
    "length_reward": (0.0, 100.0),
    "tone_reward": (-1.0, 1.0),
}


def load_reward(name: str) -> Any:
    """The reward function called `name` (a key of `REWARD_RANGES`); ValueError lists the names that exist."""
    if name not in REWARD_RANGES:
        raise ValueError(f"unknown reward {name!r}; known: {', '.join(sorted(REWARD_RANGES))}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("trl.rewards"), name)
    except AttributeError:
        raise AttributeError(f"neither {__name__} nor trl.rewards has an attribute {name!r}") from None

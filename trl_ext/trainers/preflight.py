"""Checks of a trainer's arguments that need no model: they run before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trl_ext.trainers.reward_shaping import DIVERSITY_NAME, resolve_gates
from trl_ext.trainers.rollout_config import RolloutOptions

_NO_TRAINABLE = (
    "The model has no trainable parameter, so training would change nothing. A PEFT adapter is frozen unless it is "
    "loaded with PeftModel.from_pretrained(..., is_trainable=True); otherwise pass a peft_config."
)


def check_arguments(given: Mapping[str, Any], options: RolloutOptions, names: Sequence[str]) -> None:
    """Refuse what cannot work, from the arguments of a rollout trainer.

    Raises:
        ValueError: naming the argument and the fix.
    """
    _check_weights(getattr(given.get("args"), "reward_weights", None), names, given)
    _check_pareto(given.get("args"))
    _check_reward_models(given.get("reward_funcs"))
    if isinstance(given.get("model"), torch.nn.Module):
        check_peft_trainable(given["model"], given.get("peft_config"))
    if options.diversity_coef != 0.0:
        _check_diversity(given, names)
        names = [*names, DIVERSITY_NAME]
    if given.get("environment_factory") is None:
        resolve_gates(options.reward_gates, names)


def _check_weights(weights: Sequence[float] | None, names: Sequence[str], given: Mapping[str, Any]) -> None:
    if weights is None or given.get("environment_factory") is not None:
        return
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(names)} reward function(s) {list(names)}. Give one "
            "weight per function, in that order."
        )


def _check_pareto(config: Any) -> None:
    if getattr(config, "multi_objective_aggregation", None) != "pareto" or config.reward_weights is None:
        return
    sizes = {abs(weight) for weight in config.reward_weights if weight != 0}
    if len(sizes) != 1:
        raise ValueError(
            f"reward_weights={config.reward_weights} has no effect with multi_objective_aggregation='pareto' beyond "
            "sign and zero: fronts know only the order of each reward. Use weights of one size (0 leaves a reward out, "
            "-1 makes it a cost), or multi_objective_aggregation='gdpo'."
        )


def _check_reward_models(reward_funcs: Any) -> None:
    for func in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        labels = getattr(getattr(func, "config", None), "num_labels", 1)
        if isinstance(func, torch.nn.Module) and labels != 1:
            raise ValueError(
                f"Reward model {type(func).__name__} has num_labels={labels}, of which only the first would be used. "
                "Load it with num_labels=1, or wrap it in a function that returns one reward per completion."
            )


def _check_diversity(given: Mapping[str, Any], names: Sequence[str]) -> None:
    if any(given.get(name) for name in ("tools", "environment_factory", "rollout_func")):
        raise ValueError(
            "diversity_coef compares completions token by token, and tool output would count as the model's own "
            "text. Set diversity_coef=0.0 with tools, environments or a rollout_func."
        )
    if DIVERSITY_NAME in names:
        raise ValueError(f"A reward function is named {DIVERSITY_NAME!r}, the name of the added reward. Rename it.")


def check_peft_trainable(model: torch.nn.Module, peft_config: Any) -> None:
    """Refuse a ready PEFT model whose adapter is frozen, before the reference adapter is copied from it."""
    if peft_config is None and hasattr(model, "peft_config"):
        check_trainable(model)


def check_trainable(model: Any) -> None:
    """Raise `ValueError` when no parameter requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(_NO_TRAINABLE)

"""The options that GRPO and RLOO share, and the checks that refuse bad combinations before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_ext.trainers.reward_gate import RewardGate

ESTIMATORS = ("k1", "k2", "k3")
PLACEMENTS = ("loss", "reward")
CONTROLLERS = ("fixed", "proportional", "doubling")
SCHEDULES = ("linear", "cosine")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum", "gdpo", "pareto")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RolloutOptions:
    r"""Options added to TRL's `GRPOConfig` and `RLOOConfig`. Every default is TRL's behaviour, bit for bit.

    Formulas, papers and health numbers of each option are in the README's table.

    KL to the reference (needs `beta` != 0):
        kl_estimator (`str`, *optional*): "k1", "k2" or "k3"; unset = TRL's own code. In the loss: k2 is the reverse-KL
            gradient on-policy, k3 the forward one, k1 alone has none and is refused; with `use_bias_correction_kl`
            (ratio pi/pi_old per token) k1 and k3 are the reverse-KL gradient, k2 is refused. In the reward, k1 gives
            the full sequence-level reverse-KL gradient; k2 and k3 are biased there. Metric `kl`: the estimator in use.
        kl_placement (`str`): "loss" or "reward". GRPO's default is "loss", RLOO's is "reward". In GRPO's reward it is
            token-level return-to-go: A_t = A - beta * sum_{s>=t} kl_s.
        kl_max_log_ratio (`float`, *optional*): clamps |log pi/pi_ref| before the exponential of k3.
        kl_controller (`str`): "fixed", "proportional" (Ziegler et al. 2019) or "doubling" (PPO-Penalty): moves `beta`
            towards `kl_target`. Metric `kl_coef`. "doubling" acts after every optimiser step, while a policy answers
            over many: the mean KL comes near the target, beta itself swings. Prefer "proportional".
        kl_target (`float`, *optional*): nats per token, of the estimator in use. kl_horizon (`float`): sequences
            over which a 20% error moves beta by e^0.2; the default 10,000 (Ziegler et al.) suits long runs, a run of a
            few hundred steps needs about 5 to 10 steps' worth of sequences.
        beta_min, beta_max (`float`): bounds of the moving `beta`.

    KL to the policy that sampled (needs samples that are used more than once):
        policy_kl_coef (`float`): coefficient of KL(old || new) in the loss (Schulman et al. 2017, section 4). Metrics
            `policy_kl`, `policy_kl_coef`.
        policy_kl_controller, policy_kl_target, policy_kl_horizon, policy_kl_coef_min, policy_kl_coef_max: as above.
        kl_early_stop (`float`, *optional*): nats per token; once the mean policy KL of an optimiser step passes it, no
            parameter changes until the next generation. Metric `kl_early_stop/skipped` (fraction of steps).

    Rewards:
        multi_objective_aggregation (`str`): TRL's "sum_then_normalize" and "normalize_then_sum", and "gdpo" (Liu et
            al. 2026, tie-safe) and "pareto" (non-dominated fronts). Metrics `gdpo/<reward>/tie_fraction`,
            `gdpo/<reward>/share`, `gdpo/frac_zero_signal`.
        reward_gates (list, *optional*): list of {gate, threshold, gated, floor}, applied in order before any
            normalisation. Metrics `gates/<gate>/pass_rate`, `gates/<reward>/mean_before`.
        diversity_coef (`float`): weight of an added reward `group_diversity` = 1 - mean pairwise n-gram Jaccard.
        diversity_ngram (`int`), diversity_cap (`float`, in (0, 1]): n, and the largest value paid.
        diversity_min_reward (`float`, *optional*): pay it only where the weighted sum of the other rewards is larger.
        skip_zero_signal_groups (`bool`): groups whose completions are all worth the same contribute neither policy
            nor KL term. Metric `groups/zero_signal_skipped` (count per generation batch).

    Entropy bonus:
        entropy_coef_final (`float`, *optional*): value of `entropy_coef` at the end of the run.
        entropy_coef_schedule (`str`): "linear" or "cosine".
    """

    kl_estimator: str | None = _option(None, "KL estimator: k1, k2 or k3. Unset = TRL's own code.")
    kl_placement: str = _option("loss", "Where the KL to the reference enters: loss or reward.")
    kl_max_log_ratio: float | None = _option(None, "Clamp of the log-ratio before the exponential of k3.")
    kl_controller: str = _option("fixed", "How beta moves: fixed, proportional or doubling.")
    kl_target: float | None = _option(None, "Target KL in nats per token of the estimator in use.")
    kl_horizon: float = _option(10_000.0, "Horizon of the proportional controller, in sequences.")
    beta_min: float = _option(1e-4, "Smallest beta the controller may reach (> 0).")
    beta_max: float = _option(1.0, "Largest beta the controller may reach.")
    policy_kl_coef: float = _option(0.0, "Coefficient of KL(old||new) in the loss (PPO-Penalty).")
    policy_kl_controller: str = _option("fixed", "How policy_kl_coef moves: fixed, proportional or doubling.")
    policy_kl_target: float | None = _option(None, "Target of the policy KL, nats per token.")
    policy_kl_horizon: float = _option(10_000.0, "Horizon of its proportional controller, in sequences.")
    policy_kl_coef_min: float = _option(1e-4, "Smallest policy_kl_coef the controller may reach (> 0).")
    policy_kl_coef_max: float = _option(100.0, "Largest policy_kl_coef the controller may reach.")
    kl_early_stop: float | None = _option(
        None, "Mean policy KL (nats per token) past which no parameter changes until the next generation."
    )
    multi_objective_aggregation: str = _option(
        "sum_then_normalize", "sum_then_normalize, normalize_then_sum, gdpo or pareto."
    )
    # A plain `field`: ruff takes RewardGate, a dict, for a mutable default.
    reward_gates: list[RewardGate] | None = field(
        default=None,
        metadata={"help": "Gates applied before any normalisation: JSON mappings {gate, threshold, gated, floor}."},
    )
    diversity_coef: float = _option(0.0, "Weight of the added reward group_diversity.")
    diversity_ngram: int = _option(3, "n of the n-grams of group_diversity.")
    diversity_cap: float = _option(1.0, "Largest group_diversity paid, in (0, 1].")
    diversity_min_reward: float | None = _option(
        None, "Pay group_diversity only where the weighted sum of the other rewards is larger than this."
    )
    skip_zero_signal_groups: bool = _option(False, "Groups without signal contribute neither policy nor KL term.")
    entropy_coef_final: float | None = _option(None, "entropy_coef at the end of the run.")
    entropy_coef_schedule: str = _option("linear", "Shape of the entropy schedule: linear or cosine.")

    def check_options(self) -> None:
        """Refuse bad values and combinations; called once TRL has resolved its own fields.

        Raises:
            ValueError: naming the field, the value and the fix.
        """
        if self.reward_gates is not None:
            if not isinstance(self.reward_gates, (list, tuple)):
                raise ValueError(f"reward_gates must be a list of gates, got {self.reward_gates!r}.")
            self.reward_gates = [RewardGate(gate) for gate in self.reward_gates]
        _check_choices(self)
        _check_finite(self)
        _check_kl(self)
        _check_controllers(self)
        _check_policy_kl(self)
        _check_rewards(self)
        _check_entropy(self)


def _check_choices(config: Any) -> None:
    choices = {
        "kl_placement": PLACEMENTS,
        "kl_controller": CONTROLLERS,
        "policy_kl_controller": CONTROLLERS,
        "multi_objective_aggregation": AGGREGATIONS,
        "entropy_coef_schedule": SCHEDULES,
    }
    if config.kl_estimator is not None:
        choices["kl_estimator"] = ESTIMATORS
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)!r} is unknown. Use one of {list(allowed)}.")


def _check_kl(config: Any) -> None:
    default_placement = type(config).kl_placement
    if config.kl_estimator is None:
        set_without = {
            "kl_max_log_ratio": config.kl_max_log_ratio is not None,
            "kl_placement": config.kl_placement != default_placement,
            "kl_controller": config.kl_controller != "fixed",
            "kl_target": config.kl_target is not None,
        }
        for name, is_set in set_without.items():
            if is_set:
                raise ValueError(
                    f"{name}={getattr(config, name)!r} has no effect without kl_estimator. Set kl_estimator to "
                    f"'{config.trl_estimator}', the one TRL uses here, or to another."
                )
        return
    if config.beta == 0.0:
        raise ValueError(
            f"kl_estimator={config.kl_estimator!r} has no effect with beta=0.0. Set beta to a positive coefficient "
            "(0.01 to 0.1 are common), or leave kl_estimator unset."
        )
    if config.beta < 0.0:
        raise ValueError(f"beta={config.beta} would push the policy away from the reference. Set beta > 0.")
    _check_estimator_placement(config)
    if config.kl_max_log_ratio is not None:
        if config.kl_estimator != "k3":
            raise ValueError(
                f"kl_max_log_ratio={config.kl_max_log_ratio} clamps the exponential of k3 and has no effect on "
                f"{config.kl_estimator}. Remove it, or set kl_estimator='k3'."
            )
        if not config.kl_max_log_ratio > 0 or not math.isfinite(config.kl_max_log_ratio):
            raise ValueError(f"kl_max_log_ratio={config.kl_max_log_ratio} must be positive and finite, e.g. 10.")


def _check_estimator_placement(config: Any) -> None:
    corrected = config.use_bias_correction_kl
    if config.kl_placement == "reward":
        return  # the correction (on by default in GRPO) is of the loss term only; old log-probabilities are used here
    if config.kl_estimator == "k1" and not corrected:
        raise ValueError(
            "kl_estimator='k1' in the loss has an expected gradient of exactly 0: it regularises nothing. Set "
            "kl_placement='reward', or use_bias_correction_kl=True, or kl_estimator='k2'."
        )
    if config.kl_estimator == "k2" and corrected:
        raise ValueError(
            "use_bias_correction_kl=True with kl_estimator='k2' gives the gradient of E[k2], not of the KL. Set "
            "use_bias_correction_kl=False, or kl_estimator='k3'."
        )


def _check_controllers(config: Any) -> None:
    groups = (
        ("kl_controller", "kl_target", "kl_horizon", "beta", "beta_min", "beta_max"),
        (
            "policy_kl_controller",
            "policy_kl_target",
            "policy_kl_horizon",
            "policy_kl_coef",
            "policy_kl_coef_min",
            "policy_kl_coef_max",
        ),
    )
    for rule, target, horizon, coef, lower, upper in groups:
        if getattr(config, rule) == "fixed":
            if getattr(config, target) is not None:
                raise ValueError(
                    f"{target}={getattr(config, target)} has no effect with {rule}='fixed'. Set {rule} to "
                    f"'proportional' or 'doubling', or remove {target}."
                )
            unused = (horizon, lower, upper)
            _check_unused(config, unused, f"{rule}='fixed'", f"Set {rule} to 'proportional' or 'doubling'")
            continue
        if getattr(config, rule) == "doubling":
            _check_unused(config, (horizon,), f"{rule}='doubling'", f"Set {rule} to 'proportional'")
        value = getattr(config, target)
        if value is None or not value > 0 or not math.isfinite(value):
            raise ValueError(f"{rule}={getattr(config, rule)!r} needs {target} > 0 (nats per token), got {value}.")
        if not getattr(config, horizon) > 0:
            raise ValueError(f"{horizon}={getattr(config, horizon)} must be a positive number of sequences.")
        if not 0 < getattr(config, lower) <= getattr(config, coef) <= getattr(config, upper):
            raise ValueError(
                f"0 < {lower} <= {coef} <= {upper} is needed with {rule}={getattr(config, rule)!r}, got "
                f"{getattr(config, lower)}, {getattr(config, coef)}, {getattr(config, upper)}."
            )


def _check_finite(config: Any) -> None:
    names = ("beta", "policy_kl_coef", "kl_early_stop", "entropy_coef_final", "diversity_coef", "diversity_min_reward")
    for name in names:
        value = getattr(config, name)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite.")


def _check_unused(config: Any, names: Sequence[str], because: str, fix: str) -> None:
    """Refuse fields moved away from their default where nothing reads them."""
    for name in names:
        if getattr(config, name) != getattr(RolloutOptions, name):
            raise ValueError(f"{name}={getattr(config, name)} has no effect with {because}. {fix}, or leave {name}.")


def _check_policy_kl(config: Any) -> None:
    if config.policy_kl_coef < 0:
        raise ValueError(f"policy_kl_coef={config.policy_kl_coef} would reward leaving the old policy. Set it >= 0.")
    if config.kl_early_stop is not None and not config.kl_early_stop > 0:
        raise ValueError(
            f"kl_early_stop={config.kl_early_stop} must be positive (nats per token), e.g. 0.02, or unset."
        )
    asked = {"policy_kl_coef": config.policy_kl_coef > 0, "kl_early_stop": config.kl_early_stop is not None}
    for name, is_set in asked.items():
        if is_set and config.samples_are_used_once():
            raise ValueError(
                f"{name}={getattr(config, name)} has no effect: every completion is used once, by the policy that "
                "sampled it, so the policy KL is exactly 0. Set num_iterations >= 2, or steps_per_generation larger "
                "than gradient_accumulation_steps."
            )
    generate_every = (config.steps_per_generation or 1) * config.num_iterations
    if config.kl_early_stop is not None and generate_every % config.gradient_accumulation_steps:
        raise ValueError(
            f"kl_early_stop={config.kl_early_stop} needs optimiser steps that do not straddle two generations, but "
            f"steps_per_generation * num_iterations = {generate_every} is not a multiple of "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}. Make it one."
        )


def _check_rewards(config: Any) -> None:
    if config.diversity_coef < 0:
        raise ValueError(f"diversity_coef={config.diversity_coef} would pay for repeating siblings. Set it >= 0.")
    if config.diversity_ngram < 1:
        raise ValueError(f"diversity_ngram={config.diversity_ngram} must be at least 1.")
    if not 0 < config.diversity_cap <= 1:
        raise ValueError(f"diversity_cap={config.diversity_cap} must lie in (0, 1].")
    if config.diversity_coef == 0.0:
        unused = ("diversity_ngram", "diversity_cap")
        _check_unused(config, unused, "diversity_coef=0.0", "Set diversity_coef > 0")
    if config.diversity_min_reward is not None and config.diversity_coef == 0.0:
        raise ValueError("diversity_min_reward has no effect with diversity_coef=0.0. Set diversity_coef > 0.")
    if config.skip_zero_signal_groups and config.beta != 0.0 and config.kl_estimator is None:
        raise ValueError(
            "skip_zero_signal_groups=True must leave groups out of the KL term, which is TRL's own code while "
            f"kl_estimator is unset. Set kl_estimator='{config.trl_estimator}' (the one TRL uses), or beta=0.0."
        )


def _check_entropy(config: Any) -> None:
    if config.entropy_coef_final is None:
        if config.entropy_coef_schedule != "linear":
            raise ValueError(
                f"entropy_coef_schedule={config.entropy_coef_schedule!r} has no effect without entropy_coef_final. "
                "Set entropy_coef_final."
            )
        return
    if getattr(config, "use_adaptive_entropy", False):
        raise ValueError(
            f"entropy_coef_final={config.entropy_coef_final} and use_adaptive_entropy=True both control entropy_coef. "
            "Set use_adaptive_entropy=False, or remove entropy_coef_final."
        )

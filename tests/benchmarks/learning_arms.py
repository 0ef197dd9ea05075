"""What `learning` trains: the rewards, the arms of each comparison, and one run of one arm with one seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Reward = Callable[..., list[float]]

# Width of the noise that keeps the large reward from running out of variance: a tenth of its range.
NOISE = 10.0
VOCABULARY = 1024
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "activation_checkpointing": False,
}


def _small(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Share of tokens with an even id, 0 to 1."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def _halves(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Share of tokens with an even id // 2, 0 to 1: independent of `_small`, and not paid by the end-of-turn token."""
    return [sum(token // 2 % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def reward_functions(names: Sequence[str], seed: int) -> list[Reward]:
    """The named reward functions; their names are those of TRL's metrics."""
    noise = random.Random(seed)

    def small(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return _small(completion_ids)

    def halves(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return _halves(completion_ids)

    def large(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [100.0 * share for share in _halves(completion_ids)]

    def large_noisy(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [100.0 * share + noise.gauss(0.0, NOISE) for share in _halves(completion_ids)]

    known = {function.__name__: function for function in (small, halves, large, large_noisy)}
    return [known[name] for name in names]


@dataclass(frozen=True)
class Arm:
    """One setting of one comparison.

    Attributes:
        group: arms of one group differ in the option under test only.
        name: of the setting, unique in its group.
        trainer: "GRPO" or "RLOO".
        rewards: names for `reward_functions`.
        options: fields of the config.
        metrics: of TRL's log, kept step by step.
        target: `kl_target`, where the comparison has one; kept here because arms without a controller have one to miss.
    """

    group: str
    name: str
    trainer: str
    rewards: tuple[str, ...]
    options: dict[str, Any] = field(hash=False)
    metrics: tuple[str, ...]
    target: float | None = None


@dataclass
class Run:
    """One arm trained with one seed: `curves` maps each metric to its values, one per step."""

    arm: Arm
    seed: int
    seconds: float
    curves: dict[str, list[float]] = field(default_factory=dict)


def gdpo_arms() -> list[Arm]:
    """Two rewards, 1 : 100, summed by each rule; with a large reward that can be satisfied, and with a noisy one."""
    arms = []
    for large in ("large", "large_noisy"):
        for rule in ("sum_then_normalize", "normalize_then_sum", "gdpo"):
            metrics = ["rewards/small/mean", f"rewards/{large}/mean", "entropy"]
            if rule == "gdpo":
                metrics += ["gdpo/small/share", f"gdpo/{large}/share"]
            options = {"multi_objective_aggregation": rule}
            arms.append(Arm(large, rule, "GRPO", ("small", large), options, tuple(metrics)))
    return arms


def kl_arms() -> list[Arm]:
    """The same starting beta, left alone or moved by a controller towards one of two targets."""
    metrics = ("kl", "kl_coef", "rewards/halves/mean")
    shared: dict[str, Any] = {"kl_estimator": "k3", "beta": 0.2}
    # 32 sequences a step: an error of 20 % or more moves beta by a factor e^(0.2 * 32 / 120) = 1.05 a step. The lower
    # bound limits how far beta falls while the policy is still new, and so how far the KL shoots over the target later.
    moving: dict[str, Any] = shared | {"beta_min": 0.05, "beta_max": 10.0}
    rules: dict[str, dict[str, Any]] = {"proportional": {"kl_horizon": 120.0}, "doubling": {}}
    arms = [Arm("all", "fixed", "GRPO", ("halves",), shared, metrics)]
    for target in (0.1, 0.4):
        for rule, own in rules.items():
            options = moving | own | {"kl_controller": rule, "kl_target": target}
            arms.append(Arm("all", f"{rule} {target}", "GRPO", ("halves",), options, metrics, target))
    return arms


def entropy_arms() -> list[Arm]:
    """The bonus off, on, and scheduled to zero, for both trainers."""
    settings: dict[str, dict[str, Any]] = {
        "off": {},
        "on": {"entropy_coef": 0.1},
        "to zero": {"entropy_coef": 0.1, "entropy_coef_final": 0.0},
    }
    metrics = ("entropy", "rewards/halves/mean")
    no_kl = {"beta": 0.0}  # RLOO's default of 0.05 would hold the entropy up by itself
    return [
        Arm(trainer, name, trainer, ("halves",), no_kl | options, metrics)
        for trainer in ("GRPO", "RLOO")
        for name, options in settings.items()
    ]


@dataclass(frozen=True)
class Comparison:
    """A question: its arms and the number of optimiser steps that shows the answer."""

    arms: Callable[[], list[Arm]]
    steps: int


COMPARISONS = {
    "gdpo": Comparison(gdpo_arms, 120),
    "kl": Comparison(kl_arms, 200),
    "entropy": Comparison(entropy_arms, 120),
}


def build_models(folder: Path, seeds: Sequence[int]) -> None:
    """A random model of its own for each seed, made before the workers start so that none writes twice."""
    from trl_ext.models.tiny import build_tiny_model

    for seed in seeds:
        build_tiny_model(folder / f"model{seed}", vocab_size=VOCABULARY, seed=seed, num_layers=1)


def train(arm: Arm, seed: int, steps: int, folder: Path) -> Run:
    """Train one arm; the seed draws the weights, the order of the prompts, the samples and the noise."""
    from transformers import PrinterCallback

    import trl_ext
    from tests.trainers.harness import base_config, prompts

    settings = base_config(folder / "output", max_steps=steps, seed=seed, **(COMMON | arm.options))
    trainer = getattr(trl_ext, f"{arm.trainer}Trainer")(
        str(folder / f"model{seed}"),
        reward_functions(arm.rewards, seed),
        args=getattr(trl_ext, f"{arm.trainer}Config")(**settings),
        train_dataset=prompts(),
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    run = Run(arm, seed, time.perf_counter() - start)
    for metric in arm.metrics:
        # Five digits: the file is for plots, and stays small.
        run.curves[metric] = [float(f"{entry[metric]:.5g}") for entry in trainer.state.log_history if metric in entry]
        if len(run.curves[metric]) != steps:
            raise RuntimeError(f"{arm.name}: {metric!r} was logged {len(run.curves[metric])} times in {steps} steps")
    return run


def quiet_worker() -> None:
    """Set up a worker process: one thread, no progress bars, no warnings about deprecated names in the libraries."""
    import logging
    import warnings

    import datasets
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)

"""Trains with fixed completions under any number of processes and writes what each rank saw; run by torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tests.trainers.harness import base_config, characters, prompts, spaces, text_of
from trl_ext import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def first_token(completions: list[Any], **_: Any) -> list[float]:
    """Some completions fail the gate on it."""
    return [float(len(text_of(completion)) % 3) for completion in completions]


GRPO = {
    "multi_objective_aggregation": "gdpo",
    "diversity_coef": 0.5,
    "reward_gates": [{"gate": "first_token", "threshold": 1.0}],
    "skip_zero_signal_groups": True,
    "beta": 0.2,
    "kl_estimator": "k2",
    "use_bias_correction_kl": False,
    "kl_controller": "proportional",
    "kl_target": 0.001,
    "kl_horizon": 20.0,
    "num_iterations": 2,
    "policy_kl_coef": 0.5,
    "policy_kl_controller": "doubling",
    "policy_kl_target": 1e-5,
    "entropy_coef": 0.01,
    "entropy_coef_final": 0.0,
}
# The normaliser of DAPO spans ranks, the others do not.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo_dapo": (GRPOTrainer, GRPOConfig, GRPO | {"loss_type": "dapo"}),
    "grpo_dr_grpo": (GRPOTrainer, GRPOConfig, GRPO | {"loss_type": "dr_grpo", "multi_objective_aggregation": "pareto"}),
    "grpo_k1_reward": (
        GRPOTrainer,
        GRPOConfig,
        {
            "loss_type": "dr_grpo",
            "beta": 0.2,
            "kl_estimator": "k1",
            "kl_placement": "reward",
            "multi_objective_aggregation": "gdpo",
            # From the third iteration on a stopped step skips even its forward.
            "num_iterations": 4,
            "max_steps": 8,
            "learning_rate": 0.5,
            "kl_early_stop": 1e-7,
        },
    ),
    "rloo": (
        RLOOTrainer,
        RLOOConfig,
        {
            "multi_objective_aggregation": "gdpo",
            "diversity_coef": 0.5,
            "beta": 0.2,
            "kl_estimator": "k3",
            "kl_controller": "proportional",
            "kl_target": 0.001,
            "kl_horizon": 20.0,
            "num_iterations": 2,
            "policy_kl_coef": 0.5,
            "entropy_coef": 0.0,
        },
    ),
}


SHARED: dict[str, Any] = {
    "num_generations": 8,
    "max_steps": 4,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
}


def fixed_completions(trainer: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Completions that depend only on the prompt and the row's index over all ranks; equal lengths in total."""
    start = trainer.accelerator.process_index * len(prompt_ids)
    rows = []
    for index, ids in enumerate(prompt_ids):
        seed = sum(ids) * 31 + start + index
        rows.append([40 + (seed * (k + 3) + k * k) % 900 for k in range(6)])
    return rows


def run(case: str, model: str, folder: Path, world: int) -> dict[str, Any]:
    trainer_class, config_class, settings = CASES[case]
    config = config_class(
        **base_config(
            folder,
            **SHARED
            # One group of eight, split over the ranks.
            | {"per_device_train_batch_size": 8 // world}
            | settings,
        )
    )
    trainer = trainer_class(model, [spaces, characters, first_token], args=config, train_dataset=prompts())
    if trainer_class is GRPOTrainer:
        trainer._generate_single_turn = lambda ids, *_, **__: (fixed_completions(trainer, ids), None)
    else:
        trainer._generate_single_turn = lambda ids, *_, **__: fixed_completions(trainer, ids)
    trainer.train()
    keys = ("kl", "kl_coef", "policy_kl", "policy_kl_coef", "kl_early_stop/skipped", "entropy_coef", "grad_norm")
    return {
        "processes": trainer.accelerator.num_processes,
        "beta": trainer.beta,
        "advantages": list(trainer._logs["advantages"]),
        "diversity": list(trainer._logs["rewards"].get("group_diversity", [])),
        "weights": [parameter.double().sum().item() for parameter in trainer.model.parameters()],
        "history": {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in keys},
    }


def main() -> None:
    model, folder, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    results = {case: run(case, model, folder / case, world) for case in CASES}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"world{world}_rank{rank}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        # Ranks that exit unevenly abort the process group.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains with the early stop and the KL terms under a DeepSpeed engine and writes what each rank saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import TrainerCallback

from tests.trainers.distributed_worker import fixed_completions
from tests.trainers.harness import base_config, characters, prompts, spaces
from trl_ext import GRPOConfig, GRPOTrainer


class Checksums(TrainerCallback):
    """Sums of all parameters at the end of every optimiser step: equal bits give equal sums."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.values.append([parameter.detach().double().sum().item() for parameter in model.parameters()])


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    checksums = Checksums()
    config = GRPOConfig(
        **base_config(
            folder / "run",
            num_generations=8,
            max_steps=6,
            num_iterations=3,
            kl_early_stop=1e-7,
            beta=0.1,
            kl_estimator="k3",
            multi_objective_aggregation="gdpo",
            diversity_coef=0.5,
            weight_decay=0.1,
            lr_scheduler_type="constant",
        )
    )
    trainer = GRPOTrainer(model, [spaces, characters], args=config, train_dataset=prompts(), callbacks=[checksums])
    trainer._generate_single_turn = lambda ids, *_, **__: (fixed_completions(trainer, ids), None)
    trainer.train()
    skipped = [e["kl_early_stop/skipped"] for e in trainer.state.log_history if "kl_early_stop/skipped" in e]
    result = {
        "engine": type(trainer.model_wrapped).__name__,
        "processes": trainer.accelerator.num_processes,
        "skipped": skipped,
        "checksums": checksums.values,
    }
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

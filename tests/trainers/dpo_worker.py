"""Trains DPO under any number of processes, or under a DeepSpeed engine, and writes what each rank saw.

Started by torchrun or `accelerate launch`; the pairs and settings here also serve the tests of one process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from datasets import Dataset

from tests.trainers.harness import cpu_settings
from trl_ext import DPOConfig, DPOTrainer

QUESTIONS = [
    "Name a colour:",
    "Name an animal:",
    "What boils?",
    "介绍一下你自己。",
    "Where is the station?",
    "Why?",
    "Who wrote it?",
    "How many apples?",
]
# One token apart, and the rejected answers say one token again and again: what lowers them lowers the chosen ones too.
# All of one length, so a mean over the tokens of a rank's part of a batch is the mean over all tokens.
CHOSEN = [f" the the the {letter} the the" for letter in "abcdefgh"]
REJECTED = [" the the the the the the"] * 8


def near_pairs(count: int = 8) -> Dataset:
    """Pairs that differ in one token and have answers of one length."""
    return Dataset.from_dict({"prompt": QUESTIONS[:count], "chosen": CHOSEN[:count], "rejected": REJECTED[:count]})


def settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """The settings of all trainer tests, at a constant learning rate."""
    return cpu_settings(folder, **({"lr_scheduler_type": "constant"} | overrides))


def plain_logps(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(2B,) log-probability of each answer from plain logits, independent of the fused head."""
    ids = batch["input_ids"]
    # The unpatched forward returns logits.
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.where(batch["completion_mask"][:, 1:].bool(), logps, torch.zeros_like(logps)).sum(-1)


def collated(trainer: Any, dataset: Any = None) -> dict[str, torch.Tensor]:
    """A whole prepared dataset, by default the training rows, as one batch."""
    dataset = trainer.train_dataset if dataset is None else dataset
    batch: dict[str, torch.Tensor] = trainer.data_collator([dataset[row] for row in range(len(dataset))])
    return batch


GUARDED = {"chosen_guard": "raise_lambda", "chosen_guard_floor": 0.01, "chosen_guard_patience": 2}
# SFT so weak that the whole gradient still lowers the chosen answers.
MIXED: dict[str, Any] = {
    "loss_type": ["dpop", "sft"],
    "loss_weights": [1.0, 0.01],
    "dpop_lambda": 0.1,
    "entropy_coef": 0.01,
    "project_chosen_gradient": True,
}
CASES: dict[str, dict[str, Any]] = {
    "projected": MIXED,
    "accumulated": MIXED | {"gradient_accumulation_steps": 2},
    # An evaluation set that does not divide into the ranks' batches.
    "guard_on_eval": {"loss_type": ["dpop"], "dpop_lambda": 0.01, "eval_strategy": "steps", "eval_steps": 1} | GUARDED,
    "guard_on_batches": {"loss_type": ["dpop"], "dpop_lambda": 0.01, "chosen_guard_decay": 0.5} | GUARDED,
    "ref_init": {"ref_init": "sft_on_chosen", "ref_init_learning_rate": 0.1},
}
SHARED: dict[str, Any] = {"optim": "sgd", "max_steps": 4}


def run(case: dict[str, Any], model: str, folder: Path, world: int, name: str) -> dict[str, Any]:
    """Train one case; the weights go to a file, the rest is returned."""
    values = settings(folder / "run", **(SHARED | {"per_device_train_batch_size": 4 // world} | case))
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**values, per_device_eval_batch_size=2),
        train_dataset=near_pairs(8),
        eval_dataset=near_pairs(5) if "eval_strategy" in case else None,
    )
    trainer.train()
    rank = trainer.accelerator.process_index
    model_weights = {
        key: tensor.cpu() for key, tensor in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()
    }
    torch.save(model_weights, folder / f"{name}_world{world}_rank{rank}.pt")
    guard = trainer._ext_guard
    return {
        "processes": trainer.accelerator.num_processes,
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer": type(getattr(trainer.optimizer.optimizer, "optimizer", trainer.optimizer.optimizer)).__name__,
        "zero_stage": getattr(trainer.args.deepspeed_plugin, "zero_stage", None),
        "guard": None if guard is None else guard.state_dict() | {"factor": trainer._ext_lambda_factor},
        "history": [entry for entry in trainer.state.log_history if "train_runtime" not in entry],
    }


def main() -> None:
    model, folder, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    cases: dict[str, dict[str, Any]] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else CASES
    results = {name: run(case, model, folder, world, name) for name, case in cases.items()}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"world{world}_rank{rank}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        # Ranks that exit unevenly abort the process group.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

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
    """Settings that train on a CPU in float32, the same for TRL's config and ours."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "seed": 7,
    }
    return values | overrides


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

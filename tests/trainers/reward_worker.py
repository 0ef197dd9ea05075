"""Trains reward models under any number of processes and writes what each rank saw; run by torchrun.

The pairs and settings here also serve the tests of one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.trainers.harness import cpu_settings
from trl_ext import RewardConfig, RewardTrainer

QUESTIONS = [
    "Name a colour.",
    "What is the capital of France?",
    "介绍一下你自己。",
    "Why?",
    "Say something kind to my grandmother, please.",
    "How many apples?",
    "法国的首都是哪里？",
    "Yes or no?",
]
CHOSEN = [
    "Blue, like the sea.",
    "Paris.",
    "我是一个人工智能。",
    "Because.",
    "You are wonderful!",
    "Five.",
    "巴黎。",
    "Yes.",
]
REJECTED = [
    "No",
    "The capital of France is a city with a river and many bridges",
    "不",
    "I do not know why",
    "Go away",
    "5 or 6",
    "我不知道，请你自己去查。",
    "Maybe, maybe not",
]
MARGINS = [0.5, 0.0, -1.0, 2.0, 0.25, 1.5, 0.0, -0.5]


def message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def pairs(text_format: str = "chat", count: int = 8, start: int = 0, margin: bool = False) -> Dataset:
    """Up to eight pairs of unlike lengths with an explicit prompt, as messages ("chat") or plain texts ("text")."""
    part = slice(start, start + count)
    columns: dict[str, list[Any]] = {"prompt": QUESTIONS[part], "chosen": CHOSEN[part], "rejected": REJECTED[part]}
    if text_format == "chat":
        for name, texts in columns.items():
            role = "user" if name == "prompt" else "assistant"
            columns[name] = [message(role, text) for text in texts]
    if margin:
        columns["margin"] = MARGINS[part]
    return Dataset.from_dict(columns)


def settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """The settings of all trainer tests, at a constant learning rate."""
    return cpu_settings(folder, **({"lr_scheduler_type": "constant"} | overrides))


def lora() -> LoraConfig:
    """An adapter on every linear layer with a trained score head."""
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS")


def make_reward_model(base: Path, folder: Path, labels: int = 1, seed: int = 0, **config: Any) -> Path:
    """A reward model on `base` with a random head large enough that scores of texts differ by about 1."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    model.score.weight.data = torch.randn(model.score.weight.shape, generator=generator) * 0.3
    model.config.update(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def one_by_one(model: Any, rows: Iterable[Sequence[int]]) -> torch.Tensor:
    """(M, N) scores by the plain forward of each row alone, without padding or mask."""
    model.eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([list(row)])).logits[0].float() for row in rows], dim=1)


def collated(trainer: Any, dataset: Any = None) -> dict[str, torch.Tensor]:
    """A whole prepared dataset, by default the training rows, as one batch."""
    dataset = trainer.train_dataset if dataset is None else dataset
    batch: dict[str, torch.Tensor] = trainer.data_collator([dataset[row] for row in range(len(dataset))])
    return batch


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder that a trainer saved."""
    name = "adapter_model.safetensors"
    weights: dict[str, torch.Tensor] = load_file(folder / (name if (folder / name).is_file() else "model.safetensors"))
    return weights


# Each: settings, whether the rows have margins, whether there is an adapter.
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "heads": ({"ensemble_size": 3, "center_rewards_coefficient": 0.01}, True, False),
    "heads_accumulated": ({"ensemble_size": 3, "gradient_accumulation_steps": 2, "max_steps": 2}, False, False),
    "heads_lora": ({"ensemble_size": 2}, False, True),
    "adapters": ({"ensemble_size": 2, "ensemble_kind": "adapters", "max_steps": 2}, False, True),
}
SHARED: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "max_steps": 4}


def run(case: str, model: str, folder: Path, world: int) -> dict[str, Any]:
    """Train one case; the weights go to files, the rest is returned."""
    overrides, margin, adapter = CASES[case]
    trainer = RewardTrainer(
        model,
        args=RewardConfig(**settings(folder, **SHARED | {"per_device_train_batch_size": 4 // world} | overrides)),
        train_dataset=pairs(margin=margin),
        eval_dataset=pairs(count=3),
        peft_config=lora() if adapter else None,
    )
    trainer.train()
    rank = trainer.accelerator.process_index
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    parts = sorted(folder.glob("member-*"))
    weights = {f"{part.name}/{name}": value for part in parts for name, value in stored(part).items()}
    if not parts:
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    torch.save(weights, folder.parent / f"{case}_world{world}_rank{rank}.pt")
    return {
        "processes": trainer.accelerator.num_processes,
        "engine": type(trainer.model_wrapped).__name__,
        "history": trainer.state.log_history,
        "mean": trainer._ext_card.mean,
        "std": trainer._ext_card.std,
    }


def main() -> None:
    model, folder, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    results = {case: run(case, model, folder / f"{case}_{world}", world) for case in CASES}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"world{world}_rank{rank}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        # Ranks that exit unevenly abort the process group.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

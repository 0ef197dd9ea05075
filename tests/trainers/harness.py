"""A tiny real model, prompts and rewards, and one way to train a few steps with any rollout trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

PROMPTS = [
    "Say a number",
    "What is 2 + 2?",
    "Name a colour",
    "介绍一下你自己",
    "Hello",
    "Write one word",
    "Why?",
    "Yes or no",
]


def prompts(conversational: bool = False) -> Dataset:
    """Eight prompts, standard or conversational."""
    if conversational:
        return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]})
    return Dataset.from_dict({"prompt": PROMPTS})


def text_of(completion: Any) -> str:
    """The text of a completion in either format."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def spaces(completions: list[Any], **_: Any) -> list[float]:
    """A reward of scale 1 that varies within groups."""
    return [float(text_of(completion).count("e")) for completion in completions]


def characters(completions: list[Any], **_: Any) -> list[float]:
    """A reward of scale 100 that varies within groups."""
    return [100.0 * len(text_of(completion)) for completion in completions]


def cpu_settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Settings that train on a CPU in float32, the same for TRL's configs and ours."""
    settings: dict[str, Any] = {
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
        "seed": 7,
    }
    return settings | overrides


def base_config(folder: Path, **overrides: Any) -> dict[str, Any]:
    """The same for trainers that generate."""
    return cpu_settings(folder, **({"num_generations": 4, "max_completion_length": 8} | overrides))


def lora() -> LoraConfig:
    """An adapter on every linear layer, with dropout off so that runs can be compared."""
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def train(
    trainer_class: Any,
    config: Any,
    model: Any,
    reward_funcs: list[Callable[..., Any]] | None = None,
    dataset: Dataset | None = None,
    resume: str | None = None,
    **arguments: Any,
) -> Any:
    """Build the trainer, train, return it."""
    trainer = trainer_class(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward_funcs or [spaces, characters],
        args=config,
        train_dataset=dataset if dataset is not None else prompts(),
        **arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The trained parameters, detached copies."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_bit_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Every parameter equal, bit for bit."""
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} of {len(first)} parameters differ, first: {different[0]}"


def history(trainer: Any, key: str) -> list[float]:
    """The logged values of one metric."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]

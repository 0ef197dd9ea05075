"""Batches and gradients of a trainer outside its loop, so that two losses can be compared on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trl_ext
from tests.trainers.harness import PROMPTS, base_config, characters, prompts, spaces


def make(
    method: str, model: Path, folder: Path, reward_funcs: list[Any] | None = None, **settings: Any
) -> trl_ext.GRPOTrainer | trl_ext.RLOOTrainer:
    """A trainer whose policy differs from its reference, ready to compute losses."""
    trainer_class, config_class = {
        "grpo": (trl_ext.GRPOTrainer, trl_ext.GRPOConfig),
        "rloo": (trl_ext.RLOOTrainer, trl_ext.RLOOConfig),
    }[method]
    trainer = trainer_class(
        model=str(model),
        reward_funcs=reward_funcs or [spaces, characters],
        args=config_class(**base_config(folder, **settings)),
        train_dataset=prompts(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    perturb(trainer.model, 0.05, seed=1)
    return trainer


def perturb(model: torch.nn.Module, scale: float, seed: int) -> None:
    """Move every parameter a little, reproducibly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def generation_batch(trainer: Any, mode: str = "train") -> list[dict[str, Any]]:
    """Raw rows of one generation batch (train) or one batch (eval)."""
    groups = trainer.args.steps_per_generation if mode == "train" else 1
    return [{"prompt": PROMPTS[i % len(PROMPTS)]} for i in range(groups) for _ in range(trainer.num_generations)]


def batch(trainer: Any, mode: str = "train") -> dict[str, Any]:
    """One scored micro-batch."""
    trainer.model.train(mode == "train")
    return trainer._prepare_inputs(generation_batch(trainer, mode))


def loss_and_gradient(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Value and flat gradient."""
    model.zero_grad()
    value = loss()
    value.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return value.item(), gradient.clone()


def relative_error(first: torch.Tensor, second: torch.Tensor) -> float:
    """Norm of the difference relative to the second."""
    return ((first - second).norm() / second.norm()).item()


def plain_logps(model: torch.nn.Module, inputs: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """(B, T) log-probabilities from plain logits, independent of the fused head; 0 under the mask."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    # The unpatched forward returns logits.
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / temperature
    width = inputs["completion_ids"].shape[1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -width:]
    return torch.where(inputs["completion_mask"].bool(), logps, torch.zeros_like(logps))

"""The entropy bonus has a gradient of the right sign, and its schedule ends where it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.harness import base_config, history, train
from tests.trainers.losses import batch, loss_and_gradient, make, relative_error
from trl_ext import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

CLASSES: dict[str, Any] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("coefficient", [0.1, -0.1])
@pytest.mark.parametrize("method", CLASSES)
def test_the_sign_of_the_coefficient_is_the_sign_of_the_change(
    method: str, coefficient: float, tiny_model: Path, tmp_path: Path
) -> None:
    """All advantages 0, beta 0, 5 SGD steps on one batch: +0.1 raises the mean entropy, -0.1 lowers it."""
    trainer = make(
        method,
        tiny_model,
        tmp_path,
        [constant],
        beta=0.0,
        entropy_coef=coefficient,
        **({"multi_objective_aggregation": "gdpo"}),
    )
    inputs = batch(trainer)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        trainer.compute_loss(trainer.model, inputs).backward()
        optimizer.step()
    trainer.compute_loss(trainer.model, inputs)
    entropies = trainer._metrics["train"]["entropy"]
    assert (entropies[-1] - entropies[0]) * coefficient > 0
    assert abs(entropies[-1] - entropies[0]) > 1e-4


def test_rloo_bonus_against_plain_logits(tiny_model: Path, tmp_path: Path) -> None:
    """-coef * mean over real tokens of -sum p log p."""
    trainer = make("rloo", tiny_model, tmp_path, [constant], beta=0.0, entropy_coef=0.3, normalize_advantages=False)
    inputs = batch(trainer)
    inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    inputs["completion_mask"][0, 2:] = 0

    def plain() -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        logits = logits[:, -inputs["completion_ids"].shape[1] :]
        logps = logits.log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        mask = inputs["completion_mask"]
        return -0.3 * (entropy * mask).sum() / mask.sum()

    value, ours = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    expected_value, expected = loss_and_gradient(trainer.model, plain)
    assert value == pytest.approx(expected_value, rel=1e-5)
    assert relative_error(ours, expected) < 1e-4


@pytest.mark.parametrize("method", CLASSES)
def test_a_schedule_to_zero_logs_the_zero(method: str, tiny_model: Path, tmp_path: Path) -> None:
    trainer_class, config_class = CLASSES[method]
    settings = base_config(tmp_path, max_steps=3, entropy_coef=0.1, entropy_coef_final=0.0)
    trainer = train(trainer_class, config_class(**settings), tiny_model)
    assert history(trainer, "entropy_coef") == pytest.approx([0.1, 0.05, 0.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("method", CLASSES)
def test_the_schedule_starts_and_ends_exactly(method: str, schedule: str, tiny_model: Path, tmp_path: Path) -> None:
    trainer_class, config_class = CLASSES[method]
    settings = base_config(
        tmp_path, max_steps=5, entropy_coef=0.0, entropy_coef_final=0.4, entropy_coef_schedule=schedule
    )
    trainer = train(trainer_class, config_class(**settings), tiny_model)
    quarter = {"linear": 0.1, "cosine": 0.4 - 0.4 * (1 + 2**-0.5) / 2}[schedule]
    expected = [0.0, quarter, 0.2, 0.4 - quarter, 0.4]
    assert history(trainer, "entropy_coef") == pytest.approx(expected)

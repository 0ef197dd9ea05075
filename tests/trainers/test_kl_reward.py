"""The KL in the reward: token-level return-to-go in GRPO, sequence-level in RLOO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trl

from tests.trainers.harness import base_config, history, train
from tests.trainers.losses import batch, loss_and_gradient, make, perturb, plain_logps, relative_error
from trl_ext import RLOOConfig, RLOOTrainer
from trl_ext.formulas.advantages import leave_one_out_advantages


def constant(completions: list[str], **_: object) -> list[float]:
    """No reward signal: what moves is the KL alone."""
    return [1.0] * len(completions)


def graded(completions: list[str], **_: object) -> list[float]:
    """0, 0.1, 0.2, ... whatever the text."""
    return [0.1 * index for index in range(len(completions))]


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_grpo_return_to_go_against_plain_logits(
    estimator: str, off_policy: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """Gradient = -mean over sequences of mean over tokens of ratio' * (A - beta * sum_{s>=t} kl_s).

    Catches a wrong direction of the cumulative sum, the current instead of the sampling policy in the KL, a
    differentiable KL, padding in the sum.
    """
    trainer = make(
        "grpo",
        tiny_model,
        tmp_path,
        reward_funcs=[graded],
        loss_type="grpo",
        beta=0.5,
        kl_estimator=estimator,
        kl_placement="reward",
        epsilon=0.9,
        epsilon_high=9.0,
        steps_per_generation=2 if off_policy else None,
    )
    inputs = batch(trainer)
    assert ("old_per_token_logps" in inputs) == off_policy
    mask = inputs["completion_mask"]
    mask[0, 4:] = 0
    old = plain_logps(trainer.model, inputs).detach()
    u = old - plain_logps(trainer.ref_model, inputs).detach()
    if off_policy:
        perturb(trainer.model, 0.01, seed=2)
    kl = {"k1": u, "k2": u.square() / 2, "k3": torch.exp(-u) - 1 + u}[estimator] * mask
    to_go = torch.stack([kl[:, t:].sum(1) for t in range(kl.shape[1])], dim=1)
    advantages = inputs["advantages"][:, None] - 0.5 * to_go

    def plain() -> torch.Tensor:
        ratio = torch.exp(plain_logps(trainer.model, inputs) - old)
        return -((ratio * advantages * mask).sum(-1) / mask.sum(-1)).mean()

    _, ours = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    _, expected = loss_and_gradient(trainer.model, plain)
    assert relative_error(ours, expected) < 1e-4
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx((kl.sum() / mask.sum()).item(), rel=1e-4)
    assert inputs["advantages"].dim() == 1, "the buffered batch must stay as it was for the next iteration"


def test_grpo_sequence_level_takes_the_whole_sequence(tiny_model: Path, tmp_path: Path) -> None:
    """With one ratio per sequence (GSPO) the advantage is A - beta * sum of the sequence's KL."""
    trainer = make(
        "grpo",
        tiny_model,
        tmp_path,
        reward_funcs=[graded],
        loss_type="grpo",
        beta=0.5,
        kl_estimator="k1",
        kl_placement="reward",
        importance_sampling_level="sequence",
    )
    inputs = batch(trainer)
    mask = inputs["completion_mask"]
    old = plain_logps(trainer.model, inputs).detach()
    kl = (old - plain_logps(trainer.ref_model, inputs).detach()) * mask
    advantages = inputs["advantages"] - 0.5 * kl.sum(1)

    def plain() -> torch.Tensor:
        mean_log_ratio = ((plain_logps(trainer.model, inputs) - old) * mask).sum(1) / mask.sum(1)
        return -(mean_log_ratio.exp() * advantages).mean()

    _, ours = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    _, expected = loss_and_gradient(trainer.model, plain)
    assert relative_error(ours, expected) < 1e-4


@pytest.mark.parametrize("rule", ["sum_then_normalize", "normalize_then_sum", "gdpo", "pareto"])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_the_kl_survives_every_aggregation(method: str, rule: str, tiny_model: Path, tmp_path: Path) -> None:
    """A KL that is added before a normalisation can vanish in it: gradients with beta 0.1 and 1 must differ."""
    gradients = []
    for beta in (0.1, 1.0):
        trainer = make(
            method,
            tiny_model,
            tmp_path,
            reward_funcs=[constant, constant],
            beta=beta,
            kl_estimator="k1",
            kl_placement="reward",
            multi_objective_aggregation=rule,
        )
        inputs = batch(trainer)
        gradients.append(loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))[1])  # noqa: B023
    assert gradients[0].norm() > 0
    assert relative_error(gradients[0], gradients[1]) > 0.5


def test_rloo_k1_in_reward_equals_trls_own(tiny_model: Path, tmp_path: Path) -> None:
    """The explicit default and TRL's built-in one train to the same numbers."""
    settings = {"beta": 0.3, "max_steps": 3, "optim": "sgd", "gradient_accumulation_steps": 2}
    for extra in ({}, {"normalize_advantages": True}, {"reward_clip_range": (0.0, 500.0)}):
        config = base_config(tmp_path, **settings, **extra)
        ours = train(RLOOTrainer, RLOOConfig(kl_estimator="k1", **config), tiny_model)
        theirs = train(trl.RLOOTrainer, trl.RLOOConfig(**config), tiny_model)
        for key in ("kl", "grad_norm", "reward", "frac_reward_zero_std"):
            assert history(ours, key) == pytest.approx(history(theirs, key), rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rloo_reward_by_hand(estimator: str, tiny_model: Path, tmp_path: Path) -> None:
    """advantage_i = s_i - mean of the others', s = reward - beta * sum over tokens of the estimator."""
    trainer = make("rloo", tiny_model, tmp_path, reward_funcs=[graded], beta=0.5, kl_estimator=estimator)
    inputs = batch(trainer)
    mask = inputs["completion_mask"]
    u = plain_logps(trainer.model, inputs).detach() - plain_logps(trainer.ref_model, inputs).detach()
    kl = {"k1": u, "k2": u.square() / 2, "k3": torch.exp(-u) - 1 + u}[estimator] * mask
    # The buffered batch is shuffled: sort by the reward, which the text does not influence.
    scores = torch.tensor(sorted_rewards(trainer, inputs)) - 0.5 * kl.sum(1)
    expected = leave_one_out_advantages(scores, 4)
    assert torch.allclose(inputs["advantages"], expected, atol=1e-4)
    assert trainer._metrics["train"]["kl"] == [pytest.approx((kl.sum() / mask.sum()).item(), rel=1e-4)]


def sorted_rewards(trainer: object, inputs: dict[str, torch.Tensor]) -> list[float]:
    """Rewards in the order of the shuffled batch, found by the logged completion texts."""
    texts = trainer.processing_class.batch_decode(inputs["completion_ids"], skip_special_tokens=True)  # type: ignore[attr-defined]
    logged = list(trainer._logs["completion"])  # type: ignore[attr-defined]
    rewards = list(trainer._logs["rewards"]["graded"])  # type: ignore[attr-defined]
    return [rewards[logged.index(text)] for text in texts]

"""Moving coefficients, the penalty on the old policy, and the early stop."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.trainers.harness import assert_bit_equal, base_config, history, train, weights
from tests.trainers.losses import batch, loss_and_gradient, make, perturb, plain_logps, relative_error
from trl_ext import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_ext.trainers.state import STATE_FILE

CLASSES: dict[str, Any] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("method", CLASSES)
def test_the_proportional_rule_follows_the_logged_kl(
    method: str, placement: str, tiny_model: Path, tmp_path: Path
) -> None:
    """beta_{t+1} = beta_t * exp(clip(kl_t / target - 1) * n / horizon), replayed by hand from the logs.

    Catches an update before the coefficient is used, one per micro-batch, a wrong n, the other estimator's KL.
    """
    trainer_class, config_class = CLASSES[method]
    settings = base_config(
        tmp_path,
        beta=0.2,
        kl_estimator="k3",
        kl_placement=placement,
        kl_controller="proportional",
        kl_target=0.01,
        kl_horizon=50.0,
        gradient_accumulation_steps=2,
        max_steps=4,
    )
    trainer = train(trainer_class, config_class(**settings), tiny_model)
    coefficients, kls = history(trainer, "kl_coef"), history(trainer, "kl")
    expected = 0.2
    for coefficient, kl in zip(coefficients, kls, strict=True):
        assert coefficient == pytest.approx(expected, rel=1e-3)
        # 2 micro-batches of 4 sequences a step; the logged mean of micro-batch means equals the clipped error here.
        expected *= math.exp(max(-0.2, min(0.2, kl / 0.01 - 1)) * 8 / 50)
    assert trainer.beta == pytest.approx(expected, rel=1e-3)
    assert coefficients[0] != coefficients[-1]


def test_beta_stays_in_its_bounds_and_trl_sees_it(tiny_model: Path, tmp_path: Path) -> None:
    settings = base_config(
        tmp_path, beta=0.2, kl_estimator="k2", use_bias_correction_kl=False, kl_controller="doubling", kl_target=1e9,
        beta_min=0.07, max_steps=4,
    )  # fmt: skip
    trainer = train(GRPOTrainer, GRPOConfig(**settings), tiny_model)
    assert history(trainer, "kl_coef") == pytest.approx([0.2, 0.1, 0.07, 0.07])
    assert trainer.beta == 0.07


@pytest.mark.parametrize("method", CLASSES)
def test_policy_kl_term_against_plain_logits(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """coef * KL(old || new) with the loss's own normaliser, on samples of the old policy."""
    settings: dict[str, Any] = {"loss_type": "grpo"} if method == "grpo" else {"beta": 0.0}
    reward_funcs = [lambda completions, **_: [0.1 * i for i in range(len(completions))]]
    with_term, without = (
        make(method, tiny_model, tmp_path, reward_funcs, policy_kl_coef=c, num_iterations=2, **settings)
        for c in (2.0, 0.0)
    )
    inputs = batch(with_term)
    old = plain_logps(with_term.model, inputs).detach()
    for trainer in (with_term, without):
        perturb(trainer.model, 0.02, seed=2)
    mask = inputs["completion_mask"]

    def plain() -> torch.Tensor:
        d = plain_logps(with_term.model, inputs) - old
        per_token = (torch.exp(d) - 1 - d) * mask
        sums = per_token.sum(-1)
        return 2.0 * ((sums / mask.sum(-1)) if method == "grpo" else sums).mean()

    _, ours = loss_and_gradient(with_term.model, lambda: with_term.compute_loss(with_term.model, inputs))
    _, bare = loss_and_gradient(without.model, lambda: without.compute_loss(without.model, inputs))
    _, expected = loss_and_gradient(with_term.model, plain)
    assert relative_error(ours - bare, expected) < 1e-3


class WeightsPerStep(TrainerCallback):
    """Copies of the weights at the end of every optimiser step."""

    def __init__(self) -> None:
        self.copies: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.copies.append({name: p.detach().clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("method", CLASSES)
def test_early_stop_freezes_until_the_next_generation(
    method: str, accumulation: int, tiny_model: Path, tmp_path: Path
) -> None:
    """4 iterations a generation; the first moves, a tiny limit stops the other three: weights bit-equal.

    Weight decay and momentum are on: a stop by zero gradients alone would still move the weights.
    """
    trainer_class, config_class = CLASSES[method]
    recorder = WeightsPerStep()
    settings = base_config(
        tmp_path,
        num_iterations=4,
        steps_per_generation=accumulation,
        gradient_accumulation_steps=accumulation,
        kl_early_stop=1e-9,
        max_steps=8,
        weight_decay=0.1,
        lr_scheduler_type="constant",
    )
    trainer = train(trainer_class, config_class(**settings), tiny_model, callbacks=[recorder])
    assert history(trainer, "kl_early_stop/skipped") == [0, 1, 1, 1, 0, 1, 1, 1]
    copies = recorder.copies
    for step in (1, 2, 3, 5, 6, 7):
        assert_bit_equal(copies[step], copies[step - 1])
    name = next(iter(copies[0]))
    assert not torch.equal(copies[3][name], copies[4][name]), "training goes on after the next generation"


class KeepsComputing(GRPOTrainer):
    """As under DeepSpeed: a stopped step still runs forward and backward, only its update is withheld."""

    def ext_update_is_skipped(self) -> bool:
        return False


def test_a_stopped_step_moves_no_coefficient(tiny_model: Path, tmp_path: Path) -> None:
    """The frozen batch shows the same KL again and again; each time the doubling rule would act once more."""
    settings = base_config(
        tmp_path, num_iterations=4, max_steps=4, kl_early_stop=1e-9, policy_kl_coef=1.0,
        policy_kl_controller="doubling", policy_kl_target=1e-7, beta=0.1, kl_estimator="k3",
        kl_controller="doubling", kl_target=1e-7,
    )  # fmt: skip
    computing = train(KeepsComputing, GRPOConfig(**settings), tiny_model)
    saving = train(GRPOTrainer, GRPOConfig(**settings), tiny_model)
    assert_bit_equal(weights(computing), weights(saving))
    assert computing.beta == saving.beta
    assert computing._ext_policy_kl.value == saving._ext_policy_kl.value
    assert history(computing, "kl_early_stop/skipped") == history(saving, "kl_early_stop/skipped") == [0, 1, 1, 1]


def test_training_twice_keeps_the_stop(tiny_model: Path, tmp_path: Path) -> None:
    """A second train() meets an optimiser that accelerate has wrapped already."""
    settings = base_config(tmp_path, num_iterations=2, max_steps=2, kl_early_stop=1e-9)
    trainer = train(GRPOTrainer, GRPOConfig(**settings), tiny_model)
    trainer.train()
    assert history(trainer, "kl_early_stop/skipped") == [0, 1]


def test_withheld_gradients_are_given_back(tiny_model: Path, tmp_path: Path) -> None:
    """DeepSpeed's offload keeps its gradient buffers and fails when the stop takes them away."""
    trainer = make("grpo", tiny_model, tmp_path, num_iterations=2, kl_early_stop=0.1)
    optimizer = trainer.create_optimizer()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    trainer._ext_stopped = True
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(parameter.grad is not None for parameter in parameters)
    trainer._ext_stopped = False
    optimizer.step()
    assert not torch.equal(parameters[0], before[0])


def test_an_infinite_policy_kl_stops_instead_of_failing(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make("grpo", tiny_model, tmp_path, num_iterations=2, kl_early_stop=0.1)
    inputs = dict(batch(trainer))
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] - 200.0
    trainer.compute_loss(trainer.model, inputs)
    assert trainer._ext_stopped


def test_an_optimizer_made_by_deepspeed_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    trainer = make("grpo", tiny_model, tmp_path, num_iterations=2, kl_early_stop=0.1)
    with pytest.raises(ValueError, match="Remove `optimizer`"):
        trainer.ext_after_create_optimizer(object())


def test_a_limit_never_reached_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    settings = base_config(tmp_path, num_iterations=2, max_steps=4)
    ours = train(GRPOTrainer, GRPOConfig(kl_early_stop=1e9, **settings), tiny_model)
    plain = train(GRPOTrainer, GRPOConfig(**settings), tiny_model)
    assert_bit_equal(weights(ours), weights(plain))
    assert history(ours, "kl_early_stop/skipped") == [0.0] * 4


@pytest.mark.parametrize("method", CLASSES)
def test_a_resumed_run_continues_the_same_curve(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """Interrupted at step 2 of 4 and resumed: coefficient, entropy schedule and policy-KL coefficient go on.

    Catches a controller that restarts from the config.
    """
    trainer_class, config_class = CLASSES[method]
    settings: dict[str, Any] = {
        "beta": 0.2,
        "kl_estimator": "k3",
        "kl_placement": "loss",
        "kl_controller": "doubling",
        "kl_target": 1e9,
        "num_iterations": 2,
        "policy_kl_coef": 1.0,
        "policy_kl_controller": "doubling",
        "policy_kl_target": 1e9,
        "entropy_coef": 0.1,
        "entropy_coef_final": 0.0,
        "max_steps": 4,
    }
    whole = train(trainer_class, config_class(**base_config(tmp_path / "whole", **settings)), tiny_model)
    saved = base_config(tmp_path / "cut", **(settings | {"save_strategy": "steps", "save_steps": 2}))
    train(trainer_class, config_class(**saved), tiny_model)
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    state = json.loads((checkpoint / STATE_FILE).read_text())
    assert state == {"kl_controller": {"beta": 0.05}, "policy_kl_controller": {"beta": 0.25}}
    resumed = train(trainer_class, config_class(**saved), tiny_model, resume=str(checkpoint))
    for key in ("kl_coef", "policy_kl_coef", "entropy_coef"):
        assert history(resumed, key) == pytest.approx(history(whole, key)), key
    assert resumed.beta == whole.beta


def test_a_checkpoint_without_state_warns_and_keeps_the_config(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = base_config(
        tmp_path, beta=0.2, kl_estimator="k3", kl_controller="doubling", kl_target=1e9, save_strategy="steps",
        save_steps=1, max_steps=2,
    )  # fmt: skip
    train(GRPOTrainer, GRPOConfig(**settings), tiny_model)
    checkpoint = tmp_path / "checkpoint-1"
    os.remove(checkpoint / STATE_FILE)
    with caplog.at_level("WARNING"):
        resumed = train(GRPOTrainer, GRPOConfig(**settings), tiny_model, resume=str(checkpoint))
    assert "no state of kl_controller" in caplog.text
    assert history(resumed, "kl_coef")[-1] == 0.2


def test_a_damaged_state_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    settings = base_config(
        tmp_path, beta=0.2, kl_estimator="k3", kl_controller="doubling", kl_target=1e9, save_strategy="steps",
        save_steps=1, max_steps=2,
    )  # fmt: skip
    train(GRPOTrainer, GRPOConfig(**settings), tiny_model)
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / STATE_FILE).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        train(GRPOTrainer, GRPOConfig(**settings), tiny_model, resume=str(checkpoint))

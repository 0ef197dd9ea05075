"""The KL in the loss: parity with TRL's own k3, plain-logits checks, masks, accumulation, overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from tests.trainers.harness import base_config, history, train
from tests.trainers.losses import batch, loss_and_gradient, make, perturb, plain_logps, relative_error
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.formulas.reduce import LOSS_TYPES


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("steps_per_generation", [1, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_k3_equals_trls_own(
    loss_type: str, accumulation: int, steps_per_generation: int, mode: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Same batch, both paths, loss and gradient. Catches a wrong normaliser, scale, mask or ratio of our term."""
    trainer = make(
        "grpo",
        tiny_model,
        tmp_path,
        loss_type=loss_type,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        beta=0.3,
        kl_estimator="k3",
    )
    inputs = batch(trainer, mode)
    perturb(trainer.model, 0.02, seed=2)  # the policy moves on: old log-probabilities matter where there are any
    ours, our_gradient = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    theirs, their_gradient = loss_and_gradient(
        trainer.model, lambda: trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    )
    trainer.beta = 0.0
    _, without = loss_and_gradient(trainer.model, lambda: trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert relative_error(our_gradient, their_gradient) < 2e-6
    assert relative_error(without, their_gradient) > 1e-3, "the KL term must matter for this test to mean anything"
    assert trainer._metrics[mode]["kl"][0] == pytest.approx(trainer._metrics[mode]["kl"][1], rel=1e-5)


def test_k3_trains_to_trls_weights(tiny_model: Path, tmp_path: Path) -> None:
    """End to end, with the loop's own accumulation: estimator k3 and TRL's own give the same run."""
    settings = {"beta": 0.2, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, "optim": "sgd"}
    ours = train(GRPOTrainer, GRPOConfig(**base_config(tmp_path, kl_estimator="k3", **settings)), tiny_model)
    theirs = train(trl.GRPOTrainer, trl.GRPOConfig(**base_config(tmp_path, **settings)), tiny_model)
    assert history(ours, "kl") == pytest.approx(history(theirs, "kl"), rel=1e-4, abs=1e-7)
    assert history(ours, "grad_norm") == pytest.approx(history(theirs, "grad_norm"), rel=1e-4)


def _plain_term(trainer: Any, inputs: dict[str, Any], reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """The KL term of loss_type "grpo" from plain logits: mean over sequences of token means, times beta."""
    logps = plain_logps(trainer.model, inputs)
    u = logps - reference
    ratio = torch.exp(logps - logps.detach())
    per_token = {"k1": ratio * u, "k2": u.square() / 2, "k3": ratio * (torch.exp(-u) - 1 + u)}[estimator]
    mask = inputs["completion_mask"]
    return trainer.beta * ((per_token * mask).sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_each_estimator_against_plain_logits(estimator: str, level: str, tiny_model: Path, tmp_path: Path) -> None:
    """Gradient of our term = loss with it - loss without it, against autograd through log_softmax.

    With importance_sampling_level="sequence" the expected value is the same: the KL weight stays per token.
    Catches the sequence weight on the KL (TRL 1.16 has it), a detached estimator, a sign.
    """
    trainer = make(
        "grpo",
        tiny_model,
        tmp_path,
        loss_type="grpo",
        importance_sampling_level=level,
        beta=0.5,
        kl_estimator=estimator,
        use_bias_correction_kl=estimator != "k2",
    )
    inputs = batch(trainer)
    reference = plain_logps(trainer.ref_model, inputs).detach()
    _, with_term = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    kl_metric = trainer._metrics["train"]["kl"][-1]
    _, plain = loss_and_gradient(trainer.model, lambda: _plain_term(trainer, inputs, reference, estimator))
    trainer.beta = 0.0
    _, without = loss_and_gradient(trainer.model, lambda: trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs))
    assert relative_error(with_term - without, plain) < 1e-4
    u = plain_logps(trainer.model, inputs).detach() - reference
    mask = inputs["completion_mask"]
    expected = {"k1": u, "k2": u.square() / 2, "k3": torch.exp(-u) - 1 + u}[estimator]
    assert kl_metric == pytest.approx(((expected * mask).sum() / mask.sum()).item(), rel=1e-4)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_padding_does_not_enter_the_kl(method: str, estimator: str, tiny_model: Path, tmp_path: Path) -> None:
    """Garbage token ids and reference values under mask 0 change neither loss nor gradient."""
    trainer = make(
        method,
        tiny_model,
        tmp_path,
        beta=0.5,
        kl_estimator=estimator,
        kl_placement="loss",
        use_bias_correction_kl=estimator != "k2",
    )
    inputs = batch(trainer)
    inputs["completion_mask"][0, 3:] = 0
    inputs["completion_mask"][1, 1:] = 0  # one token
    key = "ref_per_token_logps" if method == "grpo" else "ext_ref_per_token_logps"
    hidden = inputs["completion_mask"] == 0
    clean = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, dict(inputs)))
    dirty_inputs = dict(inputs)
    dirty_inputs[key] = inputs[key].masked_fill(hidden, 1e4)
    dirty_inputs["completion_ids"] = inputs["completion_ids"].masked_fill(hidden, 5)
    dirty = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, dirty_inputs))
    assert clean[0] == pytest.approx(dirty[0], rel=1e-6)
    assert relative_error(dirty[1], clean[1]) < 1e-6


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("option", ["kl", "policy_kl"])
def test_accumulation_does_not_change_the_update(option: str, loss_type: str, tiny_model: Path, tmp_path: Path) -> None:
    """One window of 4 micro-batches sums to the gradient of one batch of 4 groups. Catches a missing division."""
    settings: dict[str, Any] = {"loss_type": loss_type, "steps_per_generation": 8, "beta": 0.5}
    if option == "kl":
        settings |= {"kl_estimator": "k2", "use_bias_correction_kl": False}
    else:
        settings |= {"beta": 0.0, "policy_kl_coef": 3.0}
    trainer = make("grpo", tiny_model, tmp_path, gradient_accumulation_steps=4, **settings)
    batch(trainer)
    parts = [dict(part) for part in trainer._buffered_inputs[:4]]
    perturb(trainer.model, 0.02, seed=2)
    trainer.model.zero_grad()
    for part in parts:
        trainer.compute_loss(trainer.model, part).backward()
    accumulated = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    whole = {key: torch.cat([part[key] for part in parts]) if value.dim() else value for key, value in parts[0].items()}
    trainer.current_gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 2
    _, at_once = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, whole))
    assert relative_error(accumulated, at_once) < 1e-5


def test_an_overflowing_k3_stops_and_a_clamp_keeps_it_finite(tiny_model: Path, tmp_path: Path) -> None:
    """log pi/pi_ref = -200: exp overflows float32. Without a clamp the run stops; with one the gradient is finite."""
    for clamp in (None, 10.0):
        trainer = make("grpo", tiny_model, tmp_path, beta=0.1, kl_estimator="k3", kl_max_log_ratio=clamp)
        inputs = dict(batch(trainer))
        inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] + 200.0
        if clamp is None:
            with pytest.raises(FloatingPointError, match="kl_max_log_ratio"):
                trainer.compute_loss(trainer.model, inputs)
        else:
            _, gradient = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))  # noqa: B023
            assert gradient.isfinite().all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_rloo_loss_placement_against_plain_logits(
    estimator: str, accumulation: int, tiny_model: Path, tmp_path: Path
) -> None:
    """RLOO: mean over sequences of token sums, not divided by accumulation (the Trainer does that)."""
    trainer = make(
        "rloo",
        tiny_model,
        tmp_path,
        reward_funcs=[lambda completions, **_: [0.1 * i for i in range(len(completions))]],
        beta=0.5,
        kl_estimator=estimator,
        kl_placement="loss",
        gradient_accumulation_steps=accumulation,
    )
    inputs = batch(trainer)
    reference = plain_logps(trainer.ref_model, inputs).detach()

    def plain() -> torch.Tensor:
        u = plain_logps(trainer.model, inputs) - reference
        per_token = u.square() / 2 if estimator == "k2" else torch.exp(-u) - 1 + u
        return trainer.beta * (per_token * inputs["completion_mask"]).sum(-1).mean()

    _, with_term = loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    _, without = loss_and_gradient(trainer.model, lambda: trl.RLOOTrainer._compute_loss(trainer, trainer.model, inputs))
    _, expected = loss_and_gradient(trainer.model, plain)
    assert relative_error(with_term - without, expected) < 1e-4


def test_rloo_accumulation_gives_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Batch 8 x 1 and 4 x 2 take the same SGD step with the KL, entropy and policy terms on."""
    from trl_ext import RLOOConfig, RLOOTrainer

    norms = []
    for size, accumulation in ((8, 1), (4, 2)):
        settings = base_config(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            beta=0.5,
            kl_estimator="k2",
            kl_placement="loss",
            entropy_coef=0.1,
            max_steps=1,
            optim="sgd",
            shuffle_dataset=False,
        )
        norms.append(history(train(RLOOTrainer, RLOOConfig(**settings), tiny_model), "grad_norm")[0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)

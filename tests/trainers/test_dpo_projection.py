"""`project_chosen_gradient`: the update that reaches the optimiser, against plain logits and the formula."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainers.dpo_worker import CHOSEN, QUESTIONS, REJECTED, collated, near_pairs, plain_logps, settings
from tests.trainers.harness import assert_bit_equal, history, lora, weights
from tests.trainers.losses import perturb, relative_error
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.formulas.preference import project_update
from trl_ext.trainers.chosen_projection import ChosenProjection

SGD: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 1e-3,
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": 4,
}


class Steps(TrainerCallback):
    """Weights at the beginning of each optimiser step, and the flat gradient that its update descends."""

    def __init__(self) -> None:
        self.before: list[dict[str, torch.Tensor]] = []
        self.gradients: list[torch.Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.before.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(flat_gradient(model).clone())


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad and p.grad is not None])


def harmless_pairs() -> Dataset:
    """The same texts with the answers exchanged: raising these chosen answers is what DPO does anyway."""
    return Dataset.from_dict({"prompt": QUESTIONS[:4], "chosen": REJECTED[:4], "rejected": CHOSEN[:4]})


def build(model: Any, folder: Path, seed: int = 0, dataset: Any = None, **overrides: Any) -> tuple[Any, Steps]:
    """A trainer whose policy differs from its reference; all its rows make one batch."""
    steps = Steps()
    arguments = {name: overrides.pop(name) for name in ("peft_config",) if name in overrides}
    trainer = DPOTrainer(
        str(model) if isinstance(model, Path) else model,
        args=DPOConfig(**settings(folder, **(SGD | overrides))),
        train_dataset=near_pairs(4) if dataset is None else dataset,
        callbacks=[steps],
        **arguments,
    )
    perturb(trainer.model, 0.02, seed)
    return trainer, steps


def mean_chosen(folder: Path, trainer: Any) -> float:
    """Mean chosen log-probability of the training rows, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.load_state_dict(trainer.model.state_dict())
    with torch.no_grad():
        return plain_logps(model, collated(trainer)).chunk(2)[0].mean().item()


def change_of_chosen(folder: Path, output: Path, seed: int, learning_rate: float, **overrides: Any) -> float:
    """What one step did to the mean chosen log-probability of its own batch."""
    trainer, _ = build(folder, output, seed, learning_rate=learning_rate, **overrides)
    before = mean_chosen(folder, trainer)
    trainer.train()
    return mean_chosen(folder, trainer) - before


def plain_gradients(trainer: Any, beta: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """(g of DPO's loss, c of the chosen log-probability), flat over the trainable parameters, from plain logits."""
    model, batch = trainer.model, collated(trainer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        if trainer.ref_model is None:
            with model.disable_adapter():
                reference = plain_logps(model, batch)
        else:
            reference = plain_logps(trainer.ref_model, batch)
    logps = plain_logps(model, batch)
    chosen, rejected = (logps - reference).chunk(2)
    loss = -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    return gradient(loss), gradient(logps.chunk(2)[0].mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_step_lowers_the_chosen_answers_without_and_not_with_it(
    seed: int, tiny_model: Path, tmp_path: Path
) -> None:
    """One SGD step of plain DPO makes the chosen answers of its own batch less likely; projected, it does not.

    With f(lr) = a lr + b lr^2 the first-order part is 4 f(lr/2) - f(lr), so the curvature is out of the comparison.
    Catches a projection on the wrong vector, with the wrong sign, of part of the parameters, or after the step.
    """
    changes = {
        (project, lr): change_of_chosen(tiny_model, tmp_path, seed, lr, project_chosen_gradient=project)
        for project in (False, True)
        for lr in (1e-3, 5e-4)
    }
    first_order = {project: 4 * changes[project, 5e-4] - changes[project, 1e-3] for project in (False, True)}
    assert changes[False, 1e-3] < -0.01, "plain DPO is harmful here"
    assert abs(first_order[True]) < 1e-2 * abs(first_order[False])
    assert changes[True, 1e-3] > 0.2 * changes[False, 1e-3]


@pytest.mark.parametrize("case", ["full", "lora"])
def test_the_gradient_is_the_formula_s(case: str, tiny_model: Path, tmp_path: Path) -> None:
    """Each of two steps: project_update(g, c) of gradients from plain logits, over one vector of all parameters.

    Catches a projection parameter by parameter, a chosen gradient left over from the step before, frozen parameters in
    the vector.
    """
    options = {"peft_config": lora()} if case == "lora" else {}
    learning_rate = 0.1 if case == "lora" else 1e-3
    trainer, steps = build(
        tiny_model, tmp_path, project_chosen_gradient=True, max_steps=2, learning_rate=learning_rate, **options
    )
    trainer.train()
    assert len(steps.gradients) == 2
    for before, gradient in zip(steps.before, steps.gradients, strict=True):
        trainer.model.load_state_dict(before, strict=False)
        g, c = plain_gradients(trainer)
        assert torch.dot(g, c) > 0
        expected = project_update(g, c)
        assert relative_error(gradient, expected) < 1e-4
        assert relative_error(g, expected) > 0.1


def test_the_whole_chosen_answer_counts_whatever_ld_alpha(tiny_model: Path, tmp_path: Path) -> None:
    """LD-DPO weighs the end of the longer answer down in its loss; the chosen answer to protect is still all of it."""
    dataset = Dataset.from_dict(
        {"prompt": QUESTIONS[:4], "chosen": [text + " garden garden" for text in CHOSEN[:4]], "rejected": REJECTED[:4]}
    )
    runs = {}
    for project in (False, True):
        trainer, steps = build(tiny_model, tmp_path, dataset=dataset, ld_alpha=0.3, project_chosen_gradient=project)
        _, c = plain_gradients(trainer)
        trainer.train()
        runs[project] = steps.gradients[0]
    assert torch.dot(runs[False], c) > 0
    assert relative_error(runs[True], project_update(runs[False], c)) < 1e-4


@pytest.mark.parametrize("loss_type", [["sft"], ["sigmoid"]])
def test_a_harmless_gradient_is_left_alone(
    loss_type: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g . c <= 0: bit for bit the gradient that backward left. Catches a two-sided projection, a rewritten gradient.

    The projection's forward is made of two halves, so the run without the option agrees but for rounding.
    """
    runs = {}
    for case in ("off", "on", "not applied"):
        with monkeypatch.context() as patch:
            if case == "not applied":
                patch.setattr(ChosenProjection, "apply", lambda *_: {})
            trainer, steps = build(
                tiny_model, tmp_path, dataset=harmless_pairs(), project_chosen_gradient=case != "off",
                loss_type=loss_type,
            )  # fmt: skip
            trainer.train()
        runs[case] = (trainer, steps.gradients[0])
    assert history(runs["on"][0], "projection/cosine")[0] < 0
    assert history(runs["on"][0], "projection/active") == [0.0]
    assert torch.equal(runs["on"][1], runs["not applied"][1])
    assert_bit_equal(weights(runs["on"][0]), weights(runs["not applied"][0]))
    assert relative_error(runs["on"][1], runs["off"][1]) < 1e-5


def test_accumulated_gradients_are_projected_once_as_a_whole(tiny_model: Path, tmp_path: Path) -> None:
    """4 micro-batches of one pair equal one batch of 4: the projection belongs to the optimiser step.

    Catches a projection per micro-batch, and a chosen gradient of the last micro-batch alone.
    """
    runs = []
    for size, accumulation in ((4, 1), (1, 4)):
        trainer, steps = build(
            tiny_model,
            tmp_path,
            project_chosen_gradient=True,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
        )
        trainer.train()
        runs.append((steps.gradients, history(trainer, "projection/cosine"), history(trainer, "projection/active")))
    whole, parts = runs
    for first, second in zip(whole[0], parts[0], strict=True):
        assert relative_error(second, first) < 1e-4
    assert parts[1] == pytest.approx(whole[1], rel=1e-4)
    assert parts[2] == whole[2] == [1.0, 1.0]


def test_every_chosen_answer_of_the_step_counts_alike(tiny_model: Path, tmp_path: Path) -> None:
    """6 rows in micro-batches of 4 and 2: c is the gradient of the sum over all six.

    Catches a mean per micro-batch, which would weigh the rows of the small one twice.
    """
    runs = {}
    for project in (False, True):
        trainer, steps = build(
            tiny_model, tmp_path, dataset=near_pairs(6), project_chosen_gradient=project, gradient_accumulation_steps=2
        )
        _, c = plain_gradients(trainer)
        trainer.train()
        runs[project] = steps.gradients[0]
    assert torch.dot(runs[False], c) > 0
    assert relative_error(runs[True], project_update(runs[False], c)) < 1e-4


def test_activation_checkpointing_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """The forward is differentiated twice. Catches a second gradient that non-reentrant checkpointing gets wrong."""
    gradients = []
    for checkpointing in (True, False):
        trainer, steps = build(
            tiny_model, tmp_path, project_chosen_gradient=True, activation_checkpointing=checkpointing
        )
        trainer.train()
        assert trainer.model.is_gradient_checkpointing == checkpointing
        gradients.append(steps.gradients[0])
    assert relative_error(gradients[0], gradients[1]) < 1e-6


def test_metrics_by_hand(tiny_model: Path, tmp_path: Path) -> None:
    """The cosine between the gradient before its projection and the chosen gradient. Catches one taken afterwards."""
    trainer, _ = build(tiny_model, tmp_path, project_chosen_gradient=True)
    g, c = plain_gradients(trainer)
    cosine = (torch.dot(g, c) / g.norm() / c.norm()).item()
    trainer.train()
    assert cosine > 0.1
    assert history(trainer, "projection/cosine") == pytest.approx([cosine], rel=1e-4)
    assert history(trainer, "projection/active") == [1.0]


def test_clipping_comes_after_the_projection(tiny_model: Path, tmp_path: Path) -> None:
    """The logged norm is the projected gradient's, and the clipped one still does not lower the chosen answers.

    Catches a projection after clipping, which would leave a longer or shorter step than max_grad_norm.
    """
    trainer, steps = build(tiny_model, tmp_path, project_chosen_gradient=True, max_grad_norm=0.05)
    projected = project_update(*plain_gradients(trainer))
    trainer.train()
    assert history(trainer, "grad_norm") == pytest.approx([projected.norm().item()], rel=1e-4)
    assert projected.norm() > 0.1
    assert relative_error(steps.gradients[0], 0.05 * projected / projected.norm()) < 1e-4


def test_bf16_autocast_protects_the_same_direction(tiny_model: Path, tmp_path: Path) -> None:
    """TRL trains in bf16 by default. Catches a chosen gradient that autocast computes differently from the loss's."""
    full, _ = build(tiny_model, tmp_path, project_chosen_gradient=True)
    g, c = plain_gradients(full)
    trainer, steps = build(tiny_model, tmp_path, project_chosen_gradient=True, bf16=True)
    trainer.train()
    assert history(trainer, "projection/active") == [1.0]
    left = torch.dot(steps.gradients[0], c) / torch.dot(g, c)
    assert abs(left) < 0.05, "hardly anything of the harmful part is left"


def test_an_unused_parameter_does_no_harm(tiny_model: Path, tmp_path: Path) -> None:
    """A parameter outside the graph has no gradient in either vector. Catches a None that is added or projected."""
    gradients = []
    for unused in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        if unused:
            model.unused = torch.nn.Linear(3, 1, bias=False)  # the last parameter, so the others are perturbed alike
        trainer, steps = build(model, tmp_path, project_chosen_gradient=True)
        trainer.train()
        gradients.append(steps.gradients[0])
    assert trainer.model.unused.weight.grad is None
    assert history(trainer, "projection/active") == [1.0]
    assert torch.equal(*gradients)


def test_a_gradient_that_is_not_finite_raises(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a NaN that compares as `not > 0`, so that the broken update passes unprojected."""
    trainer, _ = build(tiny_model, tmp_path, project_chosen_gradient=True)
    with torch.no_grad():
        next(trainer.model.parameters())[5] = math.nan
        trainer.model.model.norm.weight[3] = math.nan
    with pytest.raises(FloatingPointError, match=r"not finite.*Lower learning_rate"):
        trainer.train()


def test_refusals(tmp_path: Path) -> None:
    """What cannot give two whole gradients of one forward is refused by the config, with a way out."""
    with pytest.raises(ValueError, match=r"without a loss scale.*bf16=True"):
        DPOConfig(**settings(tmp_path, project_chosen_gradient=True, fp16=True))
    with pytest.raises(ValueError, match=r"reentrant.*use_reentrant=False"):
        DPOConfig(
            **settings(tmp_path, project_chosen_gradient=True, activation_checkpointing_kwargs={"use_reentrant": True})
        )
    # TRL's offloading gives each saved activation back once, and then "Untracked tensor with id ...".
    with pytest.raises(ValueError, match=r"activation_offloading"):
        DPOConfig(**settings(tmp_path, project_chosen_gradient=True, activation_offloading=True))


def test_refusals_of_the_launcher(tmp_path: Path) -> None:
    """What `accelerate launch` brings: ZeRO-3 and FSDP are refused, ZeRO-2 is not."""
    config = DPOConfig(**settings(tmp_path, project_chosen_gradient=True))
    config.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    config.check_options()
    config.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match=r"ZeRO-3.*Use ZeRO-1 or ZeRO-2"):
        config.check_options()
    config.deepspeed_plugin = None
    config.fsdp_plugin_args = {"fsdp_version": 2}
    with pytest.raises(ValueError, match=r"FSDP.*project_chosen_gradient=False"):
        config.check_options()


def test_fsdp_from_the_launcher_is_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` can switch FSDP on behind the config. Catches a check of the config alone."""
    init = trl.DPOTrainer.__init__

    @functools.wraps(init)
    def sharded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(trl.DPOTrainer, "__init__", sharded)
    with pytest.raises(ValueError, match="FSDP, which shards gradients"):
        build(tiny_model, tmp_path, project_chosen_gradient=True)

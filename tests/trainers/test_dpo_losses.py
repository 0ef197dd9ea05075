"""The added losses of DPO in the trainer: against plain logits in float64, their metrics, schedules and refusals."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PromptTuningConfig, get_peft_model
from transformers import TrainerCallback

from tests.trainers.harness import history
from tests.trainers.losses import perturb, relative_error
from tests.trainers.pairs import (
    answers,
    batch,
    build,
    config,
    doubles,
    lora,
    make,
    named_gradients,
    pairs,
    plain_model,
    repeated_pairs,
    sums,
    train,
    trained_adapter,
)
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.models.tiny import build_tiny_model

LN2 = math.log(2)
OWN = {"dpop": {}, "cal_dpo": {}, "dpo_shift": {"dpo_shift_lambda": 0.7}}


# ---- the losses against plain logits -------------------------------------------------------------------------------


def expected_loss(trainer: Any, policy: list[Any], reference: list[Any]) -> torch.Tensor:
    """The loss of one batch, pair by pair, from log-probabilities of plain logits."""
    args = trainer.args
    logps, ref_logps = sums(policy, args.ld_alpha), sums(reference, args.ld_alpha)
    count = len(logps) // 2
    total = torch.zeros((), dtype=torch.float64)
    for name, weight in zip(args.loss_type, args.loss_weights or [1.0] * len(args.loss_type), strict=True):
        if name == "sft":
            total = total - weight * torch.cat([tokens for tokens, _ in policy[:count]]).mean()
            continue
        for index in range(count):
            chosen = logps[index] - ref_logps[index]
            rejected = logps[count + index] - ref_logps[count + index]
            if name == "dpop":
                penalty = -chosen if chosen < 0 else 0.0 * chosen
                loss = -F.logsigmoid(args.beta * (chosen - rejected - args.dpop_lambda * penalty))
            elif name == "cal_dpo":
                target = 0.5 / args.beta
                loss = -F.logsigmoid(chosen - rejected) + (chosen - target) ** 2 + (rejected + target) ** 2
            elif name == "dpo_shift":
                loss = -F.logsigmoid(args.beta * (chosen - args.dpo_shift_lambda * rejected))
            else:
                assert name == "sigmoid"
                loss = -F.logsigmoid(args.beta * (chosen - rejected))
            total = total + weight * loss / count
    for _, entropies in policy[:count]:
        total = total - args.entropy_coef * entropies.mean() / count
    return total


def assert_loss_is_expected(trainer: Any, inputs: Any, model: Path) -> None:
    """Value and full gradient of `compute_loss` are those of the plain computation."""
    policy, reference = doubles(trainer, model)
    with torch.no_grad():
        reference_rows = answers(reference, inputs)
    value, gradient = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    plain, plain_gradient = named_gradients(
        policy, lambda: expected_loss(trainer, answers(policy, inputs), reference_rows)
    )
    assert value == pytest.approx(plain, rel=1e-5)
    assert relative_error(gradient, plain_gradient) < 5e-6


CASES: dict[str, dict[str, Any]] = {
    "dpop": {"loss_type": ["dpop"]},
    "cal_dpo": {"loss_type": ["cal_dpo"]},
    "dpo_shift": {"loss_type": ["dpo_shift"], "dpo_shift_lambda": 0.7},
    "weight": {"loss_type": ["dpop"], "loss_weights": [0.25], "dpop_lambda": 3.0, "beta": 0.5},
    "sft": {"loss_type": ["dpop", "sft"], "loss_weights": [1.0, 0.3]},
    "sigmoid": {"loss_type": ["dpop", "sigmoid"], "dpop_lambda": 2.0},
    "reversed": {"loss_type": ["sigmoid", "dpo_shift", "cal_dpo"], "loss_weights": [2.0, 0.7, 0.01]},
    "ld": {"loss_type": ["dpop", "sigmoid"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.3},
    "ld_shift": {"loss_type": ["dpo_shift"], "dpo_shift_lambda": 0.5, "ld_alpha": 0.0},
    "ld_cal": {"loss_type": ["cal_dpo"], "ld_alpha": 0.3},
    "entropy": {"loss_type": ["sigmoid"], "entropy_coef": 0.7},
    "entropy_dpop": {"loss_type": ["dpop", "sft"], "loss_weights": [1.0, 0.3], "entropy_coef": -0.4},
    "precomputed": {"loss_type": ["dpop"], "precompute_ref_log_probs": True},
    "projection": {"loss_type": ["dpop", "sft"], "loss_weights": [1.0, 0.3], "project_chosen_gradient": True},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_loss_and_gradient_against_plain_logits(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """One batch with padding, prompts and answers of different lengths, a policy away from its reference.

    Catches a mask not shifted by one, chosen and rejected (or policy and reference) swapped, sums in place of means, a
    lost or doubled weight, `ld_alpha` left out of one side, a penalty outside beta, an entropy over all rows or tokens.
    """
    trainer = make(tiny_model, tmp_path, **settings)
    inputs = batch(trainer)
    _assert_varied(inputs)
    assert_loss_is_expected(trainer, inputs, tiny_model)
    active = trainer._metrics["train"]["logps/chosen_less_likely"][0]
    assert 0.2 < active < 0.8, "some pairs pay DPOP's penalty and some do not"


def _assert_varied(inputs: dict[str, torch.Tensor]) -> None:
    """The batch can show what these tests look for."""
    prompts = inputs["attention_mask"].sum(1) - inputs["completion_mask"].sum(1)
    chosen, rejected = inputs["completion_mask"].sum(1).chunk(2)
    assert (inputs["attention_mask"] == 0).any() and len(set(prompts.tolist())) > 3
    assert (chosen > rejected).any() and (chosen < rejected).any() and (chosen == 1).logical_not().all()


def test_one_pair_and_one_token(tiny_model: Path, tmp_path: Path) -> None:
    """A batch of one pair, answers cut to one token: catches a squeezed dimension and a length that is off by one."""
    trainer = make(tiny_model, tmp_path, loss_type=["dpop"], entropy_coef=0.3)
    row = dict(trainer.train_dataset[1])
    row |= {"chosen_ids": row["chosen_ids"][:1], "rejected_ids": row["rejected_ids"][:1]}
    inputs = trainer.data_collator([row])
    assert inputs["completion_mask"].sum(1).tolist() == [1, 1]
    assert_loss_is_expected(trainer, inputs, tiny_model)


def move_adapter(model: torch.nn.Module, scale: float = 0.1) -> None:
    """Move the trainable adapter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".default." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def prompt_tuning() -> PromptTuningConfig:
    """Five virtual tokens before the real ones."""
    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)


@pytest.mark.parametrize("loss_type", OWN)
@pytest.mark.parametrize("kind", ["lora", "ready", "prompt"])
def test_adapters_against_plain_logits(kind: str, loss_type: str, tiny_model: Path, tmp_path: Path) -> None:
    """The reference is the base model, or for a ready adapter its copy. Catches one taken for the other, and with
    prompt tuning, whose virtual tokens lead in the model's output, positions counted from the start."""
    model: Any = trained_adapter(tiny_model) if kind == "ready" else tiny_model
    peft_config = {"lora": lora(), "ready": None, "prompt": prompt_tuning()}[kind]
    settings = config(tmp_path, loss_type=[loss_type], entropy_coef=0.8, **OWN[loss_type])
    trainer: Any = build(DPOTrainer, DPOConfig(**settings), model, peft_config=peft_config)
    move_adapter(trainer.model, 2.0 if kind == "prompt" else 0.1)
    reference = trained_adapter(tiny_model) if kind == "ready" else plain_model(tiny_model)
    policy: Any = get_peft_model(plain_model(tiny_model), prompt_tuning() if kind == "prompt" else lora())
    names = policy.state_dict().keys()
    policy.load_state_dict({name: value for name, value in trainer.model.state_dict().items() if name in names})
    inputs = batch(trainer)
    with torch.no_grad():
        policy_rows = answers(policy.double().eval(), inputs)
        reference_rows = answers(reference.double().eval(), inputs)
    assert (sums(policy_rows) - sums(reference_rows)).abs().min() > 1e-3, "the policy must have left its reference"
    trainer.model.train()
    expected = expected_loss(trainer, policy_rows, reference_rows).item()
    assert trainer.compute_loss(trainer.model, inputs).item() == pytest.approx(expected, rel=1e-5)
    seen = trainer._metrics["train"]["entropy_chosen"]
    assert seen == [pytest.approx(mean_chosen_entropy(policy_rows).item(), rel=1e-6)]


def test_the_adapter_is_on_again_after_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    """A second call gives the same loss and a gradient. Catches an adapter left disabled, or "ref" left active."""
    trainer: Any = build(DPOTrainer, DPOConfig(**config(tmp_path, loss_type="dpop")), trained_adapter(tiny_model))
    move_adapter(trainer.model)
    trainer.model.train()
    inputs = batch(trainer)
    losses = []
    for _ in range(2):
        loss = trainer.compute_loss(trainer.model, inputs)
        trainer.model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        named = trainer.model.named_parameters()
        got = {name for name, p in named if p.grad is not None and p.grad.abs().max() > 0}
        assert got and all(".default." in name for name in got)
    assert losses[0] == losses[1] != pytest.approx(LN2, rel=1e-3)


def test_a_tiny_lambda_is_dpo(tiny_model: Path, tmp_path: Path) -> None:
    """dpop with lambda 1e-12 has the loss and gradient of TRL's sigmoid. Catches another beta, sign or reduction."""
    results = []
    for settings in ({"loss_type": ["dpop"], "dpop_lambda": 1e-12}, {"loss_type": ["sigmoid"]}):
        trainer = make(tiny_model, tmp_path, beta=0.3, **settings)
        inputs = batch(trainer)
        results.append(named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs)))  # noqa: B023
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert relative_error(results[0][1], results[1][1]) < 1e-6


def test_padding_and_prompts_have_no_influence(tiny_model: Path, tmp_path: Path) -> None:
    """Other token ids under attention 0 change nothing. Catches an average over padding."""
    trainer = make(tiny_model, tmp_path, loss_type=["dpop", "cal_dpo"], loss_weights=[1.0, 0.01], entropy_coef=0.5)
    inputs = batch(trainer)
    dirty = dict(inputs, input_ids=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 17))
    assert not torch.equal(dirty["input_ids"], inputs["input_ids"])
    clean_value, clean = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    dirty_value, changed = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, dirty))
    assert dirty_value == pytest.approx(clean_value, rel=1e-6)
    assert relative_error(changed, clean) < 1e-6


# ---- what the interception leaves behind ---------------------------------------------------------------------------


def test_nothing_is_left_changed(tiny_model: Path, tmp_path: Path) -> None:
    """After a loss, also one that raised, TRL's attributes and the caller's batch are as before.

    Catches a precompute flag that stays on (TRL would then read a reference that is not there, or precompute for
    `evaluate`), a list of losses that shrinks, and a batch that keeps the reference of an earlier policy.
    """
    trainer = make(tiny_model, tmp_path, loss_type=["dpop", "sft"], loss_weights=[1.0, 0.3])
    inputs = batch(trainer)
    keys = set(inputs)

    def assert_restored() -> None:
        assert trainer.precompute_ref_logps is False
        assert trainer.loss_types == ["dpop", "sft"] and trainer.loss_weights == [1.0, 0.3]
        assert set(inputs) == keys

    first = trainer.compute_loss(trainer.model, inputs).item()
    assert_restored()
    perturb(trainer.ref_model, 0.02, seed=9)
    assert trainer.compute_loss(trainer.model, inputs).item() != first
    broken = dict(inputs, input_ids=inputs["input_ids"] + 10**6)
    with pytest.raises(IndexError):
        trainer.compute_loss(trainer.model, broken)
    assert_restored()


def test_outputs_are_returned_with_the_added_terms(tiny_model: Path, tmp_path: Path) -> None:
    """With `return_outputs` the loss is the same and the outputs are the plain model's.

    TRL calls the model twice then: catches the second output taken for the first, and terms added in one branch only.
    """
    trainer = make(tiny_model, tmp_path, loss_type=["dpop", "sft"], entropy_coef=0.3)
    inputs = batch(trainer)
    alone = trainer.compute_loss(trainer.model, inputs)
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    assert loss.item() == alone.item()
    assert outputs.logits.shape[:2] == inputs["input_ids"].shape


# ---- number of forward passes --------------------------------------------------------------------------------------


def count_forwards(trainer: Any) -> dict[str, list[int]]:
    """From now on, the number of rows in each forward pass of the blocks, under "policy" and "reference"."""
    rows: dict[str, list[int]] = {"policy": [], "reference": []}
    base = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    layer = next((module for module in base.modules() if hasattr(module, "lora_A")), None)

    def policy_forward(module: Any, args: Any, output: Any) -> None:
        is_reference = layer is not None and (layer.disable_adapters or layer.active_adapters == ["ref"])
        rows["reference" if is_reference else "policy"].append(len(output.last_hidden_state))

    def reference_forward(module: Any, args: Any, output: Any) -> None:
        rows["reference"].append(len(output.last_hidden_state))

    base.model.register_forward_hook(policy_forward)
    if trainer.ref_model is not None:
        trainer.ref_model.model.register_forward_hook(reference_forward)
    return rows


COUNTED: dict[str, dict[str, Any]] = {
    "dpop": {"loss_type": ["dpop"]},
    "mixture": {"loss_type": ["dpop", "cal_dpo", "dpo_shift", "sigmoid", "sft"], "entropy_coef": 0.1},
    "off": {},
    "projection": {"loss_type": ["dpop", "sigmoid"], "project_chosen_gradient": True},
}


@pytest.mark.parametrize("settings", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("kind", ["full", "lora", "ready", "precomputed", "precomputed_lora"])
def test_one_policy_and_one_reference_forward(
    kind: str, settings: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    """Per micro-batch, in training and evaluation; with the projection the policy's is made of two halves.

    Catches a second forward for our losses (twice the cost), a reference forward although it was precomputed, and a
    reference forward with the adapter on.
    """
    model: Any = (lambda: trained_adapter(tiny_model)) if kind == "ready" else tiny_model
    arguments: dict[str, Any] = {"peft_config": lora()} if kind in ("lora", "precomputed_lora") else {}
    run = config(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        precompute_ref_log_probs=kind.startswith("precomputed"),
        **settings,
    )
    trainer: Any = build(DPOTrainer, DPOConfig(**run), model, eval_dataset=pairs(), **arguments)
    rows = count_forwards(trainer)
    trainer.train()
    # Two steps of two micro-batches of two pairs, one evaluation of two batches of four pairs.
    training = [2] * 8 if "project_chosen_gradient" in settings else [4] * 4
    assert rows["policy"] == [*training, 8, 8]
    assert rows["reference"] == ([] if kind.startswith("precomputed") else [4] * 4 + [8] * 2)


# ---- gradient accumulation -----------------------------------------------------------------------------------------


class _Gradients(TrainerCallback):
    """The gradients right before the optimiser's step: what SGD multiplies by the learning rate."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.flat = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        moved = [(self.start[name] - parameter).flatten() for name, parameter in sorted(model.named_parameters())]
        self.update = torch.cat(moved).detach()


ACCUMULATED: dict[str, dict[str, Any]] = {
    "dpop": {"loss_type": ["dpop"]},
    "cal_dpo": {"loss_type": ["cal_dpo"]},
    "dpo_shift": {"loss_type": ["dpo_shift"], "dpo_shift_lambda": 0.7},
    "entropy_coef": {"loss_type": ["sigmoid"], "entropy_coef": 2.0},
    "projection": {"loss_type": ["sigmoid"], "project_chosen_gradient": True},
}


@pytest.mark.parametrize("settings", ACCUMULATED.values(), ids=ACCUMULATED)
def test_accumulation_does_not_change_the_update(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Four pairs as 4 x 1, 2 x 2 and 1 x 4 take the same SGD step. Catches a term that is not divided by the number
    of micro-batches, one divided twice, a mean over the tokens of a batch, and a projection per micro-batch."""

    def moved() -> Any:
        model = plain_model(tiny_model)
        perturb(model, 0.002 if projected else 0.02, seed=1)
        return model

    projected = "project_chosen_gradient" in settings
    # Pairs with which plain DPO lowers the chosen answers, so that the projection acts.
    dataset = repeated_pairs(count=4) if projected else pairs(count=4)
    runs = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        callback = _Gradients()
        run = config(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=0.5,
            max_grad_norm=0.0,
            **settings,
        )
        trainer = train(DPOTrainer, DPOConfig(**run), moved, dataset, callbacks=[callback])
        runs.append((callback, trainer))
    whole, first = runs[0]
    assert whole.flat.abs().max() > 0
    assert relative_error(whole.update, 0.5 * whole.flat) < 1e-3, "SGD takes the gradient that was seen"
    for callback, trainer in runs[1:]:
        assert relative_error(callback.flat, whole.flat) < 1e-6
        assert history(trainer, "loss") == pytest.approx(history(first, "loss"), rel=1e-5)
        assert history(trainer, "logps/chosen_vs_ref") == pytest.approx(history(first, "logps/chosen_vs_ref"), rel=1e-4)
    if projected:
        assert history(first, "projection/active") == [1.0], "the projection must act for this to mean anything"


# ---- entropy -------------------------------------------------------------------------------------------------------


def mean_chosen_entropy(rows: list[Any]) -> torch.Tensor:
    """Mean over pairs of the mean over the tokens of the chosen answer."""
    return torch.stack([entropies.mean() for _, entropies in rows[: len(rows) // 2]]).mean()


def test_entropy_is_that_of_the_chosen_answers(tiny_model: Path, tmp_path: Path) -> None:
    """With the losses weighed 0 the gradient is the entropy's alone. Catches rejected rows, padding, a mean over all
    tokens instead of per answer, and a sign; the metric is the same number."""
    trainer = make(tiny_model, tmp_path, moved=0.1, loss_type=["sigmoid"], loss_weights=[0.0], entropy_coef=1.5)
    inputs = batch(trainer)
    policy, _ = doubles(trainer, tiny_model)
    value, gradient = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    expected, plain = named_gradients(policy, lambda: -1.5 * mean_chosen_entropy(answers(policy, inputs)))
    assert value == pytest.approx(expected, rel=1e-6)
    assert relative_error(gradient, plain) < 5e-6
    assert trainer._metrics["train"]["entropy_chosen"] == [pytest.approx(-expected / 1.5, rel=1e-6)]

    ids = inputs["input_ids"].clone()
    rejected = torch.zeros_like(ids, dtype=torch.bool)
    rejected[len(ids) // 2 :] = True
    changed = dict(inputs, input_ids=ids.masked_fill(rejected & inputs["completion_mask"].bool(), 17))
    _, again = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, changed))
    assert not torch.equal(changed["input_ids"], inputs["input_ids"])
    assert relative_error(again, gradient) < 1e-6


@pytest.mark.parametrize("coefficient", [0.5, -0.5])
def test_the_sign_of_the_entropy_coefficient(coefficient: float, tiny_model: Path, tmp_path: Path) -> None:
    """Five SGD steps on one batch with a loss of almost nothing: a positive coefficient raises the entropy."""
    trainer = make(tiny_model, tmp_path, moved=0.1, loss_weights=[1e-9], entropy_coef=coefficient)
    inputs = batch(trainer)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        trainer.compute_loss(trainer.model, inputs).backward()
        optimizer.step()
    seen = trainer._metrics["train"]["entropy_chosen"]
    steps = [math.copysign(1.0, coefficient) * (later - earlier) for earlier, later in itertools.pairwise(seen)]
    assert len(steps) == 5 and all(step > 1e-4 for step in steps), seen


def test_no_entropy_metric_without_a_coefficient(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a metric (and a gather over ranks) for an option that is off."""
    trainer = make(tiny_model, tmp_path)
    trainer.compute_loss(trainer.model, batch(trainer))
    assert "entropy_chosen" not in trainer._metrics["train"] and "dpop/lambda" not in trainer._metrics["train"]


# ---- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ld_alpha", [None, 0.3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_metrics_by_hand(mode: str, ld_alpha: float | None, tiny_model: Path, tmp_path: Path) -> None:
    """Every metric from plain logits, pair by pair.

    Catches chosen and rejected swapped, tokens of the wrong row, a mean of ratios where the ratio of sums is meant, an
    accuracy not normalised by length, a penalty scaled by lambda or beta, and metrics under the wrong mode.
    """
    trainer = make(tiny_model, tmp_path, seed=10, loss_type=["dpop"], ld_alpha=ld_alpha)
    trainer.model.train(mode == "train")
    inputs = batch(trainer)
    trainer.compute_loss(trainer.model, inputs)
    policy, reference = doubles(trainer, tiny_model)
    with torch.no_grad():
        rows = answers(policy, inputs)
        drift = (sums(rows, ld_alpha) - sums(answers(reference, inputs), ld_alpha)).tolist()
    lengths = [len(tokens) for tokens, _ in rows]
    count = len(rows) // 2
    chosen, rejected = drift[:count], drift[count:]
    wins = [c / n > r / m for c, n, r, m in zip(chosen, lengths[:count], rejected, lengths[count:], strict=True)]
    assert sum(wins) != sum(c > r for c, r in zip(chosen, rejected, strict=True)), "the length must matter"
    penalties = [max(0.0, -c) for c in chosen]
    expected = {
        "logps/chosen_vs_ref": sum(chosen) / count,
        "logps/rejected_vs_ref": sum(rejected) / count,
        "logps/chosen_vs_ref_per_token": sum(chosen) / sum(lengths[:count]),
        "logps/chosen_less_likely": sum(c < 0 for c in chosen) / count,
        "rewards/accuracies_per_token": sum(wins) / count,
        "rewards/ties_per_token": 0.0,
        "dpop/penalty_active": sum(p > 0 for p in penalties) / count,
        "dpop/penalty_mean": sum(penalties) / count,
        "dpop/lambda": 50.0,
    }
    for name, value in expected.items():
        assert trainer._metrics[mode][name] == [pytest.approx(value, rel=1e-4, abs=1e-5)], name
    assert 0 < expected["dpop/penalty_active"] < 1
    assert not trainer._metrics["eval" if mode == "train" else "train"]


@pytest.mark.parametrize(
    "settings", [{}, {"ld_alpha": 0.3}, {"project_chosen_gradient": True}], ids=["plain", "ld", "projection"]
)
def test_a_policy_equal_to_its_reference(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Every pair is a tie, no penalty is active, and DPOP's first gradient is DPO's, exactly.

    Catches policy and reference summed in different orders: rounding then decides which pairs pay the penalty, and with
    lambda 50 it dominates the first step. Also a tie counted as a win or a loss.
    """
    gradients = []
    for loss_type in ("dpop", "sigmoid"):
        trainer = make(tiny_model, tmp_path, moved=0.0, loss_type=[loss_type], **settings)
        inputs = batch(trainer)
        value, gradient = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))  # noqa: B023
        assert value == pytest.approx(LN2, abs=1e-5)
        metrics = trainer._metrics["train"]
        assert metrics["rewards/ties_per_token"] == [1.0]
        assert metrics["rewards/accuracies_per_token"] == [0.5]
        assert metrics["logps/chosen_less_likely"] == [0.0]
        assert metrics["logps/chosen_vs_ref"] == metrics["logps/chosen_vs_ref_per_token"] == [0.0]
        gradients.append(gradient)
    assert relative_error(gradients[0], gradients[1]) < 1e-6


def test_an_answer_without_a_token(tiny_model: Path, tmp_path: Path) -> None:
    """Truncation may leave nothing of one answer: it counts 0 nats and one token. Catches a division by its length."""
    trainer = make(tiny_model, tmp_path, loss_type=["dpop", "dpo_shift", "cal_dpo"])
    inputs = trainer.data_collator([dict(trainer.train_dataset[1]) | {"rejected_ids": []}])
    loss, gradient = named_gradients(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))
    assert math.isfinite(loss) and gradient.isfinite().all()
    metrics = trainer._metrics["train"]
    assert metrics["logps/rejected_vs_ref"] == [0.0] != metrics["logps/chosen_vs_ref"]
    assert metrics["rewards/accuracies_per_token"] == [float(metrics["logps/chosen_vs_ref"][0] > 0)]


STEP_0 = {"sigmoid": LN2, "dpop": LN2, "dpo_shift": LN2, "cal_dpo": LN2 + 50.0}


@pytest.mark.parametrize("loss_type", STEP_0)
@pytest.mark.parametrize("kind", ["full", "lora", "ready"])
def test_the_first_loss(kind: str, loss_type: str, tiny_model: Path, tmp_path: Path) -> None:
    """The policy starts at its reference: ln 2 (and 1 / (2 beta^2) more for Cal-DPO).

    Catches a reference that is not the policy's start: for a ready adapter the base model.
    """
    model: Any = (lambda: trained_adapter(tiny_model)) if kind == "ready" else tiny_model
    arguments = {"peft_config": lora()} if kind == "lora" else {}
    settings = DPOConfig(**config(tmp_path, loss_type=loss_type, max_steps=1))
    trainer = train(DPOTrainer, settings, model, **arguments)
    assert history(trainer, "loss") == [pytest.approx(STEP_0[loss_type], rel=1e-6)]
    assert history(trainer, "rewards/ties_per_token") == [1.0]


# ---- schedules -----------------------------------------------------------------------------------------------------


def test_warmup_of_the_penalty(tiny_model: Path, tmp_path: Path) -> None:
    """lambda * step / warmup per optimiser step, 0 at the first one and all of it from step `warmup` on.

    Catches counting micro-batches, an off by one, and a penalty that overshoots.
    """
    settings = config(
        tmp_path,
        loss_type="dpop",
        dpop_lambda=12.0,
        dpop_lambda_warmup_steps=3,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer = train(DPOTrainer, DPOConfig(**settings), tiny_model, eval_dataset=pairs(count=2))
    assert history(trainer, "dpop/lambda") == pytest.approx([0.0, 4.0, 8.0, 12.0, 12.0, 12.0])
    assert history(trainer, "eval_dpop/lambda") == pytest.approx([8.0, 12.0, 12.0])


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)])
def test_the_loss_uses_the_warmed_up_penalty(step: int, share: float, tiny_model: Path, tmp_path: Path) -> None:
    """Catches a schedule that is only logged."""
    trainer = make(tiny_model, tmp_path, loss_type=["dpop"], dpop_lambda=20.0, dpop_lambda_warmup_steps=4)
    trainer.state.global_step = step
    inputs = batch(trainer)
    policy, reference = doubles(trainer, tiny_model)
    trainer.args.dpop_lambda_warmup_steps = 0
    loss = trainer.compute_loss(trainer.model, inputs).item()
    trainer.args.dpop_lambda_warmup_steps = 4
    warmed = trainer.compute_loss(trainer.model, inputs).item()
    trainer.args.dpop_lambda = 20.0 * share
    with torch.no_grad():
        expected = expected_loss(trainer, answers(policy, inputs), answers(reference, inputs)).item()
    assert warmed == pytest.approx(expected, rel=1e-5)
    assert (warmed == pytest.approx(loss, rel=1e-6)) == (share == 1.0)


class _ShiftLambdas(TrainerCallback):
    def __init__(self) -> None:
        self.values: list[float] = []
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.values.append(self.trainer.ext_dpo_shift_lambda)


def test_dpo_shift_lambda_goes_to_its_final_value(tiny_model: Path, tmp_path: Path) -> None:
    """Linear over the run, and the last step has the final value itself. Catches an off by one and a wrong end."""
    callback = _ShiftLambdas()
    settings = config(tmp_path, loss_type="dpo_shift", dpo_shift_lambda=0.9, dpo_shift_lambda_final=0.5, max_steps=5)
    trainer: Any = build(DPOTrainer, DPOConfig(**settings), tiny_model, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    assert callback.values == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5], abs=1e-12)
    assert callback.values[0] == 0.9
    assert trainer.ext_dpo_shift_lambda == pytest.approx(0.5, abs=1e-12), "an evaluation after the last step"


@pytest.mark.parametrize(("step", "value"), [(0, 0.9), (2, 0.7), (4, 0.5)])
def test_the_loss_uses_the_scheduled_dpo_shift_lambda(
    step: int, value: float, tiny_model: Path, tmp_path: Path
) -> None:
    """Catches a schedule that never reaches the loss."""
    trainer = make(tiny_model, tmp_path, loss_type=["dpo_shift"], dpo_shift_lambda=0.9, dpo_shift_lambda_final=0.5)
    trainer.state.global_step, trainer.state.max_steps = step, 5
    inputs = batch(trainer)
    policy, reference = doubles(trainer, tiny_model)
    loss = trainer.compute_loss(trainer.model, inputs).item()
    trainer.args.dpo_shift_lambda = value
    with torch.no_grad():
        expected = expected_loss(trainer, answers(policy, inputs), answers(reference, inputs)).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_run_of_one_step_has_a_dpo_shift_lambda(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a division by max_steps - 1 = 0."""
    settings = config(tmp_path, loss_type="dpo_shift", dpo_shift_lambda_final=0.5, max_steps=1)
    assert history(train(DPOTrainer, DPOConfig(**settings), tiny_model), "loss") == [pytest.approx(LN2, rel=1e-6)]


# ---- the failure itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo_lowers_the_chosen_answers_and_dpop_does_not(seed: int, tmp_path: Path) -> None:
    """What DPOP is for. Catches a penalty of the wrong sign or size, or one whose gradient is cut."""
    model = build_tiny_model(tmp_path / "model", seed=seed)
    drift = {}
    for loss_type in ("sigmoid", "dpop"):
        settings = config(
            tmp_path,
            loss_type=loss_type,
            max_steps=22,
            optim="sgd",
            learning_rate=0.02,
            activation_checkpointing=False,
        )
        trainer = train(DPOTrainer, DPOConfig(**settings), model, repeated_pairs(count=4))
        drift[loss_type] = history(trainer, "logps/chosen_vs_ref")
        assert history(trainer, "rewards/margins")[-1] > 0.1, "both learn the preference"
    assert drift["sigmoid"][-1] < -3.0
    assert min(drift["dpop"]) > -0.6
    assert sum(drift["dpop"][-10:]) / 10 > 0.0


# ---- refusals ------------------------------------------------------------------------------------------------------

WARN = {"chosen_guard": "warn"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"chosen_guard": "loud"}, "chosen_guard='loud'", "raise_lambda"),
    ({"ref_init": "sft"}, "ref_init='sft'", "sft_on_chosen"),
    ({"bad_rows": "skip"}, "bad_rows='skip'", "drop"),
    ({"loss_type": "dpop", "dpop_lambda": 0.0}, "dpop_lambda=0.0", "loss_type='sigmoid'"),
    ({"loss_type": "dpop", "dpop_lambda": -1.0}, "dpop_lambda=-1.0", "positive"),
    ({"loss_type": "dpop", "dpop_lambda": math.inf}, "dpop_lambda=inf", "positive"),
    ({"loss_type": "dpop", "dpop_lambda": math.nan}, "dpop_lambda=nan", "positive"),
    ({"loss_type": "dpop", "dpop_lambda_warmup_steps": -1}, "dpop_lambda_warmup_steps=-1", "at least 0"),
    ({"loss_type": "dpo_shift", "dpo_shift_lambda": 0.0}, "dpo_shift_lambda=0.0", "in (0, 1]"),
    ({"loss_type": "dpo_shift", "dpo_shift_lambda": 1.01}, "dpo_shift_lambda=1.01", "1 is plain DPO"),
    ({"loss_type": "dpo_shift", "dpo_shift_lambda_final": 0.0}, "dpo_shift_lambda_final=0.0", "in (0, 1]"),
    ({"loss_type": "dpo_shift", "dpo_shift_lambda_final": 1.5}, "dpo_shift_lambda_final=1.5", "in (0, 1]"),
    ({"entropy_coef": math.nan}, "entropy_coef=nan", "finite"),
    ({"entropy_coef": math.inf}, "entropy_coef=inf", "finite"),
    (WARN | {"chosen_guard_floor": -0.1}, "chosen_guard_floor=-0.1", "at least 0"),
    (WARN | {"chosen_guard_patience": 0}, "chosen_guard_patience=0", "at least 1"),
    (WARN | {"chosen_guard_decay": 1.0}, "chosen_guard_decay=1.0", "in [0, 1)"),
    (WARN | {"chosen_guard_decay": -0.1}, "chosen_guard_decay=-0.1", "in [0, 1)"),
    ({"chosen_guard_lambda_max": 0.0}, "chosen_guard_lambda_max=0.0", "positive"),
    ({"ref_init": "sft_on_chosen", "ref_init_epochs": 0.0}, "ref_init_epochs=0.0", "positive"),
    ({"ref_init": "sft_on_chosen", "ref_init_learning_rate": 0.0}, "ref_init_learning_rate=0.0", "positive"),
    ({"dpop_lambda": 5.0}, "dpop_lambda=5.0 has no effect with loss_type=['sigmoid']", "Add 'dpop' to loss_type"),
    ({"dpop_lambda_warmup_steps": 5, "loss_type": "cal_dpo"}, "dpop_lambda_warmup_steps=5", "Add 'dpop' to loss_type"),
    ({"dpo_shift_lambda": 0.5, "loss_type": "dpop"}, "dpo_shift_lambda=0.5", "Add 'dpo_shift' to loss_type"),
    ({"dpo_shift_lambda_final": 0.5}, "dpo_shift_lambda_final=0.5", "Add 'dpo_shift' to loss_type"),
    ({"loss_type": "cal_dpo", "beta": 0.0}, "beta=0.0", "must be positive with loss_type ['cal_dpo']"),
    ({"loss_type": ["sft", "dpop"], "beta": -0.1}, "beta=-0.1", "must be positive with loss_type ['dpop']"),
    ({"loss_type": "dpop", "f_divergence_type": "forward_kl"}, "f_divergence_type='forward_kl'", "'reverse_kl'"),
    ({"loss_type": "dpo_shift", "use_weighting": True}, "use_weighting=True", "Use use_weighting=False"),
    ({"loss_type": ["dpop", "cal_dpo"], "label_smoothing": 0.1}, "label_smoothing=0.1", "Leave it 0"),
    ({"project_chosen_gradient": True, "fp16": True}, "project_chosen_gradient=True", "bf16=True"),
    (
        {"project_chosen_gradient": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        "project_chosen_gradient=True",
        "use_reentrant=False in activation_checkpointing_kwargs",
    ),
    ({"chosen_guard_floor": 0.2}, "chosen_guard_floor=0.2 has no effect", "Set chosen_guard to 'warn'"),
    ({"chosen_guard_patience": 2}, "chosen_guard_patience=2 has no effect", "Set chosen_guard to 'warn'"),
    ({"chosen_guard_decay": 0.7}, "chosen_guard_decay=0.7 has no effect", "Set chosen_guard to 'warn'"),
    (WARN | {"chosen_guard_lambda_max": 99.0}, "chosen_guard_lambda_max=99.0", "Set chosen_guard='raise_lambda'"),
    ({"chosen_guard": "raise_lambda"}, "chosen_guard='raise_lambda'", "Add 'dpop' to loss_type"),
    (
        {"chosen_guard": "raise_lambda", "loss_type": "dpop", "chosen_guard_lambda_max": 10.0},
        "chosen_guard_lambda_max=10.0 is below dpop_lambda=50.0",
        "Raise it",
    ),
    ({"chosen_guard": "stop"}, "chosen_guard='stop'", "save_strategy='steps'"),
    ({"ref_init_epochs": 2.0}, "ref_init_epochs=2.0 has no effect", "Set ref_init='sft_on_chosen'"),
    ({"ref_init_learning_rate": 1e-3}, "ref_init_learning_rate=0.001 has no effect", "Set ref_init='sft_on_chosen'"),
]


@pytest.mark.parametrize(
    ("settings", "names", "fix"), REFUSED, ids=["-".join(map(str, s.values())) + "-" + n[:30] for s, n, _ in REFUSED]
)
def test_refused_settings(settings: dict[str, Any], names: str, fix: str, tmp_path: Path) -> None:
    """Catches a check that is lost, tests another field, or says neither what is wrong nor what to do."""
    with pytest.raises(ValueError) as caught:
        DPOConfig(**config(tmp_path, **settings))
    assert names in str(caught.value) and fix in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "attribute", "names", "fix"),
    [
        (
            {"project_chosen_gradient": True},
            {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
            "project_chosen_gradient=True",
            "Use ZeRO-1 or ZeRO-2",
        ),
        (
            {"project_chosen_gradient": True},
            {"fsdp_plugin_args": {"fsdp_version": 2}},
            "project_chosen_gradient=True is not supported with FSDP",
            "Set project_chosen_gradient=False",
        ),
        (
            {"project_chosen_gradient": True},
            {"fsdp": True},
            "project_chosen_gradient=True is not supported with FSDP",
            "Set project_chosen_gradient=False",
        ),
        (
            {"ref_init": "sft_on_chosen"},
            {"deepspeed_plugin": SimpleNamespace(zero_stage=2)},
            "ref_init='sft_on_chosen'",
            "Train the reference first",
        ),
    ],
    ids=["zero3", "fsdp_args", "fsdp", "sft_deepspeed"],
)
def test_refused_launches(
    settings: dict[str, Any], attribute: dict[str, Any], names: str, fix: str, tmp_path: Path
) -> None:
    """What a launcher sets, set by hand: a real plugin would change the whole process."""
    good = DPOConfig(**config(tmp_path, **settings))
    for name, value in attribute.items():
        setattr(good, name, value)
    with pytest.raises(ValueError) as caught:
        good.check_options()
    assert names in str(caught.value) and fix in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dpop", "dpop_lambda": 1e-6, "dpop_lambda_warmup_steps": 100},
        {"loss_type": "dpo_shift", "dpo_shift_lambda": 1.0, "dpo_shift_lambda_final": 1.0},
        {"loss_type": ["dpop", "robust"], "label_smoothing": 0.1},
        {"entropy_coef": -0.1},
        {"project_chosen_gradient": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"chosen_guard": "raise_lambda", "loss_type": "dpop", "chosen_guard_lambda_max": 50.0},
        {"chosen_guard": "stop", "save_strategy": "steps", "chosen_guard_decay": 0.0, "chosen_guard_floor": 0.0},
        {"chosen_guard": "warn", "chosen_guard_patience": 1, "loss_type": "ipo"},
        {"ref_init": "sft_on_chosen", "ref_init_epochs": 0.5, "ref_init_learning_rate": 1e-4},
        {"f_divergence_type": "forward_kl", "use_weighting": True, "beta": 0.0, "bad_rows": "drop"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_accepted_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    """Values at the edge of what is allowed. Catches a check that refuses too much."""
    kept = DPOConfig(**config(tmp_path, **settings))
    for name, value in settings.items():
        assert getattr(kept, name) == ([value] if name == "loss_type" and isinstance(value, str) else value)


@pytest.mark.parametrize("loss_type", ["dpo", "sigmod", ["dpop", "sfft"]])
def test_an_unknown_loss_is_refused_before_the_model_is_loaded(loss_type: Any, tmp_path: Path) -> None:
    """TRL finds out in the first step, with the model loaded and the data tokenised."""
    settings = DPOConfig(**config(tmp_path, loss_type=loss_type))
    with pytest.raises(ValueError, match="loss_type") as caught:
        build(DPOTrainer, settings, str(tmp_path / "no such model"))
    wrong = loss_type if isinstance(loss_type, str) else loss_type[1]
    assert f"['{wrong}'] is unknown" in str(caught.value)
    assert "'dpop'" in str(caught.value) and "'sigmoid_norm'" in str(caught.value)

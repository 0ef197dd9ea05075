"""`chosen_guard`: its arithmetic, when it measures, and what it does about chosen answers that fall."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainers.dpo_worker import CHOSEN, QUESTIONS, REJECTED, collated, near_pairs, plain_logps, settings
from tests.trainers.harness import assert_bit_equal, history, weights
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.trainers.chosen_guard import ChosenGuard
from trl_ext.trainers.state import STATE_FILE

# Plain DPO with these loses about 0.04 nats per token and step on the chosen answers, with SFT it gains.
FALLING: dict[str, Any] = {"optim": "sgd", "learning_rate": 1e-2, "beta": 1.0, "max_steps": 8}
HEALTHY: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 8, "loss_type": ["sigmoid", "sft"]}
# A penalty too small to hold anything.
WEAK_DPOP: dict[str, Any] = FALLING | {"loss_type": ["dpop"], "dpop_lambda": 0.01}
WATCHED: dict[str, Any] = {"chosen_guard_floor": 0.1, "chosen_guard_patience": 2, "chosen_guard_decay": 0.0}

# ---- arithmetic ----------------------------------------------------------------------------------------------------


def test_the_average_by_hand() -> None:
    """The first measurement starts it. Catches a start at 0 and exchanged weights."""
    guard = ChosenGuard(floor=10.0, patience=1, decay=0.75)
    averages = []
    for value in (-0.2, 0.2, -1.0):
        guard.update(value)
        averages.append(guard.average)
    assert averages == pytest.approx([-0.2, -0.1, -0.325])


def test_decay_zero_is_the_last_measurement() -> None:
    """Catches an average that cannot be switched off."""
    guard = ChosenGuard(floor=0.1, patience=1, decay=0.0)
    assert [guard.update(value) for value in (-0.05, -0.2, -0.05)] == [False, True, False]
    assert guard.average == -0.05


def test_patience_counts_consecutive_measurements_and_starts_over() -> None:
    """Catches a total count, an alarm every measurement once it has begun, and one measurement too early or late."""
    guard = ChosenGuard(floor=0.1, patience=3, decay=0.0)
    values = [-1, -1, 0, -1, -1, -1, -1, -1, -1, 0]
    acts = [guard.update(float(value)) for value in values]
    assert [index for index, act in enumerate(acts) if act] == [5, 8]
    assert guard.below == 0


def test_the_floor_itself_is_not_below() -> None:
    """Catches >= for >: with floor 0 a policy equal to its reference would alarm at once."""
    guard = ChosenGuard(floor=0.0, patience=1, decay=0.0)
    assert guard.content
    assert not guard.update(0.0)
    assert guard.content
    assert guard.update(-1e-6)
    assert not guard.content, "acting does not make it content"


def test_state_survives_a_file() -> None:
    """Catches a forgotten counter, and numbers that JSON cannot carry."""
    guard = ChosenGuard(floor=0.1, patience=3, decay=0.5)
    for value in (-1.0, -0.3):
        guard.update(value)
    restored = ChosenGuard(floor=0.1, patience=3, decay=0.5)
    restored.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert restored == guard
    assert restored.update(-0.7) and guard.update(-0.7)
    assert restored == guard


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_measurement_that_is_not_finite_raises(value: float) -> None:
    """Catches a NaN average, which is never below any floor and stays NaN for good."""
    guard = ChosenGuard(floor=0.1, patience=1, decay=0.5, average=-0.05)
    with pytest.raises(FloatingPointError, match="diverged"):
        guard.update(value)
    assert guard.average == -0.05


# ---- in the trainer ------------------------------------------------------------------------------------------------


def uneven_pairs(start: int = 0, count: int = 3) -> Dataset:
    """Rows whose answers have different lengths."""
    rows = range(start, start + count)
    return Dataset.from_dict(
        {
            "prompt": [QUESTIONS[row] for row in rows],
            "chosen": [CHOSEN[row] + " the" * 3 * (row - start) for row in rows],
            "rejected": [REJECTED[row] for row in rows],
        }
    )


class Copies(TrainerCallback):
    """Weights at the beginning of each optimiser step and at each evaluation."""

    def __init__(self) -> None:
        self.at_step: list[dict[str, torch.Tensor]] = []
        self.at_evaluation: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.at_step.append({name: p.detach().clone() for name, p in model.state_dict().items()})

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.at_evaluation.append({name: p.detach().clone() for name, p in model.state_dict().items()})


def build(model: Path, folder: Path, eval_dataset: Any = None, **overrides: Any) -> Any:
    """A trainer that has not trained; `seen` holds what its guard will measure."""
    arguments = {name: overrides.pop(name) for name in ("callbacks", "train_dataset") if name in overrides}
    trainer = DPOTrainer(
        str(model),
        args=DPOConfig(**settings(folder, **overrides)),
        eval_dataset=eval_dataset,
        **({"train_dataset": near_pairs(8)} | arguments),
    )
    guard, trainer.seen = trainer._ext_guard, []
    if guard is not None:
        update = guard.update

        def recorded(value: float) -> bool:
            trainer.seen.append(value)
            return bool(update(value))

        guard.update = recorded
    return trainer


def run(model: Path, folder: Path, resume: str | None = None, **overrides: Any) -> Any:
    """The same after training."""
    trainer = build(model, folder, **overrides)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def drift(folder: Path, state: dict[str, torch.Tensor], trainer: Any, *datasets: Any) -> float:
    """Chosen log-probability per token of `state` against the model in `folder`, by plain logits, over all rows."""
    total = tokens = 0.0
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    policy.load_state_dict(state)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for dataset in datasets:
        batch = collated(trainer, dataset)
        with torch.no_grad():
            difference = plain_logps(policy, batch) - plain_logps(reference, batch)
        total += difference.chunk(2)[0].sum().item()
        tokens += batch["completion_mask"].chunk(2)[0].sum().item()
    return total / tokens


def alarms(values: list[float], decay: float, floor: float = 0.1, patience: int = 2) -> list[int]:
    """The 1-based measurements after which the guard acts, replayed."""
    average, below, found = values[0], 0, []
    for index, value in enumerate(values):
        average = decay * average + (1 - decay) * value
        below = below + 1 if average < -floor else 0
        if below == patience:
            found.append(index + 1)
            below = 0
    return found


def guard_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [text for text in said if "chosen_guard: at step" in text]


def test_warn_says_so_and_trains_on(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning per alarm, with step and size; the weights are those of a run without the guard, bit for bit.

    Catches an alarm at the wrong step, one that disturbs training, and one that nobody can see.
    """
    plain = run(tiny_model, tmp_path, **FALLING)
    caplog.clear()
    watched = run(tiny_model, tmp_path, chosen_guard="warn", **WATCHED, **FALLING)
    values = history(plain, "logps/chosen_vs_ref_per_token")
    expected = alarms(values, decay=0.0)
    assert len(expected) == 2, "the case must alarm more than once"
    said = guard_warnings(caplog)
    # A batch measures the weights before its own step.
    assert [int(text.split("at step ")[1].split()[0]) + 1 for text in said] == expected
    assert f"{-values[expected[0] - 1]:.3g} nats per token" in said[0] and "loss_type ['dpop']" in said[0]
    assert watched.state.global_step == 8
    assert_bit_equal(weights(watched), weights(plain))
    assert history(watched, "chosen_guard/ema") == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("decay", [None, 0.8])
def test_the_average_on_batches(decay: float | None, tiny_model: Path, tmp_path: Path) -> None:
    """Replayed from the logged batches: 0.9 unless set, and once per step. Catches the decay of evaluation sets."""
    trainer = run(tiny_model, tmp_path, chosen_guard="warn", chosen_guard_decay=decay, **FALLING)
    values = history(trainer, "logps/chosen_vs_ref_per_token")
    kept, average, expected = decay or 0.9, values[0], []
    for value in values:
        average = kept * average + (1 - kept) * value
        expected.append(average)
    assert history(trainer, "chosen_guard/ema") == pytest.approx(expected, abs=1e-6)
    assert expected[-1] < -0.05


@pytest.mark.parametrize("save_total_limit", [None, 1, 2])
def test_stop_keeps_a_checkpoint_from_before(
    save_total_limit: int | None, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends at the alarm; the newest checkpoint whose weights were measured above the floor survives rotation.

    Catches a run that goes on, a record of the fallen checkpoint, and a rotation that deletes the good one.
    """
    trainer = run(
        tiny_model, tmp_path, chosen_guard="stop", save_strategy="steps", save_steps=1,
        save_total_limit=save_total_limit, **WATCHED, **FALLING,
    )  # fmt: skip
    values = trainer.seen
    (alarm,) = alarms(values, decay=0.0)
    assert trainer.state.global_step == alarm < 8
    # A batch of step n is measured with the weights of checkpoint n - 1.
    newest_good = max(step for step, value in enumerate(values) if value >= -0.1)
    assert newest_good == alarm - 3
    good = tmp_path / f"checkpoint-{newest_good}"
    assert trainer.state.best_model_checkpoint == str(good)
    assert AutoModelForCausalLM.from_pretrained(good).num_parameters() > 0
    # transformers ends a run with save_total_limit=1 by keeping the recorded checkpoint alone.
    expected = {None: range(1, alarm + 1), 1: [newest_good], 2: [newest_good, alarm]}[save_total_limit]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in expected}
    if save_total_limit != 1:
        # Whoever reads only the newest checkpoint finds the good one too.
        newest = json.loads((tmp_path / f"checkpoint-{alarm}" / "trainer_state.json").read_text())
        assert newest["best_model_checkpoint"] == str(good)
    (said,) = guard_warnings(caplog)
    assert f"The run ends; the checkpoint to use is {good}." in said


def test_stop_on_an_evaluation_set_keeps_weights_above_the_floor(tiny_model: Path, tmp_path: Path) -> None:
    """Evaluated before each save, so the recorded checkpoint itself is above the floor, by plain logits.

    Catches a record that is one evaluation late.
    """
    trainer = run(
        tiny_model, tmp_path, eval_dataset=near_pairs(4), chosen_guard="stop", save_strategy="steps", save_steps=1,
        save_total_limit=1, eval_strategy="steps", eval_steps=1, **WATCHED, **FALLING,
    )  # fmt: skip
    assert trainer.state.global_step < 8
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.float32)
    step = int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])
    value = drift(tiny_model, best.state_dict(), trainer, trainer.eval_dataset)
    assert value == pytest.approx(trainer.seen[step - 1], abs=1e-5)
    assert value >= -0.1 > trainer.seen[step]


def test_stop_records_nothing_that_no_evaluation_has_approved(tiny_model: Path, tmp_path: Path) -> None:
    """Saved every step and evaluated every second one: the recorded checkpoint is above the floor all the same.

    Catches the newest checkpoint before the alarm, which fell since the evaluation before it.
    """
    trainer = run(
        tiny_model, tmp_path, eval_dataset=near_pairs(8), chosen_guard="stop", save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=2, **(WATCHED | {"chosen_guard_patience": 1}), **FALLING,
    )  # fmt: skip
    assert trainer.seen[0] > -0.1 > trainer.seen[-1]
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.float32)
    assert drift(tiny_model, best.state_dict(), trainer, trainer.eval_dataset) >= -0.1


def test_an_evaluation_set_that_is_never_evaluated(tiny_model: Path, tmp_path: Path) -> None:
    """`eval_dataset` without `eval_strategy`, whose default is "no": refused, or watched on the batches.

    Catches a guard that is on and never measures anything.
    """
    try:
        trainer = run(tiny_model, tmp_path, eval_dataset=near_pairs(4), chosen_guard="warn", **WATCHED, **FALLING)
    except ValueError as error:
        assert "eval_strategy" in str(error)
    else:
        assert len(trainer.seen) == 8


def test_stop_without_a_good_checkpoint_says_so(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a path that does not exist in the message."""
    trainer = run(
        tiny_model, tmp_path, chosen_guard="stop", save_strategy="steps", save_steps=100, **WATCHED, **FALLING
    )
    assert trainer.state.global_step < 8
    assert trainer.state.best_model_checkpoint is None
    (said,) = guard_warnings(caplog)
    assert "no checkpoint was written before the fall" in said


@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_run_never_triggers(
    seed: int, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All steps are done without a word; the recorded checkpoint is the newest that a later batch has measured."""
    trainer = run(
        tiny_model, tmp_path, chosen_guard="stop", save_strategy="steps", save_steps=2, seed=seed,
        **(WATCHED | {"chosen_guard_floor": 0.0, "chosen_guard_patience": 1}), **HEALTHY,
    )  # fmt: skip
    assert trainer.state.global_step == 8
    assert not guard_warnings(caplog)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert history(trainer, "logps/chosen_vs_ref_per_token")[-1] > 0


def test_raise_lambda_doubles_up_to_its_limit(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """dpop_lambda 0.01 -> 0.02 -> 0.025, each from the step after the alarm. Catches a missing cap, a factor of 4."""
    trainer = run(
        tiny_model, tmp_path, chosen_guard="raise_lambda", chosen_guard_lambda_max=0.025,
        **(WATCHED | {"chosen_guard_patience": 1}), **WEAK_DPOP,
    )  # fmt: skip
    acted = alarms(trainer.seen, decay=0.0, patience=1)
    assert len(acted) >= 3, "the case must reach the limit and stay there"
    used = [0.01 if step <= acted[0] else 0.02 if step <= acted[1] else 0.025 for step in range(1, 9)]
    assert history(trainer, "dpop/lambda") == pytest.approx(used)
    assert trainer.ext_dpop_lambda == pytest.approx(0.025)
    assert trainer.state.global_step == 8
    assert [text.rsplit(" ", 1)[1] for text in guard_warnings(caplog)[:3]] == ["0.02.", "0.025.", "0.025."]


def test_a_raised_lambda_reaches_the_loss(tiny_model: Path, tmp_path: Path) -> None:
    """The same falling run with a guard that may raise a lot ends with likelier chosen answers.

    Catches a factor that is logged and not used.
    """
    ends = []
    raising: dict[str, Any] = (
        {"chosen_guard": "raise_lambda"} | WATCHED | {"chosen_guard_patience": 1, "chosen_guard_floor": 0.05}
    )
    for options in ({}, raising):
        run_settings = WEAK_DPOP | {"dpop_lambda": 0.1, "max_steps": 12}
        trainer = run(tiny_model, tmp_path, **options, **run_settings)
        ends.append(history(trainer, "logps/chosen_vs_ref_per_token")[-1])
    assert ends[1] > ends[0] + 0.05


# ---- what is measured, and when ------------------------------------------------------------------------------------


def test_one_measurement_per_evaluation_over_the_whole_set(tiny_model: Path, tmp_path: Path) -> None:
    """3 rows in batches of 2, answers of different lengths: each value is all tokens' mean, by plain logits.

    Catches a mean of batch means, training batches mixed in, and the last batch alone. The default decay is 0.5.
    """
    copies = Copies()
    trainer = run(
        tiny_model, tmp_path, eval_dataset=uneven_pairs(), chosen_guard="warn", eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=2, callbacks=[copies], **FALLING,
    )  # fmt: skip
    assert len(copies.at_evaluation) == 4
    expected = [drift(tiny_model, state, trainer, trainer.eval_dataset) for state in copies.at_evaluation]
    assert trainer.seen == pytest.approx(expected, abs=1e-5)
    average = expected[0]
    for value in expected:
        average = 0.5 * average + 0.5 * value
    assert trainer._ext_guard.average == pytest.approx(average, abs=1e-5)
    # Logged with the training step after the evaluation, once.
    assert len(history(trainer, "chosen_guard/ema")) == 3
    assert not history(trainer, "eval_chosen_guard/ema")


def test_two_evaluation_sets_are_one_measurement(tiny_model: Path, tmp_path: Path) -> None:
    """A dict of sets is evaluated set by set. Catches a measurement per set, and one of the last set alone."""
    copies = Copies()
    sets = {"first": uneven_pairs(0, 3), "second": uneven_pairs(3, 4)}
    trainer = run(
        tiny_model, tmp_path, eval_dataset=sets, chosen_guard="warn", eval_strategy="steps", eval_steps=4,
        callbacks=[copies], **FALLING,
    )  # fmt: skip
    assert len(copies.at_evaluation) == 4
    states = copies.at_evaluation[::2]
    expected = [drift(tiny_model, state, trainer, *trainer.eval_dataset.values()) for state in states]
    assert trainer.seen == pytest.approx(expected, abs=1e-5)
    assert drift(tiny_model, states[-1], trainer, trainer.eval_dataset["first"]) != pytest.approx(
        expected[-1], abs=1e-3
    )


def test_one_measurement_per_optimiser_step_with_accumulation(tiny_model: Path, tmp_path: Path) -> None:
    """Two micro-batches of two pairs: one value over the tokens of all four pairs, at the weights before the step.

    Catches a measurement per micro-batch, and the last micro-batch alone.
    """
    copies = Copies()
    trainer = run(
        tiny_model, tmp_path, train_dataset=uneven_pairs(0, 4), chosen_guard="warn", callbacks=[copies],
        per_device_train_batch_size=2, gradient_accumulation_steps=2, **(FALLING | {"max_steps": 3}),
    )  # fmt: skip
    expected = [drift(tiny_model, state, trainer, trainer.train_dataset) for state in copies.at_step]
    assert trainer.seen == pytest.approx(expected, abs=1e-5)
    assert expected[0] == pytest.approx(0.0, abs=1e-6) and abs(expected[-1]) > 1e-3


def test_a_last_batch_that_is_not_full_counts_wholly(tiny_model: Path, tmp_path: Path) -> None:
    """6 rows in micro-batches of 4 and 2, accumulated over both: the Trainer fetches both before it uses the first.

    Catches a measurement that cuts the first micro-batch to the size of the last (accelerate's gather_for_metrics
    does, once the loader has ended).
    """
    copies = Copies()
    trainer = run(
        tiny_model, tmp_path, train_dataset=uneven_pairs(0, 6), chosen_guard="warn", callbacks=[copies],
        gradient_accumulation_steps=2, **(FALLING | {"max_steps": 3}),
    )  # fmt: skip
    expected = [drift(tiny_model, state, trainer, trainer.train_dataset) for state in copies.at_step]
    assert trainer.seen == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("as_dict", [False, True])
def test_evaluating_outside_training_changes_nothing(as_dict: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Before and after training. Catches a measurement of an evaluation that is not part of the run."""
    sets: Any = {"a": uneven_pairs(), "b": near_pairs(2)} if as_dict else uneven_pairs()
    options: dict[str, Any] = {"chosen_guard": "warn", "eval_strategy": "steps", "eval_steps": 4} | WATCHED | FALLING
    alone = run(tiny_model, tmp_path, eval_dataset=sets, **options)
    trainer = build(tiny_model, tmp_path, eval_dataset=sets, **options)
    trainer.evaluate()
    trainer.evaluate(near_pairs(3))
    assert trainer.seen == [] and trainer._ext_guard.average is None
    trainer.train()
    state = trainer._ext_guard.state_dict()
    trainer.evaluate()
    assert trainer.seen == alone.seen and len(alone.seen) == 2
    assert trainer._ext_guard.state_dict() == state == alone._ext_guard.state_dict()


def test_an_evaluation_does_not_count_as_a_batch(tiny_model: Path, tmp_path: Path) -> None:
    """Without an evaluation set the guard watches batches; evaluate(some dataset) must not add to them."""
    options: dict[str, Any] = {"chosen_guard": "warn"} | WATCHED | FALLING
    alone = run(tiny_model, tmp_path, **options)
    trainer = build(tiny_model, tmp_path, **options)
    trainer.evaluate(uneven_pairs())
    trainer.train()
    assert trainer.seen == alone.seen and len(alone.seen) == 8


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["batches", "evaluation set"])
def test_a_resumed_run_is_the_whole_run(where: str, tiny_model: Path, tmp_path: Path) -> None:
    """6 steps = 3 + 3: average, counter, raised lambda and weights. Catches a guard or a lambda that starts over."""
    options: dict[str, Any] = WEAK_DPOP | WATCHED | {
        "chosen_guard": "raise_lambda", "chosen_guard_lambda_max": 10.0, "chosen_guard_floor": 0.03,
        "chosen_guard_decay": 0.3, "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    if where == "batches":
        options |= {"chosen_guard_patience": 3}
    else:
        options |= {"eval_dataset": near_pairs(4), "eval_strategy": "steps", "eval_steps": 1}
    whole = run(tiny_model, tmp_path / "whole", **options)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    state = json.loads((checkpoint / STATE_FILE).read_text())
    if where == "batches":
        assert state["chosen_guard"]["below"] == 2 and state["dpop_lambda_factor"] == 1.0
    else:
        assert state["chosen_guard"]["below"] == 1 and state["dpop_lambda_factor"] == 2.0
    resumed = run(tiny_model, tmp_path / "whole", resume=str(checkpoint), **options)
    assert len(resumed.seen) == 3 and resumed.seen == whole.seen[3:]
    assert resumed._ext_guard.state_dict() == whole._ext_guard.state_dict()
    assert resumed._ext_lambda_factor == whole._ext_lambda_factor > 1
    assert_bit_equal(weights(resumed), weights(whole))


def test_a_checkpoint_without_our_state_warns(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of TRL, or of a run without the guard. Catches a crash, and a silent fresh start."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2} | FALLING | {"max_steps": 4}
    run(tiny_model, tmp_path, **options)
    checkpoint = tmp_path / "checkpoint-2"
    assert not (checkpoint / STATE_FILE).exists(), "no guard, no file"
    caplog.clear()
    resumed = run(tiny_model, tmp_path, resume=str(checkpoint), chosen_guard="warn", **options)
    assert "checkpoint-2 holds no state of chosen_guard" in caplog.text
    assert len(resumed.seen) == 2


def test_a_damaged_state_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a half-written file that counts as no file."""
    options: dict[str, Any] = (
        {"save_strategy": "steps", "save_steps": 2, "chosen_guard": "warn"} | FALLING | {"max_steps": 4}
    )
    run(tiny_model, tmp_path, **options)
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / STATE_FILE).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        run(tiny_model, tmp_path, resume=str(checkpoint), **options)


def test_the_user_s_metric_chooses_the_best_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    """metric_for_best_model set: its checkpoint is the recorded one. Catches a guard that overrules it.

    The evaluation loss falls with the chosen answers, so the two choices differ.
    """
    trainer = run(
        tiny_model, tmp_path, eval_dataset=near_pairs(8), chosen_guard="stop", save_strategy="steps", save_steps=1,
        eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", greater_is_better=False,
        **WATCHED, **FALLING,
    )  # fmt: skip
    losses = history(trainer, "eval_loss")
    best = losses.index(min(losses)) + 1
    newest_good = max(step for step, value in enumerate(trainer.seen, start=1) if value >= -0.1)
    assert trainer.state.global_step < 8 and best > newest_good
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


def test_a_diverged_policy_raises(tiny_model: Path, tmp_path: Path) -> None:
    """Catches NaN log-probabilities that never count as below the floor."""
    trainer = build(tiny_model, tmp_path, chosen_guard="warn", **FALLING)
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = math.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        trainer.train()


def test_precomputed_reference_values_are_watched_too(tiny_model: Path, tmp_path: Path) -> None:
    """precompute_ref_log_probs leaves no reference model in memory. Catches a drift against the trained policy."""
    seen = []
    for precompute in (False, True):
        trainer = run(
            tiny_model, tmp_path, chosen_guard="warn", precompute_ref_log_probs=precompute,
            **(FALLING | {"max_steps": 3}),
        )  # fmt: skip
        seen.append(trainer.seen)
    assert seen[1] == pytest.approx(seen[0], abs=1e-6)
    assert seen[0][-1] < -0.05


def test_the_state_file_is_all_that_the_guard_adds(tiny_model: Path, tmp_path: Path) -> None:
    """Catches temporary files left in the checkpoint."""
    names = []
    for number, guard in enumerate(("off", "warn")):
        folder = tmp_path / str(number)
        run(tiny_model, folder, chosen_guard=guard, save_strategy="steps", save_steps=2, **(FALLING | {"max_steps": 2}))
        names.append(set(os.listdir(folder / "checkpoint-2")))
    assert names[1] - names[0] == {STATE_FILE}

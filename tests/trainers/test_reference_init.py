"""`ref_init='sft_on_chosen'`: the reference is the given model after maximum likelihood on the chosen answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainers.dpo_worker import collated, near_pairs, plain_logps, settings
from tests.trainers.harness import assert_bit_equal, history, lora
from tests.trainers.losses import perturb
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.trainers import reference_init

REF_INIT = {"ref_init": "sft_on_chosen", "ref_init_epochs": 2.0, "ref_init_learning_rate": 5e-3}


def build(model: Any, folder: Path, dataset: Any = None, **overrides: Any) -> Any:
    """A trainer that has not trained."""
    names = ("peft_config", "ref_model", "processing_class", "eval_dataset")
    arguments = {name: overrides.pop(name) for name in names if name in overrides}
    return DPOTrainer(
        str(model) if isinstance(model, Path) else model,
        args=DPOConfig(**settings(folder, **(REF_INIT | overrides))),
        train_dataset=near_pairs(8) if dataset is None else dataset,
        **arguments,
    )


def made(folder: Path) -> list[Path]:
    """The references in an output folder."""
    return sorted(folder.glob("ref_init-*"))


def state(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class SFTSpy:
    """Counts the supervised runs and keeps the last trainer and what it was resumed from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resumed: list[Any] = []
        self.trainer: Any = None
        train = trl.SFTTrainer.train

        def watched(trainer: Any, *args: Any, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
            self.trainer = trainer
            self.resumed.append(resume_from_checkpoint)
            return train(trainer, *args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

        monkeypatch.setattr(trl.SFTTrainer, "train", watched)


@pytest.fixture
def sft(monkeypatch: pytest.MonkeyPatch) -> SFTSpy:
    return SFTSpy(monkeypatch)


def test_policy_and_reference_are_the_trained_model(tiny_model: Path, tmp_path: Path) -> None:
    """Both start as the supervised result: loss ln 2 at step 0, and every chosen answer likelier than before.

    Catches a reference that is still the given model, a policy that is, and training on the rejected answers.
    """
    trainer = build(tiny_model, tmp_path)
    (folder,) = made(tmp_path)
    result, given = state(folder / "model"), state(tiny_model)
    assert_bit_equal(state(trainer.ref_model), result)
    assert_bit_equal(state(trainer.model), result)
    assert not any(torch.equal(result[name], given[name]) for name in result if "proj" in name)
    batch = collated(trainer)
    with torch.no_grad():
        before = plain_logps(AutoModelForCausalLM.from_pretrained(tiny_model), batch)
        after = plain_logps(trainer.ref_model, batch)
    rise = (after - before).chunk(2)[0]
    assert (rise > 1.0).all(), rise
    trainer.train()
    assert history(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert history(trainer, "logps/chosen_vs_ref")[0] == pytest.approx(0.0, abs=1e-4)
    assert_bit_equal(state(trainer.ref_model), result)
    assert not list(folder.glob("checkpoint-*")), "what the finished run no longer needs is gone"


def test_an_adapter_is_the_trained_adapter(tiny_model: Path, tmp_path: Path) -> None:
    """With LoRA policy and reference are two copies of the supervised adapter on the untouched base.

    Catches a reference with the adapter off (the given model), an adapter that starts anew, and a `ref` that trains.
    """
    trainer = build(
        tiny_model, tmp_path, peft_config=lora(), learning_rate=0.1, ref_init_learning_rate=0.05,
        project_chosen_gradient=True,
    )  # fmt: skip
    (folder,) = made(tmp_path)
    saved = load_file(folder / "model" / "adapter_model.safetensors")
    assert isinstance(trainer.model, PeftModel) and trainer.ref_model is None

    def adapter(name: str) -> dict[str, torch.Tensor]:
        parts = trainer.model.state_dict().items()
        return {key.replace(f".{name}.", "."): part.clone() for key, part in parts if f".{name}." in key}

    assert saved and any(part.abs().max() > 0 for key, part in saved.items() if "lora_B" in key)
    assert_bit_equal(adapter("default"), saved)
    assert_bit_equal(adapter("ref"), saved)
    base = state(trainer.model.get_base_model())
    for name, tensor in state(tiny_model).items():
        own = base.get(name, base.get(name.replace(".weight", ".base_layer.weight")))
        assert own is not None and torch.equal(own, tensor), name
    batch = collated(trainer)
    with torch.no_grad():
        after = plain_logps(trainer.model, batch)
        with trainer.model.disable_adapter():
            before = plain_logps(trainer.model, batch)
    assert ((after - before).chunk(2)[0] > 0.1).all()
    trainer.train()
    assert history(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert_bit_equal(adapter("ref"), saved)
    assert any(not torch.equal(part, saved[key]) for key, part in adapter("default").items())


@pytest.mark.parametrize("form", ["standard", "conversational", "implicit"])
def test_it_trains_on_the_tokens_of_the_chosen_answers(
    form: str, sft: SFTSpy, tiny_model: Path, tmp_path: Path
) -> None:
    """Token by token what DPO sees as prompt and chosen answer, the end of turn included, answers alone in the loss.

    Catches another template or tokenisation, training on prompts, a missing end.
    """
    rows = [
        {"prompt": "Why?", "chosen": " Because.", "rejected": " No idea."},
        {"prompt": "为什么？", "chosen": "因为。", "rejected": "不知道。"},
    ]
    if form != "standard":
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        rows = [{name: [{"role": roles[name], "content": text}] for name, text in row.items()} for row in rows]  # type: ignore[misc]
    if form == "implicit":
        rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]
    dataset = Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
    trainer = build(tiny_model, tmp_path, dataset)
    assert len(sft.trainer.train_dataset) == len(trainer.train_dataset) == 2
    for theirs, ours in zip(sft.trainer.train_dataset, trainer.train_dataset, strict=True):
        assert theirs["input_ids"] == ours["prompt_ids"] + ours["chosen_ids"]
    batch = sft.trainer.data_collator(list(sft.trainer.train_dataset))
    for labels, ours in zip(batch["labels"].tolist(), trainer.train_dataset, strict=True):
        start = len(ours["prompt_ids"])
        assert labels[:start] == [-100] * start
        assert [label for label in labels if label != -100] == ours["chosen_ids"]
    assert trainer.train_dataset.num_rows == 2 and "rejected_ids" in trainer.train_dataset.column_names


def test_the_settings_of_the_supervised_run(sft: SFTSpy, tiny_model: Path, tmp_path: Path) -> None:
    """Epochs and learning rate are its own; batch, accumulation, precision and seed are DPO's."""
    build(
        tiny_model, tmp_path, seed=11, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-7,
        max_steps=1, max_length=64,
    )  # fmt: skip
    args = sft.trainer.args
    assert (args.num_train_epochs, args.learning_rate) == (2.0, 5e-3)
    assert (args.seed, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (11, 2, 2)
    assert args.bf16 is False and args.max_length == 64
    assert sft.trainer.state.global_step == 4, "8 rows, 4 to a step, 2 epochs, whatever DPO's max_steps"


def test_the_second_run_uses_the_first_one_s(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same data, model and settings: no supervised run, equal weights. What DPO alone uses does not count.

    Catches a key with something random in it, and one over the settings of DPO.
    """
    first = build(tiny_model, tmp_path, peft_config=lora())

    def train(*_: Any, **__: Any) -> None:
        raise AssertionError("a second supervised run")

    monkeypatch.setattr(trl.SFTTrainer, "train", train)
    second = build(
        tiny_model, tmp_path, peft_config=lora(), beta=0.5, max_steps=7, save_strategy="steps", save_steps=3,
        learning_rate=3e-4, loss_type=["dpop"], chosen_guard="warn",
    )  # fmt: skip
    assert len(made(tmp_path)) == 1
    assert_bit_equal(state(second.model), state(first.model))


CHANGES: dict[str, dict[str, Any]] = {
    "learning rate": {"ref_init_learning_rate": 4e-3},
    "epochs": {"ref_init_epochs": 1.0},
    "batch size": {"per_device_train_batch_size": 2},
    "seed": {"seed": 8},
    "adapter": {"peft_config": lora()},
    "max_length": {"max_length": 64},
    "one answer": {},
    "order": {},
    "weights": {},
    "template": {},
}


class Chosen(Exception):
    """The folder of a reference is known, and nothing was trained."""


def folder_of(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> str:
    """The name of the folder that these arguments lead to."""

    def train(*arguments: Any) -> None:
        raise Chosen(arguments[-1].name)

    monkeypatch.setattr(reference_init, "_train", train)
    with pytest.raises(Chosen) as chosen:
        build(*args, **kwargs)
    return str(chosen.value)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_result_changes_the_folder(
    change: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a reference from other rows, weights or settings that is taken for this run's."""
    options, dataset, model = dict(CHANGES[change]), near_pairs(8), tiny_model
    given = folder_of(monkeypatch, tiny_model, tmp_path, dataset)
    assert given == folder_of(monkeypatch, tiny_model, tmp_path, near_pairs(8))
    if change == "one answer":
        dataset = dataset.map(
            lambda row, index: {"chosen": " world" if index == 5 else row["chosen"]}, with_indices=True
        )
    elif change == "order":
        dataset = dataset.select(range(7, -1, -1))
    elif change == "weights":
        model = tmp_path / "other"
        other = AutoModelForCausalLM.from_pretrained(tiny_model)
        perturb(other.model.norm, 1e-3, seed=1)
        other.save_pretrained(model)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(model)
    elif change == "template":
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = tokenizer.chat_template + "\n"
        options["processing_class"] = tokenizer
    assert folder_of(monkeypatch, model, tmp_path, dataset, **options) != given


def test_the_rejected_answers_do_not_count(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rejected answers to the same chosen ones give the same reference."""
    others = near_pairs(8).map(lambda row: {"rejected": row["rejected"] + " world"})
    names = {folder_of(monkeypatch, tiny_model, tmp_path, rows) for rows in (near_pairs(8), others)}
    assert len(names) == 1


@pytest.mark.parametrize("kill", ["in training", "before saving", "while saving"])
@pytest.mark.parametrize("saves", [True, False])
def test_a_killed_run_goes_on_and_finishes(
    kill: str, saves: bool, sft: SFTSpy, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its last checkpoint when there is one, else from the start, with the weights of a run that nobody killed.

    Catches half a result that counts as a whole one, and a second run that trains twice as long.
    """
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1} if saves else {"save_strategy": "no"}
    whole = build(tiny_model, tmp_path / "whole", **options)
    calls = {"steps": 0}
    step, save = trl.SFTTrainer.training_step, trl.SFTTrainer.save_model

    def killed_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls["steps"] += 1
        if calls["steps"] == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    def killed_save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if str(output_dir).endswith("model.partial"):
            if kill == "while saving":
                Path(output_dir).mkdir()
                (Path(output_dir) / "config.json").write_text("{")
            raise KeyboardInterrupt
        return save(self, output_dir, *args, **kwargs)

    with monkeypatch.context() as patch:
        if kill == "in training":
            patch.setattr(trl.SFTTrainer, "training_step", killed_step)
        else:
            patch.setattr(trl.SFTTrainer, "save_model", killed_save)
        with pytest.raises(KeyboardInterrupt):
            build(tiny_model, tmp_path / "killed", **options)
    (folder,) = made(tmp_path / "killed")
    assert not (folder / "model").exists()
    trainer = build(tiny_model, tmp_path / "killed", **options)
    done = 2 if kill == "in training" else 4
    assert sft.resumed[-1] == (str(folder / f"checkpoint-{done}") if saves else None)
    assert_bit_equal(state(trainer.model), state(whole.model))
    assert sorted(path.name for path in folder.iterdir() if path.name != "README.md") == ["model"]


def test_a_checkpoint_that_was_being_written_does_no_harm(sft: SFTSpy, tiny_model: Path, tmp_path: Path) -> None:
    """A kill while a checkpoint is written leaves a folder without a state: the run goes on without it.

    Catches a run that can never be finished because of half a checkpoint.
    """
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    whole = build(tiny_model, tmp_path / "whole", **options)
    (folder,) = made(tmp_path / "whole")
    broken = tmp_path / "killed" / folder.name / "checkpoint-3"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    trainer = build(tiny_model, tmp_path / "killed", **options)
    assert_bit_equal(state(trainer.model), state(whole.model))


def test_bad_rows_are_dropped_before_the_supervised_run(sft: SFTSpy, tiny_model: Path, tmp_path: Path) -> None:
    """An empty chosen answer would teach the reference to end at once."""
    rows = near_pairs(4).map(lambda row, index: {"chosen": "" if index == 2 else row["chosen"]}, with_indices=True)
    build(tiny_model, tmp_path, rows, bad_rows="drop")
    assert len(sft.trainer.train_dataset) == 3


def test_dpo_resumes_with_the_same_reference(tiny_model: Path, tmp_path: Path) -> None:
    """4 steps = 2 + 2. Catches a resumed run whose reference is the given model."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = build(tiny_model, tmp_path, **options)
    whole.train()
    resumed = build(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_bit_equal(state(resumed.ref_model), state(whole.ref_model))
    assert_bit_equal(state(resumed.model), state(whole.model))
    losses = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert losses[-1]["loss"] == pytest.approx(history(whole, "loss")[-1], abs=1e-6)


def test_refusals(tiny_model: Path, tmp_path: Path) -> None:
    """Each says what to do instead, before anything is trained."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(ValueError, match=r"`ref_model` was given. Leave one out"):
        build(tiny_model, tmp_path, ref_model=model)
    with pytest.raises(ValueError, match=r"a name or a path, not as a LlamaForCausalLM"):
        build(model, tmp_path)
    with pytest.raises(ValueError, match=r"whole train_dataset, got a IterableDataset"):
        build(tiny_model, tmp_path, near_pairs(8).to_iterable_dataset())
    with pytest.raises(ValueError, match=r"is for text. Train the reference with SFTTrainer"):
        build(tiny_model, tmp_path, near_pairs(2).add_column("images", [[1], [2]]))
    with pytest.raises(ValueError, match=r"no effect with ref_init='given'"):
        DPOConfig(**settings(tmp_path, ref_init_epochs=2.0))
    assert not made(tmp_path)

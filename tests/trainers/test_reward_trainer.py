"""RewardTrainer: TRL bit for bit without options, heads, members one after another, calibration, saving."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl.trainer.reward_trainer import RewardTrainer as TRLTrainer

import trl_ext
from tests.trainers.harness import assert_bit_equal, history, weights
from tests.trainers.reward_worker import (
    CHOSEN,
    QUESTIONS,
    REJECTED,
    collated,
    lora,
    message,
    one_by_one,
    pairs,
    settings,
    stored,
)
from trl_ext.rewards.reward_card import CARD_FILE, RewardCard
from trl_ext.trainers.bootstrap import bootstrap_weights
from trl_ext.trainers.reward_heads import give_heads

SEED = 7


def build(
    trainer_class: Any, config_class: Any, model: Any, folder: Path, rows: Any = None, /, **arguments: Any
) -> Any:
    """A trainer; what its constructor takes goes there, the rest to the config."""
    names = ("eval_dataset", "peft_config", "quantization_config", "processing_class", "callbacks")
    given = {name: arguments.pop(name) for name in names if name in arguments}
    return trainer_class(
        model=str(model) if isinstance(model, Path) else model,
        args=config_class(**settings(folder, **arguments)),
        train_dataset=pairs() if rows is None else rows,
        **given,
    )


def ours(model: Any, folder: Path, rows: Any = None, /, **arguments: Any) -> Any:
    return build(trl_ext.RewardTrainer, trl_ext.RewardConfig, model, folder, rows, **arguments)


def theirs(model: Any, folder: Path, rows: Any = None, /, **arguments: Any) -> Any:
    return build(trl.RewardTrainer, trl.RewardConfig, model, folder, rows, **arguments)


def logs(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without what a clock measures."""
    times = ("_runtime", "_per_second", "total_flos")
    return [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in trainer.state.log_history]


def classifier(folder: Path, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)


# ---- every option off is TRL -----------------------------------------------------------------------------------------

OFF: dict[str, tuple[Callable[[], Dataset], dict[str, Any]]] = {
    "chat": (pairs, {}),
    "text": (lambda: pairs("text"), {}),
    "accumulation4": (pairs, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
    "margin": (lambda: pairs(margin=True), {}),
    "centring": (pairs, {"center_rewards_coefficient": 0.01}),
    "lora": (pairs, {"peft": True}),
    "lora_text_margin_centring": (
        lambda: pairs("text", margin=True),
        {"peft": True, "center_rewards_coefficient": 0.01, "gradient_accumulation_steps": 2},
    ),
    "bfloat16": (pairs, {"bf16": True}),
    "evaluation": (pairs, {"eval": True, "eval_strategy": "steps", "eval_steps": 1}),
}


def off_arguments(overrides: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(overrides)
    if arguments.pop("peft", False):
        arguments["peft_config"] = lora()
    if arguments.pop("eval", False):
        arguments["eval_dataset"] = pairs(count=5)
    return arguments


@pytest.mark.parametrize("case", OFF)
def test_off_is_trl_bit_for_bit(case: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches any override that acts, draws a random number or casts while its option is off; weights and logs."""
    rows, overrides = OFF[case]
    first = ours(tiny_model, tmp_path / "ours", rows(), **off_arguments(overrides))
    start = weights(first)
    first.train()
    second = theirs(tiny_model, tmp_path / "theirs", rows(), **off_arguments(overrides))
    second.train()
    assert_bit_equal(weights(first), weights(second))
    assert logs(first) == logs(second)
    moved = [name for name, value in weights(first).items() if not torch.equal(value, start[name])]
    assert any("score" in name for name in moved) and any("layers" in name for name in moved)


def test_a_plain_trl_config_is_accepted(tiny_model: Path, tmp_path: Path) -> None:
    """Changing only the trainer's import must do: the config may still be TRL's own, and nothing new is written."""
    first = build(trl_ext.RewardTrainer, trl.RewardConfig, tiny_model, tmp_path / "ours")
    second = theirs(tiny_model, tmp_path / "theirs")
    for trainer, name in ((first, "ours"), (second, "theirs")):
        trainer.train()
        trainer.save_model(str(tmp_path / name / "saved"))
    assert_bit_equal(weights(first), weights(second))
    files = [{file.name for file in (tmp_path / name / "saved").iterdir()} for name in ("ours", "theirs")]
    assert files[0] == files[1]


def test_every_trl_default_is_kept(tmp_path: Path) -> None:
    """Our config changes no default of TRL's fields."""
    mine, base = trl_ext.RewardConfig(**settings(tmp_path)), trl.RewardConfig(**settings(tmp_path))
    for name in base.__dataclass_fields__:
        if name != "logging_dir":
            assert getattr(mine, name) == getattr(base, name), name
    assert isinstance(mine, trl.RewardConfig)


def test_one_seed_gives_one_result_whatever_ran_before(tiny_model: Path, tmp_path: Path) -> None:
    """A single model of ours calibrates after training; a second `train` goes on as TRL's does."""
    first, second = ours(tiny_model, tmp_path / "a"), theirs(tiny_model, tmp_path / "b")
    for trainer in (first, second):
        trainer.train()
        trainer.args.max_steps = 4
        trainer.train()
    assert_bit_equal(weights(first), weights(second))
    assert first.model.training == second.model.training


def test_a_streamed_dataset_trains(tiny_model: Path, tmp_path: Path) -> None:
    """TRL takes an IterableDataset with max_steps. Catches a calibration that needs its length, after the training."""
    first, second = (
        ours(tiny_model, tmp_path / "a", pairs().to_iterable_dataset()),
        theirs(tiny_model, tmp_path / "b", pairs().to_iterable_dataset()),
    )
    for trainer in (first, second):
        trainer.train()
    assert_bit_equal(weights(first), weights(second))


def test_a_streamed_evaluation_dataset_trains(tiny_model: Path, tmp_path: Path) -> None:
    """The same for the held-out pairs of the calibration."""
    trainer = ours(tiny_model, tmp_path, eval_dataset=pairs(count=3).to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 2


def test_held_out_pairs_that_are_all_too_long_do_not_lose_the_training(tiny_model: Path, tmp_path: Path) -> None:
    """TRL filters by max_length; here nothing of the evaluation set is left. Catches an error after the training."""
    long = Dataset.from_dict({"prompt": ["Why? " * 60], "chosen": [" Yes"], "rejected": [" No"]})
    trainer = ours(tiny_model, tmp_path, pairs("text"), eval_dataset=long, max_length=100)
    assert len(trainer.eval_dataset) == 0
    trainer.train()
    assert trainer._ext_card.temperature == 1.0


# ---- heads: loss, gradient, metrics ----------------------------------------------------------------------------------


def heads(model: Any, folder: Path, rows: Any = None, /, **arguments: Any) -> Any:
    return ours(model, folder, rows, **{"ensemble_size": 3, "calibration_rows": 0} | arguments)


def plain_losses(model: Any, batch: dict[str, torch.Tensor], center: float | None, members: int = 3) -> list[Any]:
    """(B,) losses of each member, from plain logits and TRL's own expression."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = []
    for member in range(members):
        chosen, rejected = logits[:, member].chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected - batch.get("margin", 0.0))
        losses.append(loss if center is None else loss + center * (chosen + rejected) ** 2)
    return losses


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("bootstrap", "margin", "center", "mode"),
    [(True, True, 0.3, "train"), (False, False, None, "train"), (True, True, 0.3, "eval")],
    ids=["bootstrap_margin_centring", "plain", "evaluation"],
)
def test_heads_loss_is_the_sum_of_the_members(
    bootstrap: bool, margin: bool, center: float | None, mode: str, adapter: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """Each member's weighted loss computed by itself from plain logits, with its gradient.

    Catches: a mean over members, weights of another member, weights in evaluation, a margin given to one head only.
    """
    trainer = heads(
        tiny_model,
        tmp_path,
        pairs(margin=margin),
        ensemble_bootstrap=bootstrap,
        center_rewards_coefficient=center,
        peft_config=lora() if adapter else None,
    )
    model = trainer.model.train(mode == "train")
    batch = collated(trainer)
    loss, outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    losses = plain_losses(model, batch, center)
    counts = bootstrap_weights(batch["input_ids"], batch["attention_mask"], 3, SEED)
    assert len({tuple(column) for column in counts.T.tolist()}) == 3
    if not bootstrap or mode == "eval":
        counts = torch.ones_like(counts)
    members = [(losses[member] * counts[:, member]).sum() / len(counts) for member in range(3)]
    assert outputs.logits.shape == (16, 3)
    torch.testing.assert_close(loss, members[0] + members[1] + members[2], rtol=1e-6, atol=1e-6)

    score = next(name for name in gradients if "score" in name)
    for member, value in enumerate(members):
        model.zero_grad()
        value.backward(retain_graph=True)
        alone = dict(model.named_parameters())[score].grad
        torch.testing.assert_close(gradients[score][member], alone[member], rtol=1e-5, atol=1e-7)
        assert not torch.cat([alone[:member], alone[member + 1 :]]).any()
    model.zero_grad()
    sum(members).backward()  # type: ignore[attr-defined]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, dict(model.named_parameters())[name].grad, rtol=1e-4, atol=1e-7)


def test_one_forward_of_the_trunk_for_all_heads(tiny_model: Path, tmp_path: Path) -> None:
    """2 steps of 2 micro-batches are 4 forwards. Catches a forward per member, or another one for the metrics."""
    trainer = heads(tiny_model, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    counter: Counter[str] = Counter()
    trainer.model.model.register_forward_hook(lambda *_: counter.update(["trunk"]))
    trainer.train()
    assert counter["trunk"] == 4


def test_metrics_are_those_of_the_mean(tiny_model: Path, tmp_path: Path) -> None:
    """One step on all pairs, so the logs describe the model as it was made.

    Catches: accuracy over members, tokens counted once per member, a spread with ddof 1, margins over members.
    """
    trainer = heads(tiny_model, tmp_path, max_steps=1, per_device_train_batch_size=8, seed=14)
    trainer.model.eval()
    batch = collated(trainer)
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    trainer.train()
    entry = trainer.state.log_history[0]
    chosen, rejected = logits.chunk(2)
    mean = logits.mean(1)
    margins = chosen - rejected
    accuracies = (margins > 0).float().mean(0)
    spread = ((margins - margins.mean(1, keepdim=True)) ** 2).mean(1).sqrt()
    expected = {
        "accuracy": (margins.mean(1) > 0).float().mean(),
        "margin": margins.mean(),
        "min_reward": mean.min(),
        "mean_reward": mean.mean(),
        "max_reward": mean.max(),
        "ensemble/accuracy_min": accuracies.min(),
        "ensemble/accuracy_max": accuracies.max(),
        "ensemble/disagreement": spread.mean(),
        "num_tokens": batch["attention_mask"].sum(),
    }
    for name, value in expected.items():
        assert entry[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
    # The seed makes members that tell the accuracy of the mean from a member's and from the mean accuracy.
    assert expected["accuracy"] not in (accuracies[0], accuracies.max(), accuracies.mean())


def test_metrics_of_an_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    """The logs of an evaluation have the members' numbers, unweighted loss included, and count no tokens."""
    trainer = heads(tiny_model, tmp_path, eval_dataset=pairs(count=8), per_device_eval_batch_size=8)
    trainer.model.eval()
    with torch.no_grad():
        losses = plain_losses(trainer.model, collated(trainer), None)
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(sum(loss.mean().item() for loss in losses), rel=1e-5)
    entry = trainer.state.log_history[-1]
    assert {"eval_accuracy", "eval_ensemble/accuracy_min", "eval_ensemble/disagreement"} <= entry.keys()
    assert entry["eval_num_tokens"] == 0


def test_accumulated_micro_batches_are_one_batch(tiny_model: Path, tmp_path: Path) -> None:
    """4 x 1 pair and 1 x 4 pairs with SGD. Catches weights that depend on the micro-batch, a sum over pairs."""
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    whole = heads(tiny_model, tmp_path / "whole", pairs(margin=True), **sgd)
    parts = heads(
        tiny_model,
        tmp_path / "parts",
        pairs(margin=True),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        **sgd,
    )
    start = weights(whole)
    for trainer in (whole, parts):
        trainer.train()
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=0, atol=2e-6)
    assert (weights(whole)["score.weight"] - start["score.weight"]).abs().max() > 1e-2
    assert history(parts, "accuracy") == pytest.approx(history(whole, "accuracy"))


def test_a_heads_member_that_is_alone_is_trls_model(tiny_model: Path, tmp_path: Path) -> None:
    """With a frozen trunk a head trains as if it were alone: as TRL trains one that starts there.

    Catches a head that is trained on another one's loss, a learning rate that falls with the number of members.
    """
    sgd = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}

    def frozen(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("score" in name)
        return model

    trainer = heads(frozen(classifier(tiny_model)), tmp_path, ensemble_bootstrap=False, **sgd)
    start = trainer.model.score.weight.detach().clone()
    trainer.train()
    for member in range(3):
        model = frozen(classifier(tiny_model))
        model.score.weight.data.copy_(start[member : member + 1])
        single = theirs(model, tmp_path, **sgd)
        single.train()
        torch.testing.assert_close(trainer.model.score.weight[member], single.model.score.weight[0], rtol=0, atol=1e-6)


def test_heads_start_apart_on_the_trunk_of_the_base(tiny_model: Path, tmp_path: Path) -> None:
    """Unrelated rows of the usual size, the same for the same seed, on the trunk that TRL starts from.

    Catches one seed for all heads, heads of size 1 (saturated from the start), a trunk that is drawn anew.
    """
    first, again, other = (heads(tiny_model, tmp_path, seed=seed) for seed in (7, 7, 107))
    base = theirs(tiny_model, tmp_path)
    head = first.model.score.weight
    assert head.shape == (3, 64)
    correlations = torch.corrcoef(torch.cat([head, other.model.score.weight])) - torch.eye(6)
    assert correlations.abs().max() < 0.5
    assert head.std().item() == pytest.approx(base.model.config.initializer_range, rel=0.2)
    assert_bit_equal(weights(first), weights(again))
    trunk = {name: value for name, value in weights(base).items() if name != "score.weight"}
    assert_bit_equal({name: weights(first)[name] for name in trunk}, trunk)
    assert first.model.config.num_labels == 3


def test_heads_take_a_loaded_model(tiny_model: Path, tmp_path: Path) -> None:
    """A model object trains as its folder does. Catches heads that only one of the two ways gets."""
    from_folder = heads(tiny_model, tmp_path)
    from_object = heads(classifier(tiny_model, seed=99), tmp_path)
    for trainer in (from_folder, from_object):
        trainer.train()
    assert_bit_equal(weights(from_folder), weights(from_object))


def test_heads_use_model_init_kwargs(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a second way of loading that forgets what TRL passes on."""
    trainer = heads(tiny_model, tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.score.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_heads_are_resumed(adapter: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Killed after a checkpoint and resumed: as without the kill. Catches heads drawn anew, another sample."""
    options: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    given: dict[str, Any] = {"peft_config": lora()} if adapter else {}
    whole = heads(tiny_model, tmp_path / "whole", **options, **given)
    whole.train()
    given = {"peft_config": lora()} if adapter else {}
    killed = heads(tiny_model, tmp_path / "out", callbacks=[StopInFolder("out")], **options, **given)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    given = {"peft_config": lora()} if adapter else {}
    resumed = heads(tiny_model, tmp_path / "out", **options, **given)
    resumed.train(resume_from_checkpoint=True)
    assert_bit_equal(weights(resumed), weights(whole))


def test_bootstrap_gives_other_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Catches an option that is not read."""
    first, second = heads(tiny_model, tmp_path), heads(tiny_model, tmp_path, ensemble_bootstrap=False)
    for trainer in (first, second):
        trainer.train()
    assert not torch.equal(first.model.score.weight, second.model.score.weight)


def test_heads_keep_the_bias_and_the_name_of_the_old_head() -> None:
    """Catches a bias that is lost, or random, and a head under the other name."""
    model = torch.nn.Module()
    model.classifier = torch.nn.Linear(8, 1)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(initializer_range=0.5))  # type: ignore
    give_heads(model, 4, seed=0)
    assert model.classifier.weight.shape == (4, 8)
    assert 0.3 < model.classifier.weight.std().item() < 0.8
    assert model.classifier.bias.tolist() == [0.0] * 4
    assert not hasattr(model, "score")


def test_heads_refuse_what_has_no_linear_head() -> None:
    """Catches an AttributeError deep in a forward, e.g. for RoBERTa's two-layer head."""
    model = torch.nn.Module()
    model.classifier = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    with pytest.raises(ValueError, match="no linear layer called score or classifier"):
        give_heads(model, 2, seed=0)


def test_heads_refuse_a_ready_adapter(tiny_model: Path, tmp_path: Path) -> None:
    """Catches heads beside the trained copy of the head that the adapter holds."""
    model = get_peft_model(classifier(tiny_model), lora())
    with pytest.raises(ValueError, match="give the base and a peft_config"):
        heads(model, tmp_path)


class StopInFolder(TrainerCallback):
    """Ends the process, so to speak, in the second step of a training with this output folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if Path(args.output_dir).name == self.name and state.global_step == 2:
            raise KeyboardInterrupt


# ---- members one after another --------------------------------------------------------------------------------------

SEQUENTIAL = ("adapters", "models")


def sequential(kind: str, model: Any, folder: Path, rows: Any = None, /, **arguments: Any) -> Any:
    if kind == "adapters":
        arguments.setdefault("peft_config", lora())
    return ours(model, folder, rows, ensemble_size=3, ensemble_kind=kind, **arguments)


def sample(rows: Dataset, member: int) -> Dataset:
    """The bootstrap sample of a member: as many pairs, drawn with replacement."""
    return rows.select(np.random.default_rng([SEED, member]).integers(len(rows), size=len(rows)))


def alone(kind: str, model: Path, folder: Path, member: int, rows: Dataset) -> dict[str, torch.Tensor]:
    """The weights of a plain TRL run with the member's seed on these rows."""
    trainer = theirs(model, folder, rows, seed=SEED + member, peft_config=lora() if kind == "adapters" else None)
    trainer.train()
    trainer.save_model(str(folder))
    return stored(folder)


@pytest.fixture(scope="module", params=SEQUENTIAL)
def trained(request: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Kind, trainer and output folder of three trained members, with checkpoints, saved."""
    folder = tmp_path_factory.mktemp(request.param) / "out"
    trainer = sequential(request.param, tiny_model, folder, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    return request.param, trainer, folder


def test_each_member_is_a_plain_trl_run(trained: tuple[str, Any, Path], tiny_model: Path, tmp_path: Path) -> None:
    """Bit for bit, with the seed and bootstrap sample of the member; the members differ.

    Catches a member on the sample or seed of another, a base or adapter that an earlier member has changed.
    """
    kind, _, folder = trained
    found = [stored(folder / f"member-{member}") for member in range(3)]
    for member in range(3):
        expected = alone(kind, tiny_model, tmp_path / str(member), member, sample(pairs(), member))
        assert_bit_equal(found[member], expected)
    head = next(name for name in found[0] if "score" in name)
    layer = next(name for name in found[0] if "layers" in name and "norm" not in name)
    for name in (head, layer):
        assert not torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[1][name], found[2][name])


def test_without_bootstrap_all_members_have_all_pairs(tiny_model: Path, tmp_path: Path) -> None:
    """Catches an option that only the heads read; and still a seed for each member."""
    trainer = sequential("models", tiny_model, tmp_path / "out", ensemble_bootstrap=False, calibration_rows=0)
    trainer.train()
    for member in (0, 2):
        expected = alone("models", tiny_model, tmp_path / str(member), member, pairs())
        assert_bit_equal(stored(tmp_path / "out" / f"member-{member}"), expected)


def test_layout_of_the_output_folder(trained: tuple[str, Any, Path]) -> None:
    """Members in folders of their own, the card and the tokenizer beside them. Catches member 0 saved at the top."""
    kind, trainer, folder = trained
    top = {path.name for path in folder.iterdir()}
    assert {"member-0", "member-1", "member-2", CARD_FILE, "tokenizer.json", "tokenizer_config.json"} <= top
    assert not [name for name in top if name.endswith(".safetensors") or name.startswith("checkpoint")]
    card = RewardCard.load(folder)
    assert card == trainer._ext_card
    assert card is not None
    assert (card.kind, card.size, card.text_format) == (kind, 3, "chat")
    assert len(card.mean) == len(card.std) == 3
    for member in range(3):
        part = folder / f"member-{member}"
        assert RewardCard.load(part) == RewardCard("single", 1, "chat")
        assert (part / "checkpoint-2").is_dir()
        assert (part / ("adapter_model.safetensors" if kind == "adapters" else "model.safetensors")).is_file()


def test_save_model_copies_into_another_folder(trained: tuple[str, Any, Path], tmp_path: Path) -> None:
    """A folder that is complete by itself, twice, without checkpoints. Catches members that stay behind."""
    _, trainer, folder = trained
    prompts, completions = QUESTIONS[:3], CHOSEN[:3]
    expected = trl_ext.RewardEnsemble.load(folder).member_scores(prompts, completions)
    for _ in range(2):
        trainer.save_model(str(tmp_path / "copy"))
    assert not list((tmp_path / "copy").rglob("checkpoint-*"))
    copied = trl_ext.RewardEnsemble.load(tmp_path / "copy")
    assert copied.size == 3
    assert torch.equal(copied.member_scores(prompts, completions), expected)


def count_training(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Folder and checkpoint of every training that TRL runs from now on."""
    calls: list[tuple[str, Any]] = []
    train = TRLTrainer.train

    def counted(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = resume_from_checkpoint and Path(resume_from_checkpoint).name
        calls.append((Path(self.args.output_dir).name, name))
        return train(self, resume_from_checkpoint, *args, **kwargs)

    monkeypatch.setattr(TRLTrainer, "train", counted)
    return calls


def test_resume_trains_only_what_is_missing(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in member 1 after its first checkpoint: member 0 is kept, member 1 goes on, all as without the kill.

    Catches a finished member that is trained again, a member that starts over, one that is taken for finished.
    """
    kind = "adapters"
    options: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "calibration_rows": 0}
    sequential(kind, tiny_model, tmp_path / "whole", **options).train()
    killed = sequential(kind, tiny_model, tmp_path / "out", callbacks=[StopInFolder("member-1")], **options)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    done = (tmp_path / "out" / "member-0" / "adapter_model.safetensors").stat().st_mtime_ns
    calls = count_training(monkeypatch)
    trainer = sequential(kind, tiny_model, tmp_path / "out", **options)
    trainer.train(resume_from_checkpoint=True)
    assert calls == [("member-1", "checkpoint-1"), ("member-2", None)]
    assert (tmp_path / "out" / "member-0" / "adapter_model.safetensors").stat().st_mtime_ns == done
    for member in range(3):
        name = f"member-{member}"
        assert_bit_equal(stored(tmp_path / "out" / name), stored(tmp_path / "whole" / name))
    calls.clear()
    trainer.train(resume_from_checkpoint=True)
    assert not calls


def test_two_models_at_a_time_are_in_memory(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documentation of `ensemble_kind` says. Catches all members loaded together for the calibration."""
    live: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    counts: list[int] = []
    make = LlamaForSequenceClassification.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        gc.collect()
        live.add(self)
        counts.append(len(live))

    gc.collect()
    monkeypatch.setattr(LlamaForSequenceClassification, "__init__", counted)
    trainer = sequential("models", tiny_model, tmp_path, max_steps=1)
    trainer.train()
    assert max(counts) == 2


def test_a_resumed_ensemble_is_calibrated_as_a_whole_one(tiny_model: Path, tmp_path: Path) -> None:
    """All members done before: the second trainer has trained nothing. Catches its fresh member 0 in the numbers."""
    first = sequential("adapters", tiny_model, tmp_path)
    first.train()
    second = sequential("adapters", tiny_model, tmp_path)
    second.train(resume_from_checkpoint=True)
    assert second._ext_card.mean == pytest.approx(first._ext_card.mean, abs=1e-5)
    assert second._ext_card.std == pytest.approx(first._ext_card.std, abs=1e-5)


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_margins_and_texts_reach_every_member(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches columns that are lost on the way to the members, and a card that calls texts a chat."""
    trainer = sequential(kind, tiny_model, tmp_path / "out", pairs("text", margin=True), center_rewards_coefficient=0.1)
    trainer.train()
    assert trainer._ext_card.text_format == "text"
    rows = sample(pairs("text", margin=True), 2)
    adapter = lora() if kind == "adapters" else None
    single = theirs(
        tiny_model, tmp_path / "a", rows, seed=SEED + 2, peft_config=adapter, center_rewards_coefficient=0.1
    )
    single.train()
    single.save_model(str(tmp_path / "a"))
    assert_bit_equal(stored(tmp_path / "out" / "member-2"), stored(tmp_path / "a"))


# ---- calibration -----------------------------------------------------------------------------------------------------


def plain_scores(trainer: Any, rows: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, count) scores of chosen and rejected rows, each alone."""
    part = rows.select(range(count))
    return one_by_one(trainer.model, part["chosen_ids"]), one_by_one(trainer.model, part["rejected_ids"])


@pytest.mark.parametrize("size", [1, 3])
def test_calibration_by_hand(size: int, tiny_model: Path, tmp_path: Path) -> None:
    """Moments of the first held-out pairs and the temperature of the mean margin; the model trains on as before.

    Catches: moments over members, of one answer only, of training pairs; ddof 1; a temperature of raw margins.
    """
    optimize = pytest.importorskip("scipy.optimize")
    # One of the pairs turned round, so that not every pair is right: else there is no best temperature.
    held_out = Dataset.from_dict(
        {
            "prompt": [*QUESTIONS[:5], QUESTIONS[0], "Why?"],
            "chosen": [*CHOSEN[:5], REJECTED[0], "Blue"],
            "rejected": [*REJECTED[:5], CHOSEN[0], "Red"],
        }
    )
    trainer = ours(
        tiny_model, tmp_path, pairs("text"), ensemble_size=size, calibration_rows=6, eval_dataset=held_out, max_steps=8
    )
    trainer.train()
    assert trainer.model.training
    chosen, rejected = plain_scores(trainer, trainer.eval_dataset, 6)
    both = torch.cat([chosen, rejected], dim=1).double()
    card = trainer._ext_card
    assert card.mean == pytest.approx(both.mean(1).tolist(), abs=1e-5)
    assert card.std == pytest.approx(both.std(1, correction=0).tolist(), rel=1e-4)
    margins = ((chosen - rejected).double() / torch.tensor(card.std).unsqueeze(1)).mean(0)
    assert {value > 0 for value in margins.tolist()} == {True, False}
    found = optimize.minimize_scalar(
        lambda log: -torch.nn.functional.logsigmoid(margins / np.exp(log)).mean().item(),
        bounds=(-6, 6),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert 0.05 < np.exp(found.x) < 20
    assert card.temperature == pytest.approx(np.exp(found.x), rel=1e-3)
    assert card.calibration == "6 held-out pairs"


def test_calibration_on_training_pairs_has_no_temperature(tiny_model: Path, tmp_path: Path) -> None:
    """Also where `eval_dataset` is a dictionary. Catches confidence that is measured on what was trained on."""
    for name, held_out in (("none", None), ("several", {"a": pairs(count=2), "b": pairs(count=3)})):
        trainer = ours(tiny_model, tmp_path / name, eval_dataset=held_out)
        trainer.train()
        assert trainer._ext_card.temperature == 1.0
        assert trainer._ext_card.calibration == "8 training pairs"


def test_members_are_calibrated_on_the_pairs_that_were_given(trained: tuple[str, Any, Path]) -> None:
    """As the documentation of `calibration_rows` says. Catches a calibration on the bootstrap sample of member 0."""
    _, trainer, folder = trained
    ensemble = trl_ext.RewardEnsemble.load(folder)
    ensemble.mean, ensemble.std = [], []
    questions = [message("user", text) for text in QUESTIONS * 2]
    answers = [message("assistant", text) for text in CHOSEN + REJECTED]
    scores = ensemble.member_scores(questions, answers)
    assert trainer._ext_card.mean == pytest.approx(scores.mean(1).tolist(), abs=1e-5)
    assert trainer._ext_card.std == pytest.approx(scores.std(1, correction=0).tolist(), abs=1e-5)


def test_calibration_can_be_switched_off(tiny_model: Path, tmp_path: Path) -> None:
    """Catches scores that are standardised with nothing: the card says that they are used as they are."""
    trainer = heads(tiny_model, tmp_path, eval_dataset=pairs(count=3))
    trainer.train()
    assert trainer._ext_card == RewardCard("heads", 3, "chat")


def test_a_checkpoint_says_nothing_of_an_ensemble(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a card, of an earlier calibration, in a folder that is not finished."""
    trainer = heads(tiny_model, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    assert not list(tmp_path.rglob(CARD_FILE))
    trainer.save_model()
    assert [path.parent for path in tmp_path.rglob(CARD_FILE)] == [tmp_path]


def test_rows_of_tokens_get_the_format_of_the_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """Rows that are tokenised already say nothing of their format. Catches a KeyError on them."""
    rows = ours(tiny_model, tmp_path).train_dataset.select_columns(["chosen_ids", "rejected_ids"])
    trainer = ours(tiny_model, tmp_path, rows)
    trainer.train()
    assert trainer._ext_card.text_format == "chat"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ensemble_size": 0}, "ensemble_size=0"),
        ({"ensemble_size": -2}, "ensemble_size=-2"),
        ({"ensemble_size": 3, "ensemble_kind": "trees"}, "ensemble_kind='trees'"),
        ({"calibration_rows": -1}, "calibration_rows=-1"),
        ({"ensemble_kind": "adapters"}, "no effect with ensemble_size=1"),
        ({"ensemble_kind": "models"}, "no effect with ensemble_size=1"),
    ],
)
def test_the_config_refuses(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches an option that is silently without effect."""
    with pytest.raises(ValueError, match=message):
        trl_ext.RewardConfig(**settings(tmp_path, **options))


@pytest.mark.parametrize("kind", ["heads", *SEQUENTIAL])
def test_deepspeed_takes_heads_only(kind: str, tmp_path: Path) -> None:
    """Members one after another would be one engine after another. Catches a crash at the second member."""
    config = trl_ext.RewardConfig(**settings(tmp_path, ensemble_size=3, ensemble_kind=kind))
    config.deepspeed_plugin = SimpleNamespace(zero_stage=2)  # type: ignore[assignment]
    if kind == "heads":
        config.check_options()
    else:
        with pytest.raises(ValueError, match="DeepSpeed makes one engine per process"):
            config.check_options()


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_members_need_a_base_that_can_be_loaded_again(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches members that go on training one shared model."""
    with pytest.raises(ValueError, match="as a name or a path, not as a LlamaForSequenceClassification"):
        sequential(kind, classifier(tiny_model), tmp_path)


def test_adapters_need_a_peft_config(tiny_model: Path, tmp_path: Path) -> None:
    """Catches M full models under the name of adapters."""
    with pytest.raises(ValueError, match="needs a peft_config"):
        ours(tiny_model, tmp_path, ensemble_size=2, ensemble_kind="adapters")


@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_members_need_the_whole_dataset(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """A stream has no bootstrap sample. Catches an AttributeError, or all members on the same stream."""
    with pytest.raises(ValueError, match="needs the whole train_dataset"):
        sequential(kind, tiny_model, tmp_path, pairs().to_iterable_dataset())


def test_a_frozen_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """As by the other trainers. Catches a training that changes nothing."""
    get_peft_model(classifier(tiny_model), lora()).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(classifier(tiny_model), tmp_path / "adapter")
    with pytest.raises(ValueError, match="no trainable parameter"):
        ours(frozen, tmp_path)


def test_a_head_that_only_has_an_adapter_is_not_lost(tiny_model: Path, tmp_path: Path) -> None:
    """A LoraConfig without task_type makes LoRA of the head too; the random head below it is not saved.

    Catches a folder whose scores are random at each load: it must be refused when it is trained, saved or loaded.
    """
    adapter = LoraConfig(r=4, target_modules="all-linear")
    try:
        trainer = ours(tiny_model, tmp_path, peft_config=adapter)
        trainer.train()
        trainer.save_model()
        ensemble = trl_ext.RewardEnsemble.load(tmp_path)
    except ValueError:
        return
    chosen, _ = plain_scores(trainer, trainer.train_dataset, 4)
    expected = (chosen - torch.tensor(trainer._ext_card.mean)) / torch.tensor(trainer._ext_card.std)
    found = ensemble.member_scores(QUESTIONS[:4], CHOSEN[:4])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


# ---- 4-bit base ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapters", "heads"])
def test_adapters_on_a_4bit_base(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Trained, saved and loaded on a base that is quantised in the same way: the same scores, twice.

    Catches a head that was quantised, a base that is loaded in full, an adapter without its head.
    """
    pytest.importorskip("bitsandbytes")
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options: dict[str, Any] = {"ensemble_size": 2, "ensemble_kind": kind, "peft_config": lora(), "max_steps": 6}
    # As is the default. TRL casts what is trained on a 4-bit base, the head too, to bfloat16.
    trainer = ours(tiny_model, tmp_path, quantization_config=quantized, bf16=True, eval_dataset=pairs(), **options)
    assert trainer.model.is_loaded_in_4bit
    trainer.train()
    trainer.save_model()
    first, second = (
        trl_ext.RewardEnsemble.load(tmp_path, quantization_config=quantized).member_scores(QUESTIONS, CHOSEN)
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert (first[0] - first[1]).abs().min() > 1e-3
    found = torch.cat([first, ensemble_scores(tmp_path, quantized, REJECTED)], dim=1)
    # The moments were taken from the members in memory, with weights of the adapter in bfloat16.
    assert found.mean(1).tolist() == pytest.approx([0.0, 0.0], abs=0.05)
    assert found.std(1, correction=0).tolist() == pytest.approx([1.0, 1.0], abs=0.05)


def ensemble_scores(folder: Path, quantized: Any, completions: list[str]) -> torch.Tensor:
    ensemble = trl_ext.RewardEnsemble.load(folder, quantization_config=quantized)
    return ensemble.member_scores(QUESTIONS, completions)


def test_more_rows_of_pairs_than_calibration_asks_for(tiny_model: Path, tmp_path: Path) -> None:
    """Catches all rows scored after each training, however many there are."""
    rows = concatenate_datasets([pairs(), pairs("chat")])
    trainer = ours(tiny_model, tmp_path, rows, calibration_rows=5)
    trainer.train()
    assert trainer._ext_card.calibration == "5 training pairs"

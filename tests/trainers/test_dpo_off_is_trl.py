"""Every option of `DPOConfig` off: trained weights and logged numbers equal those of TRL's own class, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import PromptTuningConfig
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

import trl_ext
from tests.trainers.harness import assert_bit_equal, weights
from tests.trainers.losses import perturb
from tests.trainers.pairs import ROWS, build, config, lora, pairs, plain_model, train, trained_adapter
from trl_ext.seams.preference import trl_loss_types

OWN_KEYS = {
    "logps/chosen_vs_ref",
    "logps/rejected_vs_ref",
    "logps/chosen_vs_ref_per_token",
    "logps/chosen_less_likely",
    "rewards/accuracies_per_token",
    "rewards/ties_per_token",
}
F_DIVERGENCES = ["forward_kl", "js_divergence", "alpha_divergence"]
VISION_TEMPLATE = """\
{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def both(
    folder: Path, model: Any, dataset: Any = None, plain: bool = False, arguments: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Train ours and TRL's alike, assert that they agree in everything, return both.

    `plain`: ours gets TRL's config too, and must then log TRL's metrics only.
    """
    ours_config = trl.DPOConfig if plain else trl_ext.DPOConfig
    ours = build(trl_ext.DPOTrainer, ours_config(**config(folder, **settings)), model, dataset, **(arguments or {}))
    start = weights(ours)
    ours.train()
    theirs = train(trl.DPOTrainer, trl.DPOConfig(**config(folder, **settings)), model, dataset, **(arguments or {}))
    assert_bit_equal(weights(ours), weights(theirs))
    trained = {name for name, parameter in ours.model.named_parameters() if parameter.requires_grad}
    moved = {name for name, value in weights(ours).items() if not torch.equal(value, start[name])}
    assert moved and moved <= trained, "two equal but untrained models would prove nothing"
    if hasattr(ours.train_dataset, "column_names"):
        assert ours.train_dataset.column_names == theirs.train_dataset.column_names
    _assert_same_log(ours, theirs, set() if plain else OWN_KEYS)
    return ours, theirs


def _assert_same_log(ours: Any, theirs: Any, own_keys: set[str]) -> None:
    """Every number TRL logs but the times, in the same order; ours adds its own metrics to training and evaluation."""
    assert len(ours.state.log_history) == len(theirs.state.log_history)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        timed = {key for key in other if "runtime" in key or "per_second" in key}
        names = {f"{prefix}{key}" for prefix in ("", "eval_") for key in own_keys}
        extra = mine.keys() & names
        assert mine.keys() - extra == other.keys()
        if "loss" in mine or "eval_loss" in mine:
            assert len(extra) == len(own_keys)
        different = [key for key in other.keys() - timed if mine[key] != other[key]]
        assert not different, {key: (mine[key], other[key]) for key in different}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_off_is_trl_bit_for_bit(peft: bool, accumulation: int, tiny_model: Path, tmp_path: Path) -> None:
    """Catches any override that acts, casts or scales while its option is off, also within an accumulation window."""
    both(
        tmp_path,
        tiny_model,
        arguments={"peft_config": lora} if peft else None,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=4 // accumulation,
        max_steps=3,
    )


@pytest.mark.parametrize("settings", [{}, {"ld_alpha": 0.3, "gradient_accumulation_steps": 2}], ids=["plain", "ld"])
def test_a_ready_adapter_trains_against_its_copy(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """TRL copies a given adapter to "ref". Catches a reference with the adapter disabled, and a trained "ref"."""
    ours, _ = both(tmp_path, lambda: trained_adapter(tiny_model), **settings)
    given = dict(trained_adapter(tiny_model).named_parameters())
    copies = {name: value for name, value in weights(ours).items() if ".ref." in name}
    assert copies
    for name, value in copies.items():
        assert torch.equal(value, given[name.replace(".ref.", ".default.")]), name
    first = ours.state.log_history[0]
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0


@pytest.mark.parametrize("loss_type", trl_loss_types())
def test_each_loss_of_trl(loss_type: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches a loss type of TRL's that is treated as ours, dropped, or given other reference log-probabilities."""
    smoothing: dict[str, Any] = {"label_smoothing": 1e-3} if loss_type == "exo_pair" else {}
    both(tmp_path, tiny_model, loss_type=[loss_type], gradient_accumulation_steps=2, **smoothing)


def test_the_list_of_losses_is_trls() -> None:
    """The parametrisation above is read from TRL's source: catches a pattern that finds some of them only."""
    assert {"sigmoid", "sft", "bco_pair", "discopop", "sigmoid_norm", "aot_unpaired"} <= set(trl_loss_types())
    assert len(trl_loss_types()) == len(set(trl_loss_types())) == 15


def test_a_weighted_mixture(tiny_model: Path, tmp_path: Path) -> None:
    """Catches weights that are reordered, lost or applied twice when the list of losses is filtered."""
    both(tmp_path, tiny_model, loss_type=["sigmoid", "sft", "bco_pair"], loss_weights=[0.8, 0.3, 1.7], max_steps=3)


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
def test_each_f_divergence(divergence: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches a reference log-probability that does not reach TRL's f-divergence scores unchanged."""
    both(tmp_path, tiny_model, f_divergence_type=divergence, f_alpha_divergence_coef=0.3)


@pytest.mark.parametrize(
    "settings",
    [
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"precompute_ref_log_probs": True},
        {"precompute_ref_log_probs": True, "ld_alpha": 0.5, "precompute_ref_batch_size": 3},
        {"activation_checkpointing": False},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True},
        {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 0.1},
        {"pad_to_multiple_of": 16, "max_grad_norm": 0.05, "label_smoothing": 0.1, "beta": 0.7},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_of_trl(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """Each setting of TRL's that reaches the loss, the reference or the forward: catches one that is not passed on."""
    ours, _ = both(tmp_path, tiny_model, max_steps=3, **settings)
    assert ours.args.gradient_checkpointing == settings.get("activation_checkpointing", True)
    if settings.get("precompute_ref_log_probs"):
        assert ours.ref_model is None and "ref_chosen_logps" in ours.train_dataset.column_names


@pytest.mark.parametrize(
    "settings",
    [{"bf16": True}, {"precompute_ref_log_probs": True}, {"activation_checkpointing": False}],
    ids=lambda settings: "-".join(settings),
)
def test_settings_of_trl_with_an_adapter(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """The reference is then the same model with its adapter disabled: catches another precision or adapter there."""
    both(tmp_path, tiny_model, arguments={"peft_config": lora}, max_steps=3, **settings)


def test_prompt_tuning(tiny_model: Path, tmp_path: Path) -> None:
    """Virtual tokens come before the real ones in the model's output. Catches positions counted from the start."""
    both(
        tmp_path,
        tiny_model,
        arguments={"peft_config": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)},
        learning_rate=0.5,
    )


def test_a_synchronised_reference(tiny_model: Path, tmp_path: Path) -> None:
    """TR-DPO moves the reference during the run. Catches reference log-probabilities kept from an earlier step."""
    ours, theirs = both(
        tmp_path, tiny_model, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.6, max_steps=3
    )
    assert_bit_equal(dict(ours.ref_model.named_parameters()), dict(theirs.ref_model.named_parameters()))
    start = dict(plain_model(tiny_model).named_parameters())
    assert any(not torch.equal(value, start[name]) for name, value in ours.ref_model.named_parameters())


@pytest.mark.parametrize("kind", ["lora", "ready", "full"])
def test_dropout_draws_the_same_numbers(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Dropout in policy and reference forward: catches a reference before the policy, and a forward too many."""
    settings: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
    arguments: dict[str, Any] = {}
    model: Any = tiny_model
    if kind == "ready":
        model = lambda: trained_adapter(tiny_model, dropout=0.3)  # noqa: E731  # its "ref" adapter has dropout too
    else:
        # The attention's own dropout stays when the adapter is disabled.
        settings["model_init_kwargs"] = {"attention_dropout": 0.3}
        arguments = {"peft_config": lambda: lora(0.3)} if kind == "lora" else {}
    with_dropout, _ = both(tmp_path, model, arguments=arguments, disable_dropout=False, **settings)
    # TRL's disable_dropout knows dropout layers only, so the attention's own has to be left out here.
    settings.pop("model_init_kwargs", None)
    without = train(trl.DPOTrainer, trl.DPOConfig(**config(tmp_path, **settings)), model, **arguments)
    first, second = weights(with_dropout), weights(without)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the dropout must be real"


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation(mode: str, tiny_model: Path, tmp_path: Path) -> None:
    """Answers cut by the collator, some to one token. Catches a mask or length taken from before the cut."""
    longest = max(len(row["prompt_ids"]) for row in build_rows(tiny_model, tmp_path))
    ours, _ = both(tmp_path, tiny_model, max_length=longest + 1, truncation_mode=mode, max_steps=3)
    inputs = ours.data_collator([ours.train_dataset[i] for i in range(len(ours.train_dataset))])
    tokens = sum(
        2 * len(row["prompt_ids"]) + len(row["chosen_ids"] + row["rejected_ids"]) for row in ours.train_dataset
    )
    assert inputs["attention_mask"].sum() < tokens and len(ours.train_dataset) == len(ROWS)
    assert (inputs["completion_mask"].sum(1).min() == 1) == (mode == "keep_start")


def build_rows(model: Path, folder: Path) -> Any:
    """The tokenised pairs."""
    return build(trl.DPOTrainer, trl.DPOConfig(**config(folder)), model).train_dataset


@pytest.mark.parametrize("form", ["conversational", "implicit", "tools"])
def test_forms_of_data(form: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches a row check or a row number that changes columns, order or tokens on the way through TRL's code."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    ours, theirs = both(tmp_path, tiny_model, pairs(form), arguments={"processing_class": tokenizer}, max_steps=3)
    assert ours.train_dataset["chosen_ids"] == theirs.train_dataset["chosen_ids"]
    shown = tokenizer.decode(ours.train_dataset[0]["prompt_ids"])
    assert ("weather" in shown) == (form == "tools")
    assert ROWS[0][0] in shown


def test_a_stream(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a check that reads a streaming dataset to its end, shifts it, or gives it a row number."""
    both(tmp_path, tiny_model, pairs().to_iterable_dataset(), max_steps=3)


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_an_explicit_reference(peft: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Catches a given reference that is replaced by a copy of the policy, or by the policy without its adapter."""

    def other() -> Any:
        model = plain_model(tiny_model)
        perturb(model, 0.05, seed=3)
        return model

    arguments: dict[str, Any] = {"ref_model": other} | ({"peft_config": lora} if peft else {})
    ours, _ = both(tmp_path, tiny_model, arguments=arguments)
    assert ours.state.log_history[0]["logps/chosen_vs_ref"] != 0.0


@pytest.mark.parametrize("kind", ["one", "several", "metrics", "precomputed"])
def test_evaluation_during_training(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Equal evaluation losses and metrics, and training goes on as in TRL after it.

    Catches metrics logged under the wrong mode, an override of `evaluate` that changes it, and with `compute_metrics`
    (TRL then calls the model twice in its loss) the second output taken for the first.
    """
    held_out = pairs("standard", 6)
    several = {"a": pairs("standard", 4), "b": held_out}
    arguments: dict[str, Any] = {"eval_dataset": several if kind == "several" else held_out}
    if kind == "metrics":
        arguments["compute_metrics"] = _sum_of_logits
    ours, _ = both(
        tmp_path,
        tiny_model,
        arguments=arguments,
        precompute_ref_log_probs=kind == "precomputed",
        eval_strategy="steps",
        eval_steps=1,
        max_steps=3,
        gradient_accumulation_steps=2,
    )
    losses = [entry for entry in ours.state.log_history for key in entry if key.endswith("_loss") and "eval" in key]
    assert len(losses) == (6 if kind == "several" else 3)
    if kind == "metrics":
        assert all("eval_sum" in entry for entry in losses)


class _sum_of_logits:  # a class, because `build` calls functions
    def __new__(cls, prediction: Any) -> dict[str, float]:  # type: ignore[misc]
        return {"sum": float(np.where(prediction.predictions == -100, 0, prediction.predictions).sum())}


def test_a_dataset_given_to_evaluate(tiny_model: Path, tmp_path: Path) -> None:
    """Before and after training. Catches an `evaluate` that mixes up arguments, and TRL's flags left changed."""
    ours = build(trl_ext.DPOTrainer, trl_ext.DPOConfig(**config(tmp_path)), tiny_model)
    theirs = build(trl.DPOTrainer, trl.DPOConfig(**config(tmp_path)), tiny_model)
    for _ in range(2):
        mine = ours.evaluate(pairs("implicit", 5), metric_key_prefix="test")
        other = theirs.evaluate(pairs("implicit", 5), metric_key_prefix="test")
        assert mine["test_loss"] == other["test_loss"]
        ours.train()
        theirs.train()
    assert_bit_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_plain_trl_config_is_accepted(peft: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Changing only the trainer's import must do: trains as TRL and logs TRL's metrics, no more."""
    both(
        tmp_path,
        tiny_model,
        plain=True,
        arguments={"peft_config": lora} if peft else None,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 0.2],
        gradient_accumulation_steps=2,
    )


def test_no_config_at_all(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`args=None` is TRL's default. Catches a trainer that reads the options before it knows that there are some."""
    # TRL's default wants a device with bfloat16.
    monkeypatch.setattr("trl.trainer.dpo_trainer.DPOConfig", lambda _: trl.DPOConfig(**config(tmp_path)))
    trainer = trl_ext.DPOTrainer(str(tiny_model), train_dataset=pairs())
    assert not trainer.ext_loss_active()


def test_every_trl_default_is_kept(tmp_path: Path) -> None:
    """Our config changes no default of TRL's fields, and drops none."""
    ours, theirs = trl_ext.DPOConfig(**config(tmp_path)), trl.DPOConfig(**config(tmp_path))
    for field in dataclasses.fields(theirs):
        if field.name != "logging_dir":
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    bare, their_bare = trl_ext.DPOConfig(str(tmp_path), use_cpu=True), trl.DPOConfig(str(tmp_path), use_cpu=True)
    for field in dataclasses.fields(trl.DPOConfig):
        if field.name != "logging_dir":
            assert getattr(bare, field.name) == getattr(their_bare, field.name), field.name


def test_a_mixture_of_experts(tiny_model: Path, tmp_path: Path) -> None:
    """The auxiliary loss comes from the policy's forward alone. Catches router logits asked of the reference, too."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            router_aux_loss_coef=0.3,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    ours, _ = both(tmp_path / "run", tmp_path / "moe", gradient_accumulation_steps=2)
    assert "aux_loss" in ours.state.log_history[0]


def _vision_model(folder: Path, tokenizer_folder: Path) -> Callable[[], LlavaProcessor]:
    """A tiny random Llava saved in `folder`, and a function that makes its processor."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = LlamaConfig(
        **small,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**small, image_size=16, patch_size=8, projection_dim=32),
            text_config=text,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
    )
    model.save_pretrained(folder)

    def processor() -> LlavaProcessor:
        square = {"height": 16, "width": 16}
        return LlavaProcessor(
            LlavaImageProcessorPil(size=square, crop_size=square),
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="full",
            num_additional_image_tokens=1,
            chat_template=VISION_TEMPLATE,
        )

    return processor


def _vision_pairs() -> Dataset:
    random = np.random.default_rng(0)
    rows = [
        row | {"images": [Image.fromarray(random.integers(0, 255, (20, 24, 3), dtype=np.uint8))]}
        for row in pairs("conversational")
    ]
    return Dataset.from_list(rows)


def test_vision_language_data(tiny_model: Path, tmp_path: Path) -> None:
    """Images are collated on the fly and prompts are not tokenised first.

    Catches a row check or row number that needs tokens, and a batch passed to the reference without its images.
    """
    processor = _vision_model(tmp_path / "vlm", tiny_model)
    ours, _ = both(
        tmp_path / "run",
        tmp_path / "vlm",
        _vision_pairs(),
        arguments={"processing_class": processor},
        max_length=None,
        max_steps=3,
    )
    assert "pixel_values" in next(iter(ours.get_train_dataloader()))
    assert any("vision_tower" in name for name in weights(ours))

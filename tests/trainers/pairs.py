"""Preference pairs, settings and batches for the tests of DPO, and one independent computation from plain logits."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import trl_ext
from tests.trainers.harness import cpu_settings
from tests.trainers.losses import perturb

# Prompts, chosen and rejected answers of different lengths: now the chosen one is the longer, now the rejected one.
ROWS = [
    ("Name a colour:", " blue", " the garden and the river"),
    ("What is the capital of France? Please write a short answer", " Paris, a city on the river Seine", " I know it"),
    ("介绍一下你自己。", "我喜欢读书、听音乐和学习新的语言。", "你好"),
    ("Why?", " because water boils at one hundred degrees", " ice floats"),
    ("Where is the station?", " near the entrance of the market", " the train leaves at nine o'clock tomorrow"),
    ("Who?", " a sailor", " a doctor"),
    ("How many apples did she buy at the market on Saturday morning?", " three", " two oranges and some bread"),
    ("Say something kind.", " I am sorry to hear that you feel sad", " explain each step before the result"),
]
WORDS = ["garden", "river", "market", "train", "doctor", "sailor", "bread", "winter"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def pairs(form: str = "standard", count: int = len(ROWS)) -> Dataset:
    """The first `count` pairs as "standard", "implicit" (no prompt column), "conversational" or "tools"."""
    rows: list[dict[str, Any]] = []
    for prompt, chosen, rejected in ROWS[:count]:
        if form == "standard":
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        elif form == "implicit":
            rows.append({"chosen": prompt + chosen, "rejected": prompt + rejected})
        else:
            row: dict[str, Any] = {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
            rows.append(row | ({"tools": json.dumps(TOOLS)} if form == "tools" else {}))
    return Dataset.from_list(rows)


def repeated_pairs(count: int = len(WORDS)) -> Dataset:
    """The rejected answer says one word again and again, the chosen one but for one token: what lowers the rejected
    answer lowers what the two share."""
    return Dataset.from_dict(
        {
            "prompt": [prompt for prompt, _, _ in ROWS[:count]],
            "chosen": [f" {word} {word} {word} {word} {word} and {word}" for word in WORDS[:count]],
            "rejected": [f" {word} {word} {word} {word} {word} {word} {word}" for word in WORDS[:count]],
        }
    )


def config(folder: Path, **overrides: Any) -> dict[str, Any]:
    """The settings of all trainer tests, at a constant learning rate."""
    return cpu_settings(folder, **({"lr_scheduler_type": "constant", "per_device_eval_batch_size": 4} | overrides))


def lora(dropout: float = 0.0) -> LoraConfig:
    """An adapter on every linear layer of the blocks."""
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")


def plain_model(folder: Path, **arguments: Any) -> Any:
    """The saved model in float32, as transformers loads it: no head of TRL's."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)


def trained_adapter(folder: Path, dropout: float = 0.0, scale: float = 0.1) -> PeftModel:
    """A ready PEFT model whose adapter is not the identity any more, as after an SFT run."""
    torch.manual_seed(0)  # PEFT draws the adapter's weights
    model = get_peft_model(plain_model(folder), lora(dropout))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def build(trainer_class: Any, settings: Any, model: Any, dataset: Any = None, **arguments: Any) -> Any:
    """The trainer. Functions among the arguments are called, so that no two trainers share a model or a config."""
    made = {name: value() if inspect.isfunction(value) else value for name, value in arguments.items()}
    model = model() if inspect.isfunction(model) else model
    return trainer_class(
        model=str(model) if isinstance(model, Path) else model,
        args=settings,
        train_dataset=dataset if dataset is not None else pairs(),
        **made,
    )


def train(trainer_class: Any, settings: Any, model: Any, dataset: Any = None, **arguments: Any) -> Any:
    """Build the trainer, train, return it."""
    trainer = build(trainer_class, settings, model, dataset, **arguments)
    trainer.train()
    return trainer


def make(model: Path, folder: Path, moved: float = 0.02, seed: int = 1, **settings: Any) -> Any:
    """A trainer whose policy has left its reference, ready to compute losses."""
    trainer = trl_ext.DPOTrainer(
        str(model), args=trl_ext.DPOConfig(**config(folder, **settings)), train_dataset=pairs()
    )
    if moved:
        perturb(trainer.model, moved, seed)
    trainer.model.train()
    return trainer


def batch(trainer: Any, rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    """The collated training pairs."""
    chosen_rows = range(len(trainer.train_dataset)) if rows is None else rows
    collated: dict[str, torch.Tensor] = trainer.data_collator([trainer.train_dataset[i] for i in chosen_rows])
    return collated


def doubles(trainer: Any, folder: Path) -> tuple[Any, Any]:
    """(policy, reference) in float64: plain models, the first with the trainer's weights, the second as saved."""
    policy, reference = plain_model(folder), plain_model(folder)
    policy.load_state_dict(copy.deepcopy(trainer.model.state_dict()))
    return policy.double().eval(), reference.double().eval()


def answers(model: Any, inputs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per row of the batch the log-probabilities and the entropies of the tokens of its answer, row by row.

    No padding: each row is cut to its own length, so that no mask can hide a mistake.
    """
    result = []
    for ids, attention, mask in zip(
        inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"], strict=True
    ):
        length = int(attention.sum())
        logits = model(input_ids=ids[None, :length]).logits[0, -length:]  # prompt tuning puts virtual tokens before
        logps = logits.log_softmax(-1)  # (length, V)
        at = [position for position in range(1, length) if mask[position]]
        tokens = torch.stack([logps[position - 1, ids[position]] for position in at])
        entropies = torch.stack([-(logps[position - 1].exp() * logps[position - 1]).sum() for position in at])
        result.append((tokens, entropies))
    return result


def sums(rows: list[tuple[torch.Tensor, torch.Tensor]], ld_alpha: float | None = None) -> torch.Tensor:
    """(2B,) log-probability per answer; with `ld_alpha` what is longer than its partner counts that much."""
    count = len(rows) // 2
    totals = []
    for index, (tokens, _) in enumerate(rows):
        shared = min(len(tokens), len(rows[(index + count) % (2 * count)][0]))
        totals.append(tokens[:shared].sum() + (1.0 if ld_alpha is None else ld_alpha) * tokens[shared:].sum())
    return torch.stack(totals)


def named_gradients(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Value, and the gradients of all parameters in the order of their names, flat."""
    model.zero_grad()
    value = loss()
    value.backward()
    parameters = sorted(model.named_parameters())
    return value.item(), torch.cat([p.grad.flatten().double() for _, p in parameters if p.grad is not None])

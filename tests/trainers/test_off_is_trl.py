"""Every option off: the trained weights equal those of TRL's own class, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_ext
from tests.trainers.harness import assert_bit_equal, base_config, lora, prompts, train, weights

PAIRS = {
    "grpo": (trl_ext.GRPOTrainer, trl_ext.GRPOConfig, trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl_ext.RLOOTrainer, trl_ext.RLOOConfig, trl.RLOOTrainer, trl.RLOOConfig),
}
SETTINGS: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 4}, {"num_iterations": 2}]


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "accumulation4", "iterations2"])
@pytest.mark.parametrize("method", PAIRS)
def test_off_is_trl_bit_for_bit(
    method: str, settings: dict[str, Any], peft: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """Catches any override that acts, draws a random number or casts while its option is off."""
    ours, our_config, theirs, their_config = PAIRS[method]
    arguments = {"peft_config": lora()} if peft else {}
    config = base_config(tmp_path, **settings)
    first = train(ours, our_config(**config), tiny_model, **arguments)
    arguments = {"peft_config": lora()} if peft else {}
    second = train(theirs, their_config(**config), tiny_model, **arguments)
    assert_bit_equal(weights(first), weights(second))
    assert first.state.log_history[0].keys() == second.state.log_history[0].keys()
    _assert_moved(first, tiny_model, peft)


def _assert_moved(trainer: Any, model: Path, peft: bool) -> None:
    """Two equal but untrained models would prove nothing."""
    if peft:
        moved = [p for n, p in trainer.model.named_parameters() if "lora_B" in n and p.abs().max() > 0]
    else:
        start = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
        moved = [p for n, p in trainer.model.named_parameters() if not torch.equal(p, start[n])]
    assert moved


@pytest.mark.parametrize("method", PAIRS)
def test_a_plain_trl_config_is_accepted(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """Changing only the trainer's import must do: the config may still be TRL's own."""
    ours, _, theirs, their_config = PAIRS[method]
    config = base_config(tmp_path)
    first = train(ours, their_config(**config), tiny_model)
    second = train(theirs, their_config(**config), tiny_model)
    assert_bit_equal(weights(first), weights(second))


@pytest.mark.parametrize("method", PAIRS)
def test_every_trl_default_is_kept(method: str, tmp_path: Path) -> None:
    """Our config classes change no default of TRL's fields."""
    _, our_config, _, their_config = PAIRS[method]
    ours, theirs = our_config(**base_config(tmp_path)), their_config(**base_config(tmp_path))
    for name in theirs.__dataclass_fields__:
        if name == "logging_dir":
            continue
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("method", PAIRS)
def test_conversational_prompts_train_like_trl(method: str, tiny_model: Path, tmp_path: Path) -> None:
    ours, our_config, theirs, their_config = PAIRS[method]
    config = base_config(tmp_path)
    first = train(ours, our_config(**config), tiny_model, dataset=prompts(conversational=True))
    second = train(theirs, their_config(**config), tiny_model, dataset=prompts(conversational=True))
    assert_bit_equal(weights(first), weights(second))

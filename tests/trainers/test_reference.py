"""Which model is the reference: a new adapter, a trained adapter, a frozen one, a copied base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainers.harness import base_config, history, lora, prompts, spaces, train
from trl_ext import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

CLASSES: dict[str, Any] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
KL = {"beta": 0.1, "kl_estimator": "k3", "kl_placement": "loss"}


@pytest.fixture
def trained_adapter(tiny_model: Path, tmp_path: Path) -> Path:
    """An adapter that is far from the identity."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), lora())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def loaded(tiny_model: Path, adapter: Path, is_trainable: bool) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=is_trainable)


@pytest.mark.parametrize("start", ["full", "new adapter", "trained adapter"])
@pytest.mark.parametrize("method", CLASSES)
def test_the_kl_of_step_0_is_zero(
    method: str, start: str, tiny_model: Path, trained_adapter: Path, tmp_path: Path
) -> None:
    """The reference is the policy the run starts from, never the bare base under a trained adapter."""
    trainer_class, config_class = CLASSES[method]
    arguments: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(tiny_model)}
    model: Any = tiny_model
    if start == "new adapter":
        arguments["peft_config"] = lora()
    elif start == "trained adapter":
        model = loaded(tiny_model, trained_adapter, is_trainable=True)
    trainer = train(trainer_class, config_class(**base_config(tmp_path, **KL)), model, **arguments)
    kls = history(trainer, "kl")
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[1] > 1e-6, "after a step the policy has left the reference"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_frozen_adapter_is_an_error(beta: float, tiny_model: Path, trained_adapter: Path, tmp_path: Path) -> None:
    """Loaded without is_trainable=True: training would "work" and change nothing."""
    config = GRPOConfig(**base_config(tmp_path, beta=beta))
    with pytest.raises(ValueError, match="is_trainable=True"):
        GRPOTrainer(loaded(tiny_model, trained_adapter, False), [spaces], args=config, train_dataset=prompts())


def test_an_adapter_is_not_wrapped_twice(tiny_model: Path, trained_adapter: Path, tmp_path: Path) -> None:
    """A second get_peft_model would re-initialise the first adapter's LoRA."""
    config = GRPOConfig(**base_config(tmp_path))
    with pytest.raises(ValueError, match="PeftModel"):
        GRPOTrainer(
            loaded(tiny_model, trained_adapter, True),
            [spaces],
            args=config,
            train_dataset=prompts(),
            peft_config=lora(),
        )


def test_the_reference_never_moves(tiny_model: Path, tmp_path: Path) -> None:
    trainer = train(GRPOTrainer, GRPOConfig(**base_config(tmp_path, **KL)), tiny_model)
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, start[name]) for name, value in trainer.ref_model.state_dict().items())

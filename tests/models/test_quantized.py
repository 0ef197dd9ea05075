"""Gradients through a 4-bit base on a CPU, and QLoRA with the DPO trainer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")

ROOT = Path(__file__).resolve().parents[2]

# A process of its own: which kernels bitsandbytes uses is decided once, when it is imported and a layer is made.
GRADIENTS = """
import json
import sys

import bitsandbytes as bnb
import bitsandbytes.nn.modules as modules
import torch
from accelerate import PartialState
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_ext.models.quantized import keep_gradients_of_4bit_on_cpu

PartialState()
folder, fix, pretend = sys.argv[1], sys.argv[2] == "fix", sys.argv[3] == "pretend"
if pretend:
    modules.has_avx512bf16 = lambda: True
changed = keep_gradients_of_4bit_on_cpu() if fix else False
again = keep_gradients_of_4bit_on_cpu() if fix else False
config = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
quantised = AutoModelForCausalLM.from_pretrained(
    folder, quantization_config=config, device_map="cpu", dtype=torch.float32
)
plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
layers = {n: m for n, m in quantised.named_modules() if isinstance(m, bnb.nn.Linear4bit)}
for name, layer in layers.items():
    plain.get_submodule(name).weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
ids = torch.arange(40).view(2, 20) * 7 % 900
gradients, packed = [], None
for model in (quantised, plain):
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(model, adapter).eval()
    with torch.no_grad():
        model(input_ids=ids)
    if model.get_base_model() is quantised:
        packed = sum(bool(getattr(m.weight.quant_state, "packing_format_for_cpu", False)) for m in layers.values())
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
cosine = torch.cosine_similarity(*gradients, dim=0).item()
ratio = (gradients[0].norm() / gradients[1].norm()).item()
print(json.dumps({"cosine": cosine, "ratio": ratio, "packed": packed, "layers": len(layers), "changed": changed,
                  "again": again}))
"""


def gradients(model: Path, fix: bool, pretend: bool) -> dict[str, Any]:
    """Cosine and ratio of norms: the gradient through an NF4 base against the float model with the same weights."""
    command = [sys.executable, "-c", GRADIENTS, str(model), "fix" if fix else "none", "pretend" if pretend else "real"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert results["layers"] == 14
    return results


def has_avx512bf16() -> bool:
    import bitsandbytes.functional

    return bool(getattr(bitsandbytes.functional, "has_avx512bf16", lambda: False)())


@pytest.mark.parametrize("pretend", [False, True])
def test_gradients_survive_an_evaluation(pretend: bool, tiny_model: Path) -> None:
    """After a forward in evaluation mode the gradient is still that of the float model with the dequantised weights.

    bitsandbytes takes its inference kernel by one flag, so any CPU can pretend to have it. Catches a switch that is
    thrown too late or has no effect.
    """
    results = gradients(tiny_model, fix=True, pretend=pretend)
    assert results["cosine"] > 0.999 and results["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert results["packed"] == 0
    assert results["changed"] == (pretend or has_avx512bf16())
    assert results["again"] is False, "it says so once"


@pytest.mark.parametrize("pretend", [False, True])
def test_the_gradients_are_wrong_without(pretend: bool, tiny_model: Path) -> None:
    """What the module is for is still there. When this fails, bitsandbytes has repaired it: drop the module."""
    if not pretend and not has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16")
    results = gradients(tiny_model, fix=False, pretend=pretend)
    assert results["packed"] == results["layers"]
    assert results["cosine"] < 0.9


def test_it_can_be_called_first_of_all() -> None:
    """Before any trainer or config exists. Catches a warning through accelerate's logger, which needs their state.

    A process of its own: here the state exists already.
    """
    code = (
        "import bitsandbytes.nn.modules as modules; modules.has_avx512bf16 = lambda: True\n"
        "from trl_ext.models.quantized import keep_gradients_of_4bit_on_cpu\n"
        "assert keep_gradients_of_4bit_on_cpu() and not keep_gradients_of_4bit_on_cpu()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-500:]


def build(model: Any, folder: Path, **arguments: Any) -> Any:
    """A DPO trainer with an adapter on every linear layer."""
    from tests.trainers.dpo_worker import near_pairs, settings
    from tests.trainers.harness import lora
    from trl_ext import DPOConfig, DPOTrainer

    overrides = {"learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 1} | arguments.pop("settings", {})
    return DPOTrainer(
        model,
        args=DPOConfig(**settings(folder, **overrides)),
        train_dataset=near_pairs(8),
        eval_dataset=near_pairs(2),
        peft_config=lora(),
        **arguments,
    )


def nf4() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.mark.parametrize("project", [False, True])
def test_qlora_dpo(project: bool, tiny_model: Path, tmp_path: Path) -> None:
    """A base of 4-bit layers, an adapter that trains and moves, ln 2 at the start, with an evaluation in between.

    Catches a base that was silently loaded in full, a frozen adapter, a reference that is not the base.
    """
    import bitsandbytes as bnb

    from tests.trainers.harness import history

    trainer = build(str(tiny_model), tmp_path, quantization_config=nf4(), settings={"project_chosen_gradient": project})
    base = trainer.model.get_base_model()
    assert base.is_loaded_in_4bit
    layers = [module for module in base.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(layers) == 14 and all(layer.weight.dtype == torch.uint8 for layer in layers)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainable = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * len(layers) and all("lora_" in name for name in trainable)
    trainer.train()
    assert history(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-3)
    assert all(map(math.isfinite, history(trainer, "loss") + history(trainer, "eval_loss")))
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trainable)
    assert history(trainer, "logps/rejected_vs_ref")[-1] != 0
    if project:
        assert history(trainer, "projection/active")[0] == 1.0


@pytest.mark.parametrize("way", ["quantization_config", "model_init_kwargs", "model"])
def test_every_way_to_a_4bit_base_keeps_its_gradients(
    way: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with the kernel no layer may use it in training, however the base was loaded.

    Catches QLoRA runs that silently lose the gradient through the base.
    """
    import bitsandbytes as bnb
    import bitsandbytes.nn.modules as modules
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    if way == "quantization_config":
        trainer = build(str(tiny_model), tmp_path, quantization_config=nf4())
    elif way == "model_init_kwargs":
        trainer = build(str(tiny_model), tmp_path, settings={"model_init_kwargs": {"quantization_config": nf4()}})
    else:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_model, quantization_config=nf4(), device_map="cpu", dtype=torch.float32
        )
        trainer = build(model, tmp_path)
    trainer.evaluate()
    layers = [module for module in trainer.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(layers) == 14
    packed = [getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers]
    assert not any(packed)


def test_a_base_that_is_repacked_already_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has generated before it is trained. Catches a switch that is thrown too late, silently."""
    import bitsandbytes.nn.modules as modules
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=nf4(), device_map="cpu", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    with pytest.raises(ValueError, match=r"weights are repacked.*Load it anew"):
        build(model, tmp_path)


def test_nothing_happens_on_other_cpus_and_to_other_models(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a warning about nothing, and a switch that other code would see."""
    import bitsandbytes.nn.modules as modules
    from transformers import AutoModelForCausalLM

    from trl_ext.models.quantized import keep_gradients_of_4bit_on_cpu, keep_gradients_of_loaded

    def without() -> bool:
        return False

    monkeypatch.setattr(modules, "has_avx512bf16", without)
    assert keep_gradients_of_4bit_on_cpu() is False
    assert modules.has_avx512bf16 is without
    keep_gradients_of_loaded(AutoModelForCausalLM.from_pretrained(tiny_model))
    assert "4-bit" not in caplog.text

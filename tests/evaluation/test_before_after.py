"""Before/after on a real trainer: "before" is the untrained policy, with and without an adapter."""

import json

import pytest
import torch
from datasets import Dataset

pytest.importorskip("matplotlib")

from trl_ext.evaluation.before_after import BeforeAfter
from trl_ext.evaluation.generate_eval import sample_completions

PROMPTS = Dataset.from_list([{"prompt": f"Question {i}:"} for i in range(4)])


def letters_reward(completions, **kwargs):
    return [float(sum(c.isalpha() for c in text)) for text in completions]


@pytest.mark.parametrize("lora", [True, False])
def test_before_is_the_untrained_policy(tiny_model, tmp_path, lora):
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=4,
        num_generations=4, max_completion_length=8, learning_rate=0.05, report_to="none", save_strategy="no", seed=5,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(tiny_model),
        letters_reward,
        args=args,
        train_dataset=PROMPTS,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    measured = BeforeAfter(trainer, PROMPTS, {"letters_reward": (0.0, 8.0)}, samples=2)
    trainer.train()
    _, report = measured.finish("T")

    untrained = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = trainer.processing_class
    expected = sample_completions(untrained, tokenizer, PROMPTS["prompt"], samples=2, max_new_tokens=8, seed=5)
    lines = [json.loads(line) for line in (report.parent / "heldout.jsonl").read_text().splitlines()]
    before = [line["completion"] for line in lines if line["when"] == "before"]
    after = [line["completion"] for line in lines if line["when"] == "after"]
    assert before == [text for texts in expected for text in texts]
    assert after != before

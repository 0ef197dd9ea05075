"""The tiny random model used by the other tests."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext.models import build_tiny_model


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_tokenizer_and_model_fit_together(model_type: str, tmp_path: Path) -> None:
    """Mutation caught: a token that the tokenizer class adds on loading (Qwen2's) lies beyond the embedding."""
    folder = build_tiny_model(tmp_path, model_type=model_type)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 1024
    assert model.config.model_type == model_type
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_chat_template_round_trip(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(tmp_path))
    messages = [{"role": "user", "content": "Hi, 你好 12"}, {"role": "assistant", "content": "yo"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nHi, 你好 12<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    tokens = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode(tokens["input_ids"]) == text
    pairs = zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, mask in pairs if mask]) == "yo<|im_end|>"


def test_seed_decides_the_weights_and_callers_state_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, same, other = (build_tiny_model(tmp_path / f"{i}", seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, same, other)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, qwen2; got 'gpt2'"),
        ({"vocab_size": 100}, "vocab_size must be at least 300; got 100"),
        ({"hidden_size": 60}, "hidden_size must be a multiple of 8; got 60"),
    ],
)
def test_bad_arguments(arguments: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_tiny_model(tmp_path, **arguments)

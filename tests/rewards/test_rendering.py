"""Prompts and completions become the tokens that TRL's RewardTrainer trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import trl_ext
from tests.trainers.reward_worker import CHOSEN, QUESTIONS, REJECTED, message, pairs, settings
from trl_ext.rewards.rendering import render


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def prepared(tiny_model: Path, folder: Path, rows: Dataset) -> Any:
    """The rows as a trainer tokenises them."""
    config = trl_ext.RewardConfig(**settings(folder))
    return trl_ext.RewardTrainer(model=str(tiny_model), args=config, train_dataset=rows).train_dataset


@pytest.mark.parametrize("text_format", ["chat", "text"])
def test_the_tokens_are_those_of_the_training(
    text_format: str, tokenizer: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """Token by token, Chinese too, the last one above all. Catches: a generation prompt, a missing or double EOS."""
    rows = pairs(text_format)
    trained = prepared(tiny_model, tmp_path, rows)
    assert render(rows["prompt"], rows["chosen"], tokenizer, text_format) == list(trained["chosen_ids"])
    assert render(rows["prompt"], rows["rejected"], tokenizer, text_format) == list(trained["rejected_ids"])


def test_the_training_scores_the_same_position(tokenizer: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Rows of a text whose answers end in EOS, or do not: both are closed once, in training and here."""
    answers = [" Yes", " Yes<|im_end|>", " 是的。<|im_end|>"]
    rows = Dataset.from_dict({"prompt": ["Why?"] * 3, "chosen": answers, "rejected": answers[::-1]})
    trained = list(prepared(tiny_model, tmp_path, rows)["chosen_ids"])
    found = render(rows["prompt"], answers, tokenizer, "text")
    assert found == trained
    assert found[0] == found[1]
    assert [row[-1] for row in found] == [tokenizer.eos_token_id] * 3
    assert all(row.count(tokenizer.eos_token_id) == 1 for row in found)


def test_implicit_prompts_are_the_same_conversation(tokenizer: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Rows without a prompt column hold the whole conversation in each answer."""
    whole = {
        name: [message("user", q) + message("assistant", a) for q, a in zip(QUESTIONS, answers, strict=True)]
        for name, answers in (("chosen", CHOSEN), ("rejected", REJECTED))
    }
    trained = prepared(tiny_model, tmp_path, Dataset.from_dict(whole))
    rows = pairs()
    assert render(rows["prompt"], rows["rejected"], tokenizer, "chat") == list(trained["rejected_ids"])


def test_chat_hand_worked(tokenizer: Any) -> None:
    """Catches: roles swapped, another template, special tokens added around it."""
    system = [{"role": "system", "content": "Be kind."}, *message("user", "你好")]
    (row,) = render([system], [message("assistant", "Hi")], tokenizer, "chat")
    assert tokenizer.decode(row) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n"
    )


def test_plain_texts_in_a_chat_are_messages(tokenizer: Any) -> None:
    """The same reward in both formats, also mixed. Catches: a text that is joined without the template."""
    texts = render(QUESTIONS, CHOSEN, tokenizer, "chat")
    questions, answers = [message("user", q) for q in QUESTIONS], [message("assistant", a) for a in CHOSEN]
    assert texts == render(questions, answers, tokenizer, "chat")
    assert texts == render(QUESTIONS, answers, tokenizer, "chat")
    assert texts == render(questions, CHOSEN, tokenizer, "chat")


def test_several_turns_stay_as_they_are(tokenizer: Any) -> None:
    """Completions of tool calls have several messages. Catches: the last one alone, and a list that is changed."""
    prompt = [*message("user", "a"), *message("assistant", "b"), *message("user", "c")]
    completion = [*message("assistant", "d"), *message("tool", "e"), *message("assistant", "f")]
    (row,) = render([prompt], [completion], tokenizer, "chat")
    assert [part.split("\n")[0] for part in tokenizer.decode(row).split("<|im_start|>")[1:]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (len(prompt), len(completion)) == (3, 3)


def test_text_without_an_eos_token_is_left_open() -> None:
    """Catches: the word None at the end."""

    class Tokenizer:
        eos_token = None

        def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
            return {"input_ids": [list(line.encode()) for line in text]}

    assert render(["a"], ["b"], Tokenizer(), "text") == [list(b"ab")]


@pytest.mark.parametrize(("prompt", "completion"), [(message("user", "a"), "b"), ("a", message("assistant", "b"))])
def test_messages_for_a_model_of_plain_texts_are_refused(prompt: Any, completion: Any, tokenizer: Any) -> None:
    """Catches: the text of a Python list scored."""
    with pytest.raises(ValueError, match="trained on plain texts"):
        render([prompt], [completion], tokenizer, "text")


@pytest.mark.parametrize("text_format", ["chat", "text"])
def test_unlike_lengths_are_refused(text_format: str, tokenizer: Any) -> None:
    """Catches: the shorter list deciding."""
    with pytest.raises(ValueError, match="2 prompts for 1 completions"):
        render(["a", "b"], ["c"], tokenizer, text_format)


@pytest.mark.parametrize("text_format", ["chat", "text"])
def test_nothing_to_render(text_format: str, tokenizer: Any) -> None:
    """A data set of which a filter has left nothing. Catches: an error of the tokenizer, in one format only."""
    assert render([], [], tokenizer, text_format) == []

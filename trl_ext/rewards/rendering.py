"""From (prompt, completion) in either of TRL's formats to the tokens that a reward model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FORMATS = ("chat", "text")


def render(prompts: Sequence[Any], completions: Sequence[Any], tokenizer: Any, text_format: str) -> list[list[int]]:
    """Token ids of each prompt with its completion, by the reward model's own tokenizer and template.

    - "chat": the reward model's chat template around prompt and completion. Plain texts become a user and an
      assistant message, so the same conversation scores alike in both formats.
    - "text": prompt and completion joined, ending in one EOS token, as TRL's RewardTrainer makes its rows of plain
      texts. A completion that was cut off before its end is closed by the EOS too: the model was trained on closed
      answers only, and a score of an open one would mean nothing it has learnt.

    Args:
        prompts, completions: of equal length; texts or lists of messages.

    Raises:
        ValueError: the lengths differ, or messages meet a reward model of plain texts.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions: give one prompt per completion.")
    if not completions:
        return []
    if text_format == "chat":
        conversations = [
            [*_messages(prompt, "user"), *_messages(completion, "assistant")]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        rows = tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True)["input_ids"]
        return [list(row) for row in rows]
    texts = [
        _text(prompt) + _closed(_text(completion), tokenizer.eos_token)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return [list(row) for row in tokenizer(text=texts)["input_ids"]]


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(
        "This reward model was trained on plain texts (format 'text'), but got messages. Give it prompts and "
        "completions as texts, or a reward model with a chat template (text_format='chat')."
    )


def _closed(text: str, eos_token: str | None) -> str:
    return text if not eos_token or text.endswith(eos_token) else text + eos_token

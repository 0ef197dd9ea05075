"""Length reward: a soft window on the number of words."""

import re
from collections.abc import Callable
from typing import Any

from trl_ext.rewards.text import completion_text

# Chinese, Japanese kana and Korean have no spaces between words (or too few), so each character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+(?:['’-][^\W{_CJK}]+)*")


def count_words(text: str) -> int:
    """Words in `text`; a CJK character is one word, punctuation none."""
    return len(_WORD.findall(text))


def length_window(shortest: int, longest: int) -> Callable[..., list[float | None]]:
    """Makes a reward that is 100 from `shortest` to `longest` words and falls off linearly outside.

    Below the window it reaches 0 at no words, above it at twice `longest`.

    Args:
        shortest: first rewarded length in words, at least 1.
        longest: last rewarded length in words, at least `shortest`.

    Returns:
        A reward function named `length_reward`, values in [0, 100].

    Raises:
        ValueError: if not 1 <= shortest <= longest.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(f"need 1 <= shortest <= longest, got shortest={shortest}, longest={longest}")

    def score(words: int) -> float:
        if words < shortest:
            return 100.0 * words / shortest
        return 100.0 * min(1.0, max(0.0, (2 * longest - words) / longest))

    def length_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        """Points in [0, 100] for the number of words of each completion."""
        return [score(count_words(completion_text(completion))) for completion in completions]

    return length_reward


length_reward = length_window(6, 15)

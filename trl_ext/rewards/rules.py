"""Rewards by simple rules on the text: repetition, keywords, length."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from trl_ext.rewards.length import _CJK, _WORD
from trl_ext.rewards.text import completion_text

Reward = Callable[..., list[float | None]]
Unit = Literal["words", "tokens", "characters"]

# A letter or digit of a script that puts spaces between words.
_SPACED = rf"[^\W{_CJK}]"


def split_words(text: str) -> list[str]:
    """Words of `text` in lower case; a CJK character is one word, punctuation none."""
    return _WORD.findall(text.casefold())


def repetition_penalty(ngram: int = 3, max_penalty: float = -1.0) -> Reward:
    """Makes a reward that falls with the share of repeated word n-grams: max_penalty * (1 - distinct / all).

    Args:
        ngram: words per n-gram, at least 1; a CJK character counts as a word.
        max_penalty: approached by a text that repeats one n-gram for ever, at most 0.

    Returns:
        A reward function named `repetition_penalty`, values in [max_penalty, 0]; 0 for a text of fewer than `ngram`
        words, the empty one included.

    Raises:
        ValueError: an argument out of range.

    When it is wrong: lists, code and verse repeat for good reasons, and a long text repeats more than a short one.
    `trl.rewards.get_repetition_penalty_reward` is the same on token ids, which also sees repeated punctuation.
    """
    if ngram < 1:
        raise ValueError(f"`ngram` must be at least 1, got {ngram}.")
    if not -math.inf < max_penalty <= 0:
        raise ValueError(f"`max_penalty` must be a finite number of at most 0, got {max_penalty}.")

    def score(text: str) -> float:
        words = split_words(text)
        ngrams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
        repeated = len(ngrams) - len(set(ngrams))
        return max_penalty * repeated / len(ngrams) if repeated else 0.0

    def repetition_penalty(completions: list[Any], **kwargs: Any) -> list[float | None]:
        """Minus the share of repeated n-grams of each completion, times the largest penalty."""
        return [score(completion_text(completion)) for completion in completions]

    return repetition_penalty


def keyword_rules(
    must: Sequence[str] = (),
    must_not: Sequence[str] = (),
    *,
    must_column: str | None = None,
    must_not_column: str | None = None,
    ignore_case: bool = True,
    whole_words: bool = True,
    hard: bool = True,
) -> Reward:
    """Makes a reward for texts that contain some keywords and avoid others.

    Args:
        must: keywords, each of which the completion should contain.
        must_not: keywords that it should not contain.
        must_column, must_not_column: names of dataset columns with further keywords of a row: a list, one string, or
            None for none.
        ignore_case: compare without case. Unicode forms of one character (full width, accents) always agree.
        whole_words: "cat" is not in "category". CJK characters, which have no word breaks, match anywhere.
        hard: True = share of `must` found, in [0, 1], but 0 as soon as one of `must_not` is there; False = share of
            all keywords whose rule is kept.

    Returns:
        A reward function named `keyword_rules`, values in [0, 1]: None for a row without any keyword, 0 for an empty
        completion.

    Raises:
        ValueError: no keyword and no column, an empty keyword, one that is both demanded and forbidden; at a call, a
            column that the data set lacks.
        TypeError: keywords that are neither a list of strings nor one string.

    When it is wrong: it reads no meaning. "No cats" contains "cats", and a bare list of the keywords earns 1, so pair
    it with a reward for content.
    """
    always, never = _keywords(must, "must"), _keywords(must_not, "must_not")
    if not (always or never or must_column or must_not_column):
        raise ValueError("`keyword_rules` has no rule: give `must`, `must_not`, `must_column` or `must_not_column`.")
    both = {_plain(word, ignore_case) for word in always} & {_plain(word, ignore_case) for word in never}
    if both:
        raise ValueError(f"`must` and `must_not` both hold {sorted(both)}. Remove them from one.")

    def has(text: str, word: str) -> bool:
        return _pattern(_plain(word, ignore_case), whole_words).search(text) is not None

    def score(text: str, demanded: list[str], forbidden: list[str]) -> float | None:
        if not demanded and not forbidden:
            return None
        if not text.strip():
            return 0.0
        text = _plain(text, ignore_case)
        found = sum(has(text, word) for word in demanded)
        avoided = sum(not has(text, word) for word in forbidden)
        if not hard:
            return (found + avoided) / (len(demanded) + len(forbidden))
        if avoided < len(forbidden):
            return 0.0
        return found / len(demanded) if demanded else 1.0

    def keyword_rules(completions: list[Any], **kwargs: Any) -> list[float | None]:
        """How well each completion keeps to the keywords, in [0, 1]; None for a row without keywords."""
        demanded = _column(must_column, kwargs, len(completions))
        forbidden = _column(must_not_column, kwargs, len(completions))
        return [
            score(completion_text(completion), always + row_demanded, never + row_forbidden)
            for completion, row_demanded, row_forbidden in zip(completions, demanded, forbidden, strict=True)
        ]

    return keyword_rules


def soft_length_window(
    shortest: int,
    longest: int,
    unit: Unit = "words",
    *,
    slope_below: float | None = None,
    slope_above: float | None = None,
) -> Reward:
    """Makes a reward that is 1 from `shortest` to `longest` and falls off linearly outside, not below 0.

    Args:
        shortest: first rewarded length, in units; 0 for no lower end.
        longest: last rewarded length, at least 1.
        unit: "words" (a CJK character is one), "tokens" (`completion_ids`, end-of-sequence included) or "characters"
            (Unicode code points, white space included).
        slope_below, slope_above: what one unit outside costs; by default 1 / shortest and 1 / longest, so that the
            reward reaches 0 at length 0 and at twice `longest`.

    Returns:
        A reward function named `soft_length_window`, values in [0, 1].

    Raises:
        ValueError: not 0 <= shortest <= longest, longest < 1, a slope that is not positive, an unknown unit; at a
            call, tokens without `completion_ids`.

    When it is wrong: length says nothing of content, and blanks or one repeated word fill a window too.
    """
    if not 0 <= shortest <= longest or longest < 1:
        raise ValueError(f"need 0 <= shortest <= longest and longest >= 1, got {shortest=}, {longest=}")
    if unit not in ("words", "tokens", "characters"):
        raise ValueError(f"`unit` must be 'words', 'tokens' or 'characters', got {unit!r}.")
    below = _slope("slope_below", slope_below, shortest)
    above = _slope("slope_above", slope_above, longest)

    def score(length: int) -> float:
        return max(0.0, 1.0 - below * max(shortest - length, 0) - above * max(length - longest, 0))

    def soft_length_window(
        completions: list[Any], completion_ids: list[list[int]] | None = None, **kwargs: Any
    ) -> list[float | None]:
        """How well the length of each completion fits the window, in [0, 1]."""
        return [score(length) for length in _lengths(completions, completion_ids, unit)]

    return soft_length_window


def _lengths(completions: list[Any], completion_ids: list[list[int]] | None, unit: Unit) -> list[int]:
    if unit == "tokens":
        if completion_ids is None:
            raise ValueError("unit='tokens' needs `completion_ids`, which TRL's trainers pass. Pass them too.")
        return [len(ids) for ids in completion_ids]
    texts = [completion_text(completion) for completion in completions]
    return [len(split_words(text)) if unit == "words" else len(text) for text in texts]


def _slope(name: str, slope: float | None, length: int) -> float:
    if slope is None:
        return 1.0 / max(length, 1)
    if not (math.isfinite(slope) and slope > 0):
        raise ValueError(f"`{name}` must be a positive number, got {slope!r}. Leave it out for the default.")
    return slope


def _keywords(words: Any, name: str) -> list[str]:
    words = [words] if isinstance(words, str) else list(words or ())
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"`{name}` must hold strings, got {word!r}.")
        if not word.strip():
            raise ValueError(f"`{name}` holds an empty keyword. Remove it.")
    return words


def _column(name: str | None, columns: dict[str, Any], rows: int) -> list[list[str]]:
    if name is None:
        return [[] for _ in range(rows)]
    if name not in columns:
        raise ValueError(f"keyword_rules: the data set has no column {name!r}. Its columns: {sorted(columns)}.")
    return [_keywords(cell, name) for cell in columns[name]]


def _plain(text: str, ignore_case: bool) -> str:
    text = unicodedata.normalize("NFKC", text)
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=4096)
def _pattern(word: str, whole_words: bool) -> re.Pattern[str]:
    word = word.strip()
    before = rf"(?<!{_SPACED})" if whole_words and re.match(_SPACED, word) else ""
    after = rf"(?!{_SPACED})" if whole_words and re.match(_SPACED, word[-1]) else ""
    return re.compile(before + re.escape(word) + after)

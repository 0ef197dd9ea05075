"""Answer reward: lenient matching of a known answer in free text."""

import re
import unicodedata
from typing import Any

from trl_ext.rewards.text import completion_text

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
_NUMBER_WORDS = {word: float(value) for value, word in enumerate(_UNITS)}
# Latin letters and digits only: \w would count Chinese characters, and "答案是7" would hold no number.
_BEFORE, _AFTER = "(?<![a-z0-9_])", "(?![a-z0-9_])"
# A minus sign belongs to the number unless something countable stands before it ("10-4" holds 10 and 4).
_NUMBER = re.compile(
    r"(?<![a-z0-9_.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
    rf"|{_BEFORE}(?:minus |negative )?(?:{'|'.join(_UNITS)}){_AFTER}"
)


def _clean(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-").casefold()


def _value(token: str) -> float:
    word = token.split()[-1]
    if word in _NUMBER_WORDS:
        return _NUMBER_WORDS[word] * (-1.0 if " " in token else 1.0)
    return float(token.replace(",", ""))


def _as_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text.strip())
    return _value(match.group()) if match else None


def matches(text: str, answer: str) -> bool:
    """Whether `text` gives `answer`.

    A numeric answer must equal the LAST number of the text ("3 + 4 = 7" gives 7, not 3): taking any number would pay
    for repeating the question. Digits, thousands separators, full-width digits and English words up to twenty count.
    Any other answer must appear as whole words, ignoring case; in Chinese, which has no word breaks, anywhere.
    """
    text, answer = _clean(text), _clean(answer).strip()
    number = _as_number(answer)
    if number is not None:
        found = _NUMBER.findall(text)
        return bool(found) and abs(_value(found[-1]) - number) <= 1e-9 * max(1.0, abs(number))
    left = _BEFORE if answer[:1].isascii() else ""
    right = _AFTER if answer[-1:].isascii() else ""
    return bool(answer) and re.search(left + re.escape(answer) + right, text) is not None


def answer_reward(completions: list[Any], answer: list[str | None] | None = None, **kwargs: Any) -> list[float | None]:
    """1 where the completion gives its row's `answer` (a dataset column), else 0; None where the row has no answer."""
    answers = answer or [None] * len(completions)
    return [
        None if expected is None else float(matches(completion_text(completion), str(expected)))
        for completion, expected in zip(completions, answers, strict=True)
    ]

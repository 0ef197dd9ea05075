"""Tone reward: how positive the completion sounds, by VADER (Hutto and Gilbert 2014), a lexicon that works offline."""

from functools import lru_cache
from typing import Any

from trl_ext.rewards.text import completion_text


@lru_cache(maxsize=1)
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ImportError("the tone reward needs vaderSentiment: pip install 'trl-ext[quickstart]'") from error
    return SentimentIntensityAnalyzer()


def tone_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
    """VADER's compound score of each completion, in [-1, 1]; 0 for an empty or neutral text.

    The lexicon is English: other languages score 0 unless they use its emoticons or emoji. It is easy to please with
    a pile of happy words, so train it together with rewards that ask for content.
    """
    return [float(_analyzer().polarity_scores(completion_text(completion))["compound"]) for completion in completions]

"""The tone reward: sign, range, formats."""

import pytest

pytest.importorskip("vaderSentiment")

from trl_ext.rewards import tone_reward


def test_sign_and_range():
    good, flat, bad, empty = tone_reward(
        ["I love this wonderful day!", "The table is wood.", "I hate this awful mess.", ""]
    )
    assert 0.5 < good <= 1.0 and -1.0 <= bad < -0.5
    assert flat == empty == 0.0


def test_formats_agree():
    text = "What a lovely, friendly answer"
    assert tone_reward([text]) == tone_reward([[{"role": "assistant", "content": text}]])


def test_trl_keywords_are_accepted():
    assert tone_reward(completions=["great"], prompts=["p"], completion_ids=[[1]], answer=[None])[0] > 0

"""The length window: hand-computed points, Chinese, formats."""

import pytest

from trl_ext.rewards import length_reward, length_window
from trl_ext.rewards.length import count_words


@pytest.mark.parametrize(
    "text, words",
    [
        ("", 0),
        ("... !?", 0),
        ("It's a well-known fact.", 4),
        ("今天天气很好。", 6),
        ("我有3个apple", 5),
        ("안녕 world", 3),
        ("naïve café", 2),
    ],
)
def test_count_words(text, words):
    assert count_words(text) == words


@pytest.mark.parametrize(
    "words, points",
    # Window 4..10: below, 100 * w / 4; above, 100 * (20 - w) / 10.
    [(0, 0.0), (1, 25.0), (3, 75.0), (4, 100.0), (10, 100.0), (11, 90.0), (15, 50.0), (20, 0.0), (40, 0.0)],
)
def test_window(words, points):
    assert length_window(4, 10)(["word " * words]) == [pytest.approx(points, abs=1e-9)]


def test_chinese_is_paid_like_english_of_as_many_words():
    assert length_window(5, 10)(["今天很好"]) == length_window(5, 10)(["one two three four"]) == [80.0]


def test_formats_agree():
    assert length_reward(["one two three"]) == length_reward([[{"role": "assistant", "content": "one two three"}]])


@pytest.mark.parametrize("window", [(0, 5), (6, 5)])
def test_bad_windows_are_refused(window):
    with pytest.raises(ValueError, match="shortest"):
        length_window(*window)

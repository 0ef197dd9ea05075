"""Lenient answer matching."""

import pytest

from trl_ext.rewards import answer_reward
from trl_ext.rewards.answers import matches


@pytest.mark.parametrize(
    "text, expected",
    [
        ("3 + 4 = 7", "7"),
        ("The answer is seven, my friend!", "7"),
        ("It is 1,234.", "1234"),
        ("That makes 2.50 in all", "2.5"),
        ("5 - 9 = -4", "-4"),
        ("5 − 9 = −4", "-4"),
        ("The result is minus four", "-4"),
        ("答案是７。", "7"),
        ("答案是北京。", "北京"),
        ("I think it is FRIDAY!", "Friday"),
        ("his mother-in-law, of course", "mother-in-law"),
    ],
)
def test_gives_the_answer(text, expected):
    assert matches(text, expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "7"),
        ("no number here", "7"),
        ("7 + 1 = 8", "7"),  # repeating the question must not pay
        ("The answer is 17", "7"),
        ("10-4", "-4"),  # a difference, not a negative number
        ("The answer is 7.5", "7"),
        ("The answer is -7", "7"),
        ("freight", "8"),
        ("often", "10"),
        ("nobody knows", "no"),
        ("anything", ""),
    ],
)
def test_does_not_give_the_answer(text, expected):
    assert not matches(text, expected)


def test_rows_without_an_answer_do_not_apply():
    assert answer_reward(["7", "8", "9"], answer=["7", "7", None]) == [1.0, 0.0, None]
    assert answer_reward(["7"]) == [None]


def test_formats_agree():
    assert answer_reward([[{"role": "assistant", "content": "It is 7"}]], answer=["7"]) == answer_reward(
        ["It is 7"], answer=["7"]
    )

"""The instruction reward on if-verifiable's real checkers."""

import pytest

pytest.importorskip("if_verifiable")

from trl_ext.rewards import instruction_reward

IDS = ["keywords:existence", "punctuation:no_comma"]
# As Arrow gives them back: every dict has every key, filled up with None.
ARGUMENTS = [{"keywords": ["sun"], "num_words": None}, {"keywords": None, "num_words": None}]


def rate(text):
    return instruction_reward([text], instruction_id_list=[IDS], instruction_kwargs=[ARGUMENTS])


@pytest.mark.parametrize(
    "text, share", [("The sun shines", 1.0), ("The sun, it shines", 0.5), ("Rain, rain", 0.0), ("", 0.0), ("  ", 0.0)]
)
def test_share_of_followed_instructions(text, share):
    assert rate(text) == [share]


def test_formats_agree():
    assert rate("sun, moon") == rate([{"role": "assistant", "content": "sun, moon"}])


def test_rows_without_instructions_do_not_apply():
    rewards = instruction_reward(
        ["a", "b", "a, b"],
        instruction_id_list=[None, [], ["punctuation:no_comma"]],
        instruction_kwargs=[None, None, None],
    )
    assert rewards == [None, None, 0.0]
    assert instruction_reward(["a"]) == [None]


def test_ifbench_ids_work_without_a_network(monkeypatch):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: pytest.fail("tried to download"))
    values = instruction_reward(
        ["one two three"],
        instruction_id_list=[["count:word_count_range"]],
        instruction_kwargs=[[{"min_words": 2, "max_words": 5}]],
    )
    assert values == [1.0]


def test_langdetect_gives_the_same_score_each_time():
    row = {"instruction_id_list": [["change_case:english_lowercase"]], "instruction_kwargs": [[{}]]}
    assert len({instruction_reward(["the cat sat on the mat by the door"], **row)[0] for _ in range(20)}) == 1


def test_errors_name_the_row_and_the_id():
    with pytest.raises(ValueError, match="no_such"):
        instruction_reward(["a"], instruction_id_list=[["no_such"]])
    with pytest.raises(ValueError, match="row 0: 2 instruction ids but 1"):
        instruction_reward(["a"], instruction_id_list=[IDS], instruction_kwargs=[[{}]])

"""Rule rewards: hand-computed values, Chinese, formats, columns."""

import pytest

from trl_ext.rewards import keyword_rules, repetition_penalty, soft_length_window
from trl_ext.rewards.rules import split_words


def test_words_are_those_of_the_length_reward_in_lower_case():
    assert split_words("It's 3 Well-known 苹果, OK") == ["it's", "3", "well-known", "苹", "果", "ok"]


@pytest.mark.parametrize(
    "text, ngram, share",
    [
        ("", 1, 0),
        ("a b", 3, 0),
        ("a b c d", 1, 0),
        ("a a a a", 1, 3 / 4),
        ("a b a b a b", 2, 3 / 5),  # ab ba ab ba ab
        ("A a. A, a!", 1, 3 / 4),
        ("好好好好", 2, 2 / 3),
        ("今天 今天", 2, 1 / 3),  # 今天 天今 今天
    ],
)
def test_repetition(text, ngram, share):
    assert repetition_penalty(ngram)([text]) == [pytest.approx(-share)]
    assert repetition_penalty(ngram, -0.5)([text]) == [pytest.approx(-share / 2)]


def test_no_repetition_is_plain_zero():
    assert str(repetition_penalty()(["one two three four"])[0]) == "0.0"


@pytest.mark.parametrize("arguments", [{"ngram": 0}, {"max_penalty": 0.1}, {"max_penalty": float("-inf")}])
def test_bad_repetition_arguments(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        repetition_penalty(**arguments)


@pytest.mark.parametrize(
    "text, value",
    [
        ("A cat and a DOG", 1.0),
        ("a cat", 0.5),
        ("the category of hotdogs", 0.0),
        ("cat dog bird", 0.0),
        ("", 0.0),
        (" \n", 0.0),
    ],
)
def test_keywords(text, value):
    assert keyword_rules(["cat", "dog"], ["bird"])([text]) == [value]


def test_keywords_soft():
    soft = keyword_rules(["cat", "dog"], ["bird", "fish"], hard=False)
    # cat, no bird: 2 of 4; cat, no bird, no fish: 3 of 4; bird and fish: 0 of 4.
    assert soft(["cat fish", "cat", "bird fish"]) == [0.5, 0.75, 0.0]


@pytest.mark.parametrize(
    "word, text, found",
    [
        ("苹果", "我有苹果树", True),
        ("苹果", "我有苹", False),
        ("AI", "用AI写", True),
        ("AI", "said", False),
        ("кот", "скот", False),
        ("café", "cafe\u0301 noir", True),
        ("ABC", "ＡＢＣ", True),
        ("C++", "C++11", True),
        ("@home", "me@home", True),
        ("straße", "STRASSE", True),
        ("a.c", "abc", False),
        (" new york ", "in New York.", True),
    ],
)
def test_scripts(word, text, found):
    assert keyword_rules([word])([text]) == [float(found)]


def test_case_and_parts_of_words():
    assert keyword_rules(["Cat"], ignore_case=False)(["cat", "Cat"]) == [0.0, 1.0]
    assert keyword_rules(["cat"], whole_words=False)(["category"]) == [1.0]


def test_columns_of_the_row_add_to_the_common_keywords():
    rule = keyword_rules(["x"], must_column="need", must_not_column="avoid")
    values = rule(["x a b", "x a", "x b", "x"], need=[["a", "b"], ["a", "b"], "b", None], avoid=[None, [], "x", "y"])
    assert values == [1.0, pytest.approx(2 / 3), 0.0, 1.0]


def test_rows_without_keywords_do_not_apply():
    assert keyword_rules(must_column="need")(["a", "a", ""], need=[None, "a", []]) == [None, 1.0, None]


def test_only_forbidden_words_do_not_pay_an_empty_completion():
    assert keyword_rules(must_not=["bad"])(["fine", ""]) == [1.0, 0.0]


def test_keyword_errors_name_the_argument():
    with pytest.raises(ValueError, match="no rule"):
        keyword_rules()
    with pytest.raises(ValueError, match="`must_not` holds an empty"):
        keyword_rules(must_not=["a", " "])
    with pytest.raises(ValueError, match=r"both hold \['cat'\]"):
        keyword_rules(["Cat"], ["cat"])
    with pytest.raises(ValueError, match=r"no column 'need'.*\['other'\]"):
        keyword_rules(must_column="need")(["a"], other=[1])
    with pytest.raises(TypeError, match="`need` must hold strings, got 3"):
        keyword_rules(must_column="need")(["a"], need=[[3]])


@pytest.mark.parametrize(
    "length, value",
    # Window 4..10: below length / 4, above (20 - length) / 10.
    [(0, 0.0), (1, 0.25), (4, 1.0), (10, 1.0), (11, 0.9), (15, 0.5), (20, 0.0), (40, 0.0)],
)
def test_soft_window(length, value):
    words, tokens, characters = (soft_length_window(4, 10, unit) for unit in ("words", "tokens", "characters"))
    assert words(["word " * length]) == [pytest.approx(value)]
    assert tokens(["ignored"], completion_ids=[[7] * length]) == [pytest.approx(value)]
    assert characters(["好" * length]) == [pytest.approx(value)]


def test_slopes():
    window = soft_length_window(4, 10, slope_below=0.1, slope_above=0.5)
    assert window(["w " * n for n in (0, 3, 11, 13)]) == [pytest.approx(v) for v in (0.6, 0.9, 0.5, 0.0)]


def test_a_window_without_a_lower_end_pays_the_empty_text():
    assert soft_length_window(0, 3)([""]) == [1.0]


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((5, 4), "shortest"),
        ((-1, 4), "shortest"),
        ((0, 0), "longest"),
        ((1, 2, "lines"), "unit"),
    ],
)
def test_bad_windows(arguments, match):
    with pytest.raises(ValueError, match=match):
        soft_length_window(*arguments)


@pytest.mark.parametrize("slope", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_slopes(slope):
    with pytest.raises(ValueError, match="slope_above"):
        soft_length_window(1, 2, slope_above=slope)


def test_tokens_need_ids():
    with pytest.raises(ValueError, match="completion_ids"):
        soft_length_window(1, 2, "tokens")(["a"])


@pytest.mark.parametrize("reward", [repetition_penalty(1), keyword_rules(["a"]), soft_length_window(2, 3)])
def test_formats_agree(reward):
    assert reward(["a a b c"]) == reward([[{"role": "assistant", "content": "a a b c"}]])


def test_names_are_what_trl_logs():
    made = [repetition_penalty(), keyword_rules(["a"]), soft_length_window(1, 2)]
    assert [reward.__name__ for reward in made] == ["repetition_penalty", "keyword_rules", "soft_length_window"]

"""Gates and diversity as plain reward functions: hand-computed values, groups, metrics."""

import functools
import math

import pytest
import torch

from trl_ext.rewards import gated, group_diversity


def fixed(name, values):
    def reward(completions, **kwargs):
        return values

    reward.__name__ = name
    return reward


REWARD = fixed("help", [3.0, 5.0, -2.0, -1.0, None, 4.0])
GATE = fixed("safe", [1.0, 0.4, 0.4, 0.5, 0.0, None])
PROMPTS = ["p", "p", "p", "q", "q", "q"]
SIX = ["x"] * 6


@pytest.mark.parametrize(
    "floor, expected",
    [
        # Group p passes row 0 only, its lowest reward is -2; group q passes row 3 only, its lowest reward is -1.
        ("worst", [3, -2, -2, -1, None, -1]),
        ("group_min", [3, -2, -2, -1, None, -1]),
        ("zero", [3, 0, 0, -1, None, 0]),
        (-7, [3, -7, -7, -1, None, -7]),
    ],
)
def test_floors(floor, expected):
    assert gated(REWARD, GATE, 0.5, floor)(SIX, prompts=PROMPTS) == expected


def test_worst_is_not_above_zero_and_group_min_may_be():
    reward, gate = fixed("r", [3.0, 5.0]), fixed("g", [1.0, 0.0])
    assert gated(reward, gate, 0.5)(["a", "b"]) == [3.0, 0.0]
    assert gated(reward, gate, 0.5, "group_min")(["a", "b"]) == [3.0, 3.0]


@pytest.mark.parametrize(
    "prompts, num_generations, expected",
    [
        (["p", "q", "p", "q"], None, [-4.0, -2.0, 9.0, 9.0]),  # groups 0,2 and 1,3
        (["p", "q", "p", "q"], 2, [-4.0, -4.0, 9.0, 9.0]),  # groups 0,1 and 2,3
        (["p", "p", "p", "p"], 2, [-4.0, -4.0, 9.0, 9.0]),
        (["p", "p", "p", "q"], None, [-4.0, -4.0, 9.0, 9.0]),  # groups of different size
        (None, None, [-4.0, -4.0, 9.0, 9.0]),
    ],
)
def test_groups(prompts, num_generations, expected):
    reward, gate = fixed("r", [-4.0, -2.0, 9.0, 9.0]), fixed("g", [0, 0, 1, 1])
    function = gated(reward, gate, 1, num_generations=num_generations)
    assert function(["a"] * 4, prompts=prompts) == expected


def test_message_prompts_are_compared_by_value():
    prompts = [[{"role": "user", "content": text}] for text in "pqp"]
    reward, gate = fixed("r", [-4.0, -2.0, 1.0]), fixed("g", [1, 0, 0])
    assert gated(reward, gate, 1)(["a"] * 3, prompts=prompts) == [-4.0, -2.0, -4.0]


def test_nan_is_treated_as_none():
    reward, gate = fixed("r", [math.nan, 2.0]), fixed("g", [1.0, math.nan])
    assert gated(reward, gate, -9.0, "zero")(["a", "b"]) == [None, 0.0]


def test_both_functions_get_everything_but_only_the_reward_logs_columns():
    seen = []

    def reward(completions, prompts, answer, completion_ids, log_extra, **kwargs):
        seen.append((completions, prompts, answer, completion_ids, sorted(kwargs), log_extra is None))
        return [1.0]

    given = {"completions": ["c"], "prompts": ["p"], "answer": ["a"], "completion_ids": [[1]], "other": [2]}
    gated(reward, reward, 0.0)(**given, log_extra=print)
    everything = (["c"], ["p"], ["a"], [[1]], ["log_metric", "other"])
    assert seen == [(*everything, False), (*everything, True)]


def test_metrics_are_named_like_the_trainers():
    logged = {}
    gated(REWARD, GATE, 0.5)(SIX, prompts=PROMPTS, log_metric=logged.__setitem__)
    assert logged == {"gates/safe/pass_rate": pytest.approx(2 / 6), "gates/help/mean_before": pytest.approx(9 / 5)}


def test_no_mean_where_nothing_applies():
    logged = {}
    gated(fixed("r", [None]), fixed("g", [1]), 0)(["a"], log_metric=logged.__setitem__)
    assert logged == {"gates/g/pass_rate": 1.0}


def test_names():
    assert gated(REWARD, GATE, 0.5).__name__ == "help_gated"
    assert gated(REWARD, GATE, 0.5, name="h").__name__ == "h"
    assert gated(functools.partial(REWARD), GATE, 0.5).__name__ == "help_gated"


def test_no_rows():
    assert gated(REWARD, GATE, 0.5)([]) == []


def test_a_gate_equals_the_trainers_on_full_groups():
    from trl_ext.trainers.reward_shaping import ResolvedGate, apply_gates

    torch.manual_seed(0)
    matrix = torch.randn(8, 2, dtype=torch.float64)
    ours = gated(fixed("r", matrix[:, 0].tolist()), fixed("g", matrix[:, 1].tolist()), 0.1, num_generations=4)(
        ["a"] * 8
    )
    theirs, _ = apply_gates(matrix, [ResolvedGate("g", 1, 0.1, (0,), "worst")], 4, torch.ones(2))
    assert ours == theirs[:, 0].tolist()


async def judge(completions, **kwargs):
    return [1.0]


class Judge:
    async def __call__(self, completions, **kwargs):
        return [1.0]


@pytest.mark.parametrize("bad", [torch.nn.Linear(1, 1), judge, functools.partial(judge), Judge(), "name"])
def test_what_is_no_plain_function_is_refused(bad):
    with pytest.raises(TypeError, match="`reward`"):
        gated(bad, GATE, 0.5)
    with pytest.raises(TypeError, match="`gate`"):
        gated(REWARD, bad, 0.5)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="threshold"):
        gated(REWARD, GATE, math.nan)
    with pytest.raises(ValueError, match=r"floor.*'batch'"):
        gated(REWARD, GATE, 0.5, "batch")
    with pytest.raises(ValueError, match="floor"):
        gated(REWARD, GATE, 0.5, math.inf)
    with pytest.raises(ValueError, match="help returned 6 values for 2"):
        gated(REWARD, GATE, 0.5)(["a", "b"])
    with pytest.raises(ValueError, match="num_generations"):
        gated(REWARD, GATE, 0.5, num_generations=4)(SIX)


def test_diversity_by_hand():
    # Bigrams {ab, bc}, {ab, bd}, {xy}: J = 1/3, 0, 0.
    values = group_diversity(2)(["a b c", "a b d", "x y"])
    assert values == [*[pytest.approx(1 - (1 / 3) / 2)] * 2, 1.0]


def test_diversity_in_chinese_and_ids_first():
    assert group_diversity(2)(["今天好", "今天坏"]) == [pytest.approx(2 / 3)] * 2
    assert group_diversity(1)(["a", "a"], completion_ids=[[1], [2]]) == [1.0, 1.0]


def test_diversity_within_prompts_only():
    logged = {}
    texts, prompts = ["a", "a", "b", "a", "c"], ["p", "p", "q", "q", "r"]
    values = group_diversity(1)(texts, prompts=prompts, log_metric=logged.__setitem__)
    assert values == [0.0, 0.0, 1.0, 1.0, None]
    assert logged == {"group_diversity/has_siblings": 0.8}


def test_diversity_cap_and_empty_texts():
    assert group_diversity(3, cap=0.3)(["a", "b"]) == [0.3, 0.3]
    assert group_diversity()(["", "", ""]) == [0.0] * 3
    assert group_diversity()(["", "a"]) == [1.0, 1.0]
    assert group_diversity()([], log_metric=pytest.fail) == []


@pytest.mark.parametrize("arguments", [{"ngram": 0}, {"cap": 0.0}, {"cap": 1.1}])
def test_bad_diversity_arguments(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        group_diversity(**arguments)

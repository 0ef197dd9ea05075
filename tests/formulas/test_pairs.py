import itertools
import math
from collections import Counter

import pytest
import torch

from tests.formulas.vectors import SOURCES, load_vectors
from trl_ext.formulas.pairs import select_pairs

RULES = ["best_worst", "best_random", "all_pairs"]
VECTORS = [
    pytest.param(case, id=f"{source}-{index}")
    for source in SOURCES
    for index, case in enumerate(load_vectors("preference", source)["pairs"]["cases"])
]


@pytest.mark.parametrize("case", VECTORS)
def test_vectors(case):
    """Catches: a tie that makes a pair, a NaN that wins, the last instead of the lowest index."""
    pairs = select_pairs(case["scores"], case["texts"], case["rule"], case["min_margin"])
    assert pairs == [tuple(pair) for pair in case["expected"]]
    as_tensor = torch.tensor(case["scores"], dtype=torch.float32)
    assert select_pairs(as_tensor, case["texts"], case["rule"], case["min_margin"]) == pairs


def test_hand_worked():
    """Catches: chosen and rejected swapped, and all_pairs with both orders or with the tie."""
    # scores a 1, b 3, c 3, d 0: best b (index 1, the lower of the tie), worst d (3)
    # all pairs: a > d, b > a, b > d, c > a, c > d; b = c is no pair
    scores, texts = [1.0, 3.0, 3.0, 0.0], ["a", "b", "c", "d"]
    assert select_pairs(scores, texts, "best_worst") == [(1, 3)]
    assert select_pairs(scores, texts, "all_pairs") == [(0, 3), (1, 0), (1, 3), (2, 0), (2, 3)]
    assert select_pairs(scores, texts, "best_random")[0] in [(1, 0), (1, 3)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("position", range(4))
def test_failed_scores_are_dropped_wherever_they_are(rule, bad, position):
    """Catches: argmax over NaN or inf, and indices that shift when rows are dropped."""
    scores, texts = [0.5, 2.0, 1.0], ["a", "b", "c"]
    clean = select_pairs(scores, texts, rule, seed=1)
    scores.insert(position, bad)
    texts.insert(position, "bad")
    shifted = [tuple(index + (index >= position) for index in pair) for pair in clean]
    assert clean
    assert select_pairs(scores, texts, rule, seed=1) == shifted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("scores", "texts"),
    [
        ([], []),
        ([1.0], ["a"]),
        ([1.0, math.nan], ["a", "b"]),
        ([math.nan, math.nan], ["a", "b"]),
        ([1.0, 1.0, 1.0], ["a", "b", "c"]),
        ([2.0, 1.0], ["same", "same"]),
        ([3.0, 2.0, 1.0], ["same", "same", "same"]),
    ],
)
def test_no_pair_is_an_empty_list_and_no_error(rule, scores, texts):
    """Catches: chosen == rejected, a pair of identical texts, a crash on a prompt without signal."""
    assert select_pairs(scores, texts, rule) == []


@pytest.mark.parametrize("rule", RULES)
def test_margin_is_inclusive(rule):
    """Catches: margin > min_margin, and min_margin used although it is 0 for a tie."""
    scores, texts = [1.5, 1.0], ["a", "b"]
    assert select_pairs(scores, texts, rule, 0.5) == [(0, 1)]
    assert select_pairs(scores, texts, rule, 0.5 + 1e-9) == []


def test_best_and_worst_with_the_same_text_give_no_pair():
    """The scorer contradicts itself here. Catches: a quiet second choice."""
    assert select_pairs([3.0, 2.0, 1.0], ["x", "y", "x"], "best_worst") == []
    assert select_pairs([3.0, 2.0, 1.0], ["x", "y", "x"], "best_random") == [(0, 1)]


def test_all_pairs_equals_enumeration():
    """Catches: any condition left out of the matrix form."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        scores = torch.randint(0, 5, (7,), generator=generator).float()
        scores[torch.rand(7, generator=generator) < 0.2] = math.nan
        texts = [f"text {i}" for i in torch.randint(0, 4, (7,), generator=generator).tolist()]
        margin = 2.0
        expected = [
            (i, j)
            for i, j in itertools.product(range(7), range(7))
            if scores[i].isfinite() and scores[j].isfinite()
            if scores[i] - scores[j] >= margin and texts[i] != texts[j]
        ]
        assert select_pairs(scores, texts, "all_pairs", margin) == expected
        for rule in ("best_worst", "best_random"):
            assert set(select_pairs(scores, texts, rule, margin)) <= set(expected)


def test_best_random_draws_every_valid_loser_and_only_those():
    """Catches: a draw that may hit the winner, a tie, a failed score, or always the same position."""
    scores, texts = [0.0, 5.0, 5.0, math.nan, 1.0, 2.0, 3.0], ["a", "b", "c", "d", "e", "b", "f"]
    drawn = Counter(select_pairs(scores, texts, "best_random", seed=seed)[0] for seed in range(300))
    assert set(drawn) == {(1, 0), (1, 4), (1, 6)}
    assert min(drawn.values()) > 60  # 100 expected, standard deviation 8


def test_best_random_is_repeatable_and_leaves_the_global_state_alone():
    """Catches: torch.randint without a generator, which makes the trained model depend on the number of prompts."""
    scores, texts = [float(i) for i in range(20)], [str(i) for i in range(20)]
    state = torch.get_rng_state()
    first = select_pairs(scores, texts, "best_random", seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert select_pairs(scores, texts, "best_random", seed=7) == first


def test_bfloat16_and_gradient_scores():
    scores = torch.tensor([1.0, 3.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    assert select_pairs(scores, ["a", "b", "c"], "best_worst") == [(1, 0)]


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="`scores` has 2 entries, `texts` has 1"):
        select_pairs([1.0, 2.0], ["a"], "best_worst")
    with pytest.raises(ValueError, match="'worst_best'"):
        select_pairs([1.0, 2.0], ["a", "b"], "worst_best")
    with pytest.raises(ValueError, match="`scores`"):
        select_pairs(torch.zeros(2, 2), ["a", "b"], "best_worst")
    for margin in (-0.1, math.nan):
        with pytest.raises(ValueError, match="`min_margin`"):
            select_pairs([1.0, 2.0], ["a", "b"], "best_worst", margin)

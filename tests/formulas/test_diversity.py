from __future__ import annotations

import pytest
import torch

from trl_ext.formulas.diversity import group_ngram_diversity


def padded(rows: list[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, T) ids and mask."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def by_sets(rows: list[list[int]], num_generations: int, n: int) -> list[float]:
    """The definition with Python's sets."""
    grams = [
        {tuple(row[i : i + n]) for i in range(len(row) - n + 1)} if len(row) >= n else {tuple(row)} for row in rows
    ]
    result = []
    for index, own in enumerate(grams):
        start = index - index % num_generations
        siblings = [grams[j] for j in range(start, start + num_generations) if j != index]
        result.append(1 - sum(len(own & other) / len(own | other) for other in siblings) / len(siblings))
    return result


def random_rows(size: int, seed: int, longest: int = 9, vocabulary: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (size,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def test_hand_worked() -> None:
    """Catches: the similarity instead of 1 - it, itself counted as a sibling, G for G - 1, |A| for |A or B|."""
    # bigrams: A {12, 23}, B {12, 24}, C {56, 67}; J(A, B) = 1 of 3, the others share nothing
    # A and B: 1 - (1/3 + 0) / 2 = 5/6; C: 1
    ids, mask = padded([[1, 2, 3], [1, 2, 4], [5, 6, 7]])
    assert group_ngram_diversity(ids, mask, 3, n=2).tolist() == pytest.approx([5 / 6, 5 / 6, 1.0], abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("num_generations", [2, 3, 4])
def test_equals_the_definition_on_random_groups(num_generations: int, n: int) -> None:
    """Catches: counts for sets, windows that reach into padding, groups mixed, a wrong union."""
    rows = random_rows(12, seed=n)
    actual = group_ngram_diversity(*padded(rows), num_generations, n)
    assert actual.dtype == torch.float32
    assert actual.tolist() == pytest.approx(by_sets(rows, num_generations, n), abs=1e-6)


def test_equal_siblings_have_exactly_none_and_disjoint_ones_exactly_one() -> None:
    same = group_ngram_diversity(*padded([[1, 2, 3, 4]] * 3), 3)
    assert torch.equal(same, torch.zeros(3))
    different = group_ngram_diversity(*padded([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), 3)
    assert torch.equal(different, torch.ones(3))


def test_repetition_counts_once() -> None:
    """Catches: multisets. [1, 1, 1, 1] and [1, 1] have the same set of bigrams."""
    assert torch.equal(group_ngram_diversity(*padded([[1, 1, 1, 1], [1, 1]]), 2, n=2), torch.zeros(2))


def test_groups_do_not_see_each_other() -> None:
    """Catches: siblings over the whole batch (the groups below would then be half similar)."""
    rows = [[1, 2, 3], [4, 5, 6]]
    alone = group_ngram_diversity(*padded(rows), 2, n=1)
    together = group_ngram_diversity(*padded(rows + rows), 2, n=1)
    assert torch.equal(together, torch.cat([alone, alone]))


def test_order_within_the_group_does_not_matter() -> None:
    rows = random_rows(4, seed=0)
    forward = group_ngram_diversity(*padded(rows), 4, n=2)
    backward = group_ngram_diversity(*padded(rows[::-1]), 4, n=2)
    assert forward.tolist() == pytest.approx(backward.flip(0).tolist(), abs=1e-6)


@pytest.mark.parametrize("pad", [0, 1, -1, -100, 151_643])
def test_padding_tokens_do_not_matter(pad: int) -> None:
    """Also where the pad token is an ordinary one (pad == eos). Catches: n-grams of padding, windows across the end."""
    rows = [[1, 2, 1], [1], [2, 1, 1, 2, 2]]
    actual = group_ngram_diversity(*padded(rows, pad), 3, n=2)
    assert actual.tolist() == pytest.approx(by_sets(rows, 3, 2), abs=1e-6)


def test_more_padding_changes_nothing() -> None:
    ids, mask = padded(random_rows(4, seed=1))
    wide = [torch.cat([x, torch.zeros(4, 7, dtype=torch.long)], dim=1) for x in (ids, mask)]
    assert torch.equal(group_ngram_diversity(ids, mask, 4), group_ngram_diversity(*wide, 4))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int32])
def test_mask_of_any_dtype(mask_dtype: torch.dtype) -> None:
    ids, mask = padded(random_rows(4, seed=2))
    assert torch.equal(group_ngram_diversity(ids, mask.to(mask_dtype), 4), group_ngram_diversity(ids, mask, 4))


class TestShort:
    def test_one_token_answers(self) -> None:
        """ "Yes" and "No" differ, "Yes" and "Yes" do not. Catches: no n-gram at all, 0 / 0 = NaN."""
        diversity = group_ngram_diversity(*padded([[5], [5], [6]]), 3, n=3)
        assert diversity.tolist() == pytest.approx([0.5, 0.5, 1.0], abs=1e-6)

    def test_a_short_answer_is_no_prefix_of_a_longer_one(self) -> None:
        """Catches: comparing only the tokens both have."""
        assert torch.equal(group_ngram_diversity(*padded([[1], [1, 2], [1, 2, 3]]), 3, n=3), torch.ones(3))

    def test_empty_answers_are_equal_to_each_other(self) -> None:
        ids, mask = torch.full((3, 2), 7), torch.tensor([[0, 0], [0, 0], [1, 1]])
        assert group_ngram_diversity(ids, mask, 3).tolist() == pytest.approx([0.5, 0.5, 1.0], abs=1e-6)

    def test_width_zero(self) -> None:
        empty = torch.zeros(2, 0, dtype=torch.long)
        assert torch.equal(group_ngram_diversity(empty, empty, 2), torch.zeros(2))

    def test_group_of_one_has_none(self) -> None:
        assert torch.equal(group_ngram_diversity(*padded([[1, 2], [3, 4]]), 1), torch.zeros(2))


class TestErrors:
    def test_shapes_and_group_size(self) -> None:
        ids, mask = padded([[1, 2], [3, 4], [5, 6]])
        with pytest.raises(ValueError, match=r"`token_ids` has 3 rows.*num_generations=2"):
            group_ngram_diversity(ids, mask, 2)
        with pytest.raises(ValueError, match="`mask`"):
            group_ngram_diversity(ids, mask[:, :1], 3)
        with pytest.raises(ValueError, match="`token_ids`"):
            group_ngram_diversity(ids[0], mask[0], 1)

    @pytest.mark.parametrize("n", [0, -1])
    def test_n(self, n: int) -> None:
        with pytest.raises(ValueError, match="`n` must be at least 1"):
            group_ngram_diversity(*padded([[1], [2]]), 2, n)

"""Scoring in batches of bounded size: every score is that of the row alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.trainers.reward_worker import make_reward_model, one_by_one
from trl_ext.rewards.sequence_scoring import score_sequences, token_budget_batches

PAD = 0


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two labels, pad token 0."""
    folder = make_reward_model(tiny_model, tmp_path_factory.mktemp("scoring"), labels=2)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert loaded.config.pad_token_id == PAD
    return loaded


def rows(count: int = 12, longest: int = 30) -> list[list[int]]:
    """Rows of 1 to `longest` tokens, none of them the pad token."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(1, 900, (length,), generator=generator).tolist() for length in lengths]


class Spy:
    """Records the shapes and masks of each forward."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.device = model, model.config, model.device
        self.shapes: list[tuple[int, ...]] = []
        self.masks: list[torch.Tensor] = []

    def __call__(self, **inputs: Any) -> Any:
        self.shapes.append(tuple(inputs["input_ids"].shape))
        self.masks.append(inputs["attention_mask"])
        return self.model(**inputs)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_batches_hand_worked() -> None:
    """Catches: a budget of tokens without padding, a budget that is exceeded by one row, shortest first."""
    # 9 | 5 and 3, padded 2 * 5 = 10 | 2: with it the second batch would have 3 * 5 = 15
    assert list(token_budget_batches([3, 9, 2, 5], 10)) == [[1], [3, 0], [2]]
    assert list(token_budget_batches([3, 9, 2, 5], 9)) == [[1], [3], [0, 2]]
    assert list(token_budget_batches([4, 4, 4], 12)) == [[0, 1, 2]]


@pytest.mark.parametrize("budget", [1, 7, 40, 200, 10**6])
def test_batches_hold_everything_once_within_the_budget(budget: int) -> None:
    """Catches: a row that is lost at the border of a batch, one that is too long and loops for ever or is dropped."""
    lengths = [len(row) for row in rows(60)]
    batches = list(token_budget_batches(lengths, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= budget
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts == sorted(firsts, reverse=True)


def test_no_row_is_no_batch() -> None:
    """Catches: an empty batch, on which a model fails."""
    assert list(token_budget_batches([], 10)) == []


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_that_is_not_positive_is_refused(budget: int) -> None:
    """Catches: 0 taken for "no limit", or for one row at a time."""
    with pytest.raises(ValueError, match=f"tokens_per_batch={budget}"):
        list(token_budget_batches([1], budget))


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 30, 64, 16384])
def test_scores_are_those_of_each_row_alone(budget: int, model: Any) -> None:
    """Whatever the batch. Catches: scores in the order of lengths, a score of a pad token, attention to padding."""
    found = score_sequences(model, rows(), PAD, budget)
    assert found.shape == (12, 2)
    torch.testing.assert_close(found, one_by_one(model, rows()).T, rtol=0, atol=1e-5)
    assert found.std(0).min() > 0.1


def test_order_does_not_matter(model: Any) -> None:
    """Catches: scores written to the wrong row."""
    straight = score_sequences(model, rows(), PAD)
    assert torch.equal(score_sequences(model, rows()[::-1], PAD), straight.flip(0))


def test_equal_rows_are_scored_once(model: Any) -> None:
    """Rows of a group are often equal. Catches: a forward for each, a score for the first one only."""
    once = rows(5)
    spy = Spy(model)
    found = score_sequences(spy, [once[0], *once, once[3], once[0], tuple(once[4])], PAD)  # type: ignore[list-item]
    assert sum(shape[0] for shape in spy.shapes) == 5
    expected = score_sequences(model, once, PAD)
    assert torch.equal(found, expected[[0, 0, 1, 2, 3, 4, 3, 0, 4]])


def test_a_forward_has_at_most_the_budget(model: Any) -> None:
    """Counted in the forward itself, padding included. Catches: a budget that is not passed on."""
    spy = Spy(model)
    score_sequences(spy, rows(40), PAD, 100)
    assert len(spy.shapes) > 3
    assert all(shape[0] * shape[1] <= 100 for shape in spy.shapes)


def test_the_pad_token_inside_a_row_is_read(model: Any) -> None:
    """Where pad is eos, a prompt of several turns holds it. Catches: a mask made from token values."""
    inside = [[5, PAD, 7, 8, 9], [11, 12], [PAD, 6, PAD, 6]]
    spy = Spy(model)
    found = score_sequences(spy, inside, PAD)
    torch.testing.assert_close(found, one_by_one(model, inside).T, rtol=0, atol=1e-5)
    assert [mask.sum(1).tolist() for mask in spy.masks] == [[5, 4, 2]]
    without = score_sequences(model, [[5, 7, 8, 9]], PAD)
    assert (found[0] - without[0]).abs().max() > 1e-3


def test_a_row_that_ends_in_the_pad_token_is_scored_as_in_training(model: Any) -> None:
    """The model's rule takes the last token that is not pad. Catches: a rule of our own, unlike in training."""
    found = score_sequences(model, [[5, 6, 7, PAD], [5, 6, 7], [1, 2, 3, 4, 5, 6]], PAD)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_another_pad_token(model: Any) -> None:
    """The one that is given fills the rows up. Catches: 0 as a constant."""
    other = AutoModelForSequenceClassification.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    other.config.pad_token_id = 17
    lines = [[5, 6, 0], [5, 6, 0, 0, 9, 10, 11, 12]]
    found = score_sequences(other, lines, 17)
    torch.testing.assert_close(found, one_by_one(other, lines).T, rtol=0, atol=1e-5)
    assert (found[0] - score_sequences(model, lines, PAD)[0]).abs().max() > 1e-3


def test_no_gradient_and_float32(model: Any) -> None:
    """Catches: a graph kept for every score, half-precision scores whose differences are 0."""
    half = AutoModelForSequenceClassification.from_pretrained(model.name_or_path, dtype=torch.bfloat16).eval()
    found = score_sequences(half, rows(3), PAD)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert not score_sequences(model, rows(3), PAD).requires_grad


def test_nothing_to_score(model: Any) -> None:
    """Catches: an error, or a result of another rank, for no row."""
    assert score_sequences(model, [], PAD).shape == (0, 2)


def test_a_row_without_a_token_is_refused(model: Any) -> None:
    """Catches: a score of padding."""
    with pytest.raises(ValueError, match="without a token"):
        score_sequences(model, [[1, 2], []], PAD)


def test_a_cache_is_not_built() -> None:
    """Catches: keys and values of whole batches kept for nothing."""
    seen = {}

    def model(**inputs: Any) -> Any:
        seen.update(inputs)
        return SimpleNamespace(logits=torch.zeros(len(inputs["input_ids"]), 1))

    fake = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(num_labels=1))
    fake_model: Any = type("Fake", (), {"__call__": lambda self, **inputs: model(**inputs), **vars(fake)})()
    score_sequences(fake_model, [[1]], PAD)
    assert seen["use_cache"] is False

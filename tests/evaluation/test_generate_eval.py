"""Before/after evaluation: sampling, scoring and the paired comparison, on a tiny model and by hand."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_ext.evaluation.generate_eval import Scored, compare, compare_all, overall, sample_completions, score

RANGES = {"low": (0.0, 100.0), "high": (-1.0, 1.0)}


def test_sampling_repeats_and_disturbs_nothing(tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = ["a short one", "one that is quite a bit longer than the first", [{"role": "user", "content": "hi"}]]
    model.train()
    side = tokenizer.padding_side
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = sample_completions(model, tokenizer, prompts, samples=2, max_new_tokens=6, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and tokenizer.padding_side == side
    assert first == sample_completions(model, tokenizer, prompts, samples=2, max_new_tokens=6, seed=1)
    assert first != sample_completions(model, tokenizer, prompts, samples=2, max_new_tokens=6, seed=2)
    assert [len(texts) for texts in first] == [2, 2, 2]
    assert first[0][0] != first[0][1]


def test_score_keeps_rows_and_samples_apart():
    # Row 0 pays "a", row 1 "b"; row 2 has nothing to match.
    dataset = Dataset.from_list([{"prompt": "p0", "want": "a"}, {"prompt": "p1", "want": "b"}, {"prompt": "p2"}])

    def hit(completions, prompts, want, **kwargs):
        assert prompts == ["p0", "p0", "p1", "p1", "p2", "p2"]
        return [None if w is None else float(w in c) for c, w in zip(completions, want, strict=True)]

    scored = score([["a", "b"], ["b", "b"], ["a", "a"]], dataset, [hit])
    np.testing.assert_array_equal(scored.rewards["hit"], [[1, 0], [1, 1], [np.nan, np.nan]])
    assert scored.prompts == ["p0", "p1", "p2"]


def test_compare_by_hand():
    before = np.array([[0.0, 1.0], [1.0, 1.0], [np.nan, np.nan]])
    after = np.array([[1.0, 1.0], [1.0, 1.0], [np.nan, np.nan]])
    row = compare("x", before, after)
    # Prompt means 0.5, 1 -> 1, 1: means 0.75 -> 1, spread sqrt(2 * 0.25^2) -> 0, differences 0.5 and 0.
    assert (row.prompts, row.before, row.after, row.difference) == (2, 0.75, 1.0, 0.25)
    assert row.before_spread == pytest.approx(0.35355339, abs=1e-7)
    assert row.after_spread == 0.0
    assert (row.low, row.high) == (0.0, 0.5)


def test_interval_covers_a_known_difference():
    # 95 % intervals of 200 experiments of 30 prompts: about 190 must hold the true difference 0.3.
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        easiness = random.normal(size=(30, 1))
        before = easiness + 0.5 * random.normal(size=(30, 2))
        after = easiness + 0.3 + 0.5 * random.normal(size=(30, 2))
        row = compare("x", before, after, resamples=500)
        hits += row.low <= 0.3 <= row.high
    assert 175 <= hits <= 199


def test_overall_puts_scales_on_one_axis():
    # low 50 of 0..100 -> 0.5; high 1 of -1..1 -> 1; where one does not apply, the other counts alone.
    rewards = {"low": np.array([[50.0], [np.nan]]), "high": np.array([[1.0], [0.0]])}
    scored = Scored(["p", "q"], [["c"], ["c"]], rewards)
    np.testing.assert_allclose(overall(scored, RANGES), [[0.75], [0.5]])
    assert [row.name for row in compare_all(scored, scored, RANGES)] == ["low", "high", "overall"]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="same prompts"):
        compare("x", np.ones((2, 1)), np.ones((3, 1)))
    with pytest.raises(ValueError, match="x: no held-out prompt"):
        compare("x", np.full((2, 1), np.nan), np.ones((2, 1)))

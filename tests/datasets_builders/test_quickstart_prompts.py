"""The quickstart's prompts: deterministic, disjoint, and scored by the rewards they name."""

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("if_verifiable")

from datasets_builders import quickstart_prompts
from datasets_builders.quickstart_prompts import build_quickstart_prompts


def texts(dataset):
    return [row["prompt"][-1]["content"] for row in dataset]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_prompt_is_in_both(seed):
    train, heldout = build_quickstart_prompts(seed=seed)
    everything = texts(train) + texts(heldout)
    assert (len(train), len(heldout)) == (80, 24)
    assert len(set(everything)) == len(everything)


def test_the_seed_decides():
    first, again, other = (texts(build_quickstart_prompts(20, 8, seed=seed)[0]) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_half_have_answers_and_half_instructions():
    for dataset in build_quickstart_prompts(21, 9):
        for row in dataset:
            assert (row["answer"] is None) != (row["instruction_id_list"] is None)
        assert abs(sum(row["answer"] is not None for row in dataset) - len(dataset) / 2) <= 1


def test_rows_go_through_the_rewards():
    from trl_ext.rewards import load_reward

    _, heldout = build_quickstart_prompts(8, 8)
    columns = {name: heldout[name] for name in heldout.column_names if name != "prompt"}
    perfect = [
        f"It is {row['answer']}." if row["answer"] else " ".join(row["instruction_kwargs"][0]["keywords"])
        for row in heldout
    ]
    assert load_reward("answer_reward")(completions=perfect, **columns) == [1.0] * 4 + [None] * 4
    assert load_reward("instruction_reward")(completions=perfect, **columns) == [None] * 4 + [1.0] * 4


def test_more_prompts_than_exist_are_refused():
    with pytest.raises(ValueError, match="fewer prompts"):
        build_quickstart_prompts(2000, 24)


def test_an_overlap_is_refused(monkeypatch):
    row = quickstart_prompts._row("same")
    monkeypatch.setattr(quickstart_prompts, "_sum_rows", lambda count, seed: [row] * count)
    with pytest.raises(RuntimeError, match="also training prompts"):
        build_quickstart_prompts(8, 4)

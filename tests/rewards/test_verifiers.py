"""Adapters to math-verify and reasoning-gym, on the real libraries."""

import json
import sys
import threading

import pytest

from trl_ext.rewards import math_reward, reasoning_gym_reward
from trl_ext.rewards.verifiers import EVALUATING_DATASETS


@pytest.mark.parametrize("module, make", [("math_verify", math_reward), ("reasoning_gym", reasoning_gym_reward)])
def test_a_missing_package_names_the_install_line(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {module.replace('_', '-')}"):
        make()


class TestMath:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("math_verify")

    @pytest.mark.parametrize(
        "text, answer, value",
        [
            ("The answer is 7", "7", 1),
            ("3 + 4 = 7", 7, 1),
            ("first 7, then 8", "7", 0),
            (r"\boxed{7} or maybe \boxed{8}", "7", 0),
            (r"\boxed{\frac{2}{4}}, not 3", "1/2", 1),
            (r"\boxed{0.001}", "10^{-3}", 1),
            ("$x^2+1$", "x^2+1", 1),
            ("$1+x^2$", "$x^2+1$", 1),
            ("72", "72 clips", 1),
            ("答案是7。", "7", 1),
            ("答案：７", "7", 1),
            ("共有-7元", "−7", 1),
            ("seven", "7", 0),
            ("", "7", 0),
            ("7", "yes", None),
            ("七", "七", None),
            ("7", "", None),
            ("7", None, None),
        ],
    )
    def test_answers(self, text, answer, value):
        assert math_reward()([text], answer=[answer]) == [value]

    def test_formats_columns_and_errors(self):
        messages = [[{"role": "assistant", "content": "$7$"}]]
        assert math_reward("gold")(messages, gold=["7"]) == [1.0]
        with pytest.raises(ValueError, match=r"no column 'gold'.*\['answer'\]"):
            math_reward("gold")(["7"], answer=["7"])

    @pytest.mark.timeout(60)
    def test_outside_the_main_thread_time_outs_hold_too(self):
        results = []
        rows = ["$7$", r"\boxed{9^{9^{9^{9}}}}", "6"]
        thread = threading.Thread(target=lambda: results.append(math_reward()(rows, answer=["7", "7", None])))
        thread.start()
        thread.join()
        assert results == [[1.0, 0.0, None]]


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("reasoning_gym")

    @staticmethod
    def columns(name, **config):
        import reasoning_gym

        entry = reasoning_gym.create_dataset(name, size=1, seed=1, **config)[0]
        return {"source_dataset": [name], "answer": [entry["answer"]], "metadata": [json.dumps(entry["metadata"])]}

    @pytest.mark.parametrize("name", ["chain_sum", "arc_agi", "rearc", "prime_factorization", "leg_counting"])
    def test_the_right_answer_earns_one(self, name):
        row = self.columns(name)
        assert reasoning_gym_reward()(row["answer"], **row) == [1.0]

    def test_several_right_answers(self):
        row = self.columns("countdown")
        row |= {"metadata": [json.dumps({"numbers": [2, 3, 4], "target": 14})], "answer": ["2+3*4"]}
        reward = reasoning_gym_reward(allow_eval=True)
        assert [reward([text], **row)[0] for text in ("4*3+2", "(2+3)*4", "14")] == [1.0, 0.05, 0.05]

    def test_tags(self):
        row = self.columns("chain_sum")
        text = f"I add. <answer>1</answer> No: <answer> {row['answer'][0]} </answer> done"
        assert reasoning_gym_reward()([text], **row) == [1.0]
        assert reasoning_gym_reward(tag=None)([text], **row)[0] < 1.0
        assert reasoning_gym_reward(tag="result")([text.replace("answer", "result")], **row) == [1.0]

    def test_the_name_may_come_from_the_metadata_and_rows_may_have_none(self):
        row = self.columns("chain_sum")
        del row["source_dataset"]
        assert reasoning_gym_reward()(row["answer"], **row) == [1.0]
        assert reasoning_gym_reward()(["7"], answer=[None], metadata=[None]) == [None]

    def test_text_that_a_scorer_cannot_read_earns_nothing(self):
        assert reasoning_gym_reward()(["none at all"], **self.columns("prime_factorization")) == [0.0]

    def test_broken_entries_and_unknown_names_are_refused(self):
        row = self.columns("prime_factorization")
        with pytest.raises(ValueError, match=r"row 0.*own entry"):
            reasoning_gym_reward()(["2"], **(row | {"answer": ["x"]}))
        with pytest.raises(ValueError, match="no data set 'sums'"):
            reasoning_gym_reward()(["2"], **(row | {"source_dataset": ["sums"]}))
        with pytest.raises(ValueError, match="no column 'metadata'"):
            reasoning_gym_reward()(["2"], answer=["2"])

    def test_scorers_that_evaluate_need_consent(self):
        row = self.columns("countdown")
        with pytest.raises(ValueError, match=r"row 0.*'countdown'.*SandboxedReward.*allow_eval=True"):
            reasoning_gym_reward()(["1"], **row)

    def test_every_scorer_that_evaluates_is_listed(self, tmp_path):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        canary = tmp_path / "canary"
        attack = f"__import__('pathlib').Path({str(canary)!r}).touch()"
        found = set()
        for name in sorted(set(DATASETS) - {"composite"}):
            dataset = reasoning_gym.create_dataset(name, size=1, seed=1)
            for text in (attack, f"[{attack}]"):
                try:
                    dataset.score_answer(text, dataset[0])
                except Exception:
                    pass
            if canary.exists():
                found.add(name)
                canary.unlink()
        assert found == EVALUATING_DATASETS

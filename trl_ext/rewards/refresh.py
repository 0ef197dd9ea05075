"""`RewardRefresher`: keep the reward model right where the policy has moved to."""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import TrainerCallback

from trl_ext.rewards.ensemble import RewardEnsemble

# Answers (prompt, two completions) with the index of the better one, or None where neither is better.
Judge = Callable[[Any, Any, Any], int | None]


class FileJudge:
    """Labels by people: asks in `to_label.jsonl`, reads answers from `labels.jsonl` of the same folder.

    A line of the first is {key, prompt, a, b}; a line of the second {key, better: "a", "b" or "tie"}. A pair without an
    answer yet counts as a tie and is asked for once.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, prompt: Any, first: Any, second: Any) -> int | None:
        text = json.dumps([prompt, first, second], ensure_ascii=False, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        labels = {row["key"]: row["better"] for row in _lines(self.folder / "labels.jsonl")}
        if key not in labels:
            asked = self.folder / "to_label.jsonl"
            if key not in {row["key"] for row in _lines(asked)}:
                row = {"key": key, "prompt": prompt, "a": first, "b": second}
                with open(asked, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            return None
        if labels[key] not in ("a", "b", "tie"):
            raise ValueError(f"labels.jsonl: {key} has better={labels[key]!r}. Write 'a', 'b' or 'tie'.")
        return {"a": 0, "b": 1}.get(labels[key])


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class RewardRefresher(TrainerCallback):
    """A reward function over an ensemble that is trained further, while the policy trains, on what the policy writes.

    A reward model is right near its training data; the policy leaves them, and finds what the model overrates (Gao et
    al. 2023, arXiv 2210.10760). Every `every` optimiser steps, pairs of completions from the last generations are
    labelled, the ensemble is trained on the old and the new pairs, standardised on the *same* calibration texts as
    before, so that the scale of the reward does not jump, and put in place between two generations.

    Use it twice: `GRPOTrainer(reward_funcs=[refresher], callbacks=[refresher], ...)`; or between rounds, call
    `refresh(step)` yourself.

    Args:
        folder: the ensemble that `RewardTrainer` saved.
        old_pairs: its training pairs (`prompt`, `chosen`, `rejected`), so that it does not forget them.
        judge: answers (prompt, a, b) with 0, 1, or None for a tie, which gives no pair; or `FileJudge`.
        make_trainer: (folder of the current ensemble, pairs, folder for the new one) -> a `RewardTrainer` that starts
            from the first; it decides sizes and learning rate.
        calibration: (prompts, completions) that every version is standardised on.
        every: optimiser steps between refreshes. pairs: labels to ask for at each. seed: of the choice of pairs.
        options: for `RewardEnsemble.load`: `reduce`, `coef`, ...

    Raises:
        ValueError: a number that is not positive.

    When it is wrong: a judge that shares the reward model's faults only confirms them. On several ranks every rank
    collects its own completions; use it on one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        old_pairs: Dataset,
        judge: Judge,
        make_trainer: Callable[[str, Dataset, str], Any],
        calibration: tuple[Sequence[Any], Sequence[Any]],
        every: int,
        pairs: int = 64,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if every < 1 or pairs < 1:
            raise ValueError(f"every={every} and pairs={pairs} must be at least 1.")
        self.folder, self.old_pairs, self.judge, self.make_trainer = Path(folder), old_pairs, judge, make_trainer
        self.calibration, self.every, self.pairs, self.options = calibration, every, pairs, options
        self._random = random.Random(seed)
        self._seen: OrderedDict[str, tuple[Any, list[Any]]] = OrderedDict()
        self.new_pairs: list[dict[str, Any]] = []
        self.refreshed: list[tuple[int, int]] = []  # (step, new pairs so far)
        self.__name__ = str(options.get("name", "refreshed_reward"))
        self.ensemble = self._load(self.folder)

    def _load(self, folder: Path) -> RewardEnsemble:
        ensemble = RewardEnsemble.load(folder, **self.options)
        ensemble.calibrate(*self.calibration)
        return ensemble

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Scores of the current ensemble; the completions are remembered, up to four times `pairs`, the newest."""
        for prompt, completion in zip(prompts, completions, strict=True):
            self._seen.setdefault(repr(prompt), (prompt, []))[1].append(completion)
            self._seen.move_to_end(repr(prompt))
        while len(self._seen) > 4 * self.pairs:
            self._seen.popitem(last=False)
        return self.ensemble(prompts, completions, **columns)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refresh when it is time; the next generation is scored by the new ensemble."""
        if state.global_step % self.every == 0:
            self.refresh(state.global_step)

    def refresh(self, step: int) -> int:
        """Label, train, put in place; returns the number of new pairs, 0 when nothing could be labelled."""
        fresh = self._label()
        if not fresh:
            return 0
        self.new_pairs += fresh
        columns = ["prompt", "chosen", "rejected"]
        rows = concatenate_datasets([self.old_pairs.select_columns(columns), Dataset.from_list(self.new_pairs)])
        target = self.folder.with_name(f"{self.folder.name}-step{step}")
        current = self.ensemble.folder or self.folder
        trainer = self.make_trainer(str(current), rows, str(target))
        trainer.train()
        trainer.save_model(str(target))
        del trainer
        self.ensemble = self._load(target)
        self.refreshed.append((step, len(self.new_pairs)))
        return len(fresh)

    def _label(self) -> list[dict[str, Any]]:
        """Up to `pairs` labelled pairs of different completions of one prompt; what was seen is forgotten."""
        candidates = []
        for prompt, completions in self._seen.values():
            different = list(OrderedDict((repr(completion), completion) for completion in completions).values())
            if len(different) > 1:
                candidates.append((prompt, *self._random.sample(different, 2)))
        self._seen.clear()
        self._random.shuffle(candidates)
        rows = []
        for prompt, first, second in candidates[: self.pairs]:
            better = self.judge(prompt, first, second)
            if better is not None:
                chosen, rejected = (first, second) if better == 0 else (second, first)
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        return rows

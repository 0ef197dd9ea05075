"""Pairs that cannot be trained on, found before the first step and reported in one message with their row numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import datasets
import trl
from transformers.utils.logging import get_logger

logger = get_logger(__name__)

EMPTY_CHOSEN = "empty, None or white-space chosen answer"
EMPTY_REJECTED = "empty, None or white-space rejected answer"
EQUAL = "chosen equal to rejected"
NO_PROMPT = "None for a prompt"
NOTHING_LEFT = "prompt fills max_length, nothing of the answer is left"
EQUAL_CUT = "chosen equal to rejected once cut to max_length"
ROW = "ext_row"
_SHOWN = 10


def fault_of(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a raw row of either format, or None.

    Args:
        row: `chosen` and `rejected`, each a text or a list of messages, with or without `prompt`; without, the common
            beginning of the two is the prompt, as TRL sees it.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    if _is_blank(chosen):
        return EMPTY_CHOSEN
    if _is_blank(rejected):
        return EMPTY_REJECTED
    if _same(chosen, rejected):
        return EQUAL
    if "prompt" in row and row["prompt"] is None:
        return NO_PROMPT
    if "prompt" not in row:
        answers = trl.extract_prompt({"chosen": chosen, "rejected": rejected})
        if _is_blank(answers["chosen"]):
            return EMPTY_CHOSEN
        if _is_blank(answers["rejected"]):
            return EMPTY_REJECTED
    return None


def _is_blank(answer: Any) -> bool:
    """No text at all: None, white space, or messages that say nothing (a tool call says something)."""
    if answer is None:
        return True
    if isinstance(answer, str):
        return not answer.strip()
    return all(_is_blank_message(message) for message in answer)


def _is_blank_message(message: Any) -> bool:
    if message is None:
        return True
    if message.get("tool_calls"):
        return False
    content = message.get("content")
    if isinstance(content, (list, tuple)):  # parts of a vision message
        return all(part.get("type") == "text" and _is_blank(part.get("text")) for part in content)
    return _is_blank(content)


def _same(chosen: Any, rejected: Any) -> bool:
    """Equal but for white space at the ends, which chat templates strip."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return chosen.strip() == rejected.strip()
    return bool(chosen == rejected)


class RowCheck:
    """Applies `bad_rows` to one dataset, in two steps around TRL's tokenisation.

    Args:
        bad_rows: "raise" or "drop". name: of the dataset, for messages. max_length: tokens of prompt and answer, or
            None. truncation_mode: "keep_start" or "keep_end", as TRL's collator cuts.
    """

    def __init__(self, bad_rows: str, name: str, max_length: int | None, truncation_mode: str = "keep_start") -> None:
        self.bad_rows, self.name, self.max_length = bad_rows, name, max_length
        self.keeps_start = truncation_mode == "keep_start"
        self.kept = (
            slice(max_length) if truncation_mode == "keep_start" or max_length is None else slice(-max_length, None)
        )

    def raw(self, dataset: Any) -> Any:
        """Check columns and texts; returns the dataset without its bad rows.

        A streaming dataset is checked row by row while it is read.

        Raises:
            ValueError: a column is missing, no row is left, or a row is bad and `bad_rows` is "raise".
        """
        if isinstance(dataset, datasets.IterableDataset):
            return self._streamed(dataset)
        self._check_columns(dataset.column_names)
        columns = [name for name in ("prompt", "chosen", "rejected") if name in dataset.column_names]
        faults: dict[str, list[int]] = {}
        for start in range(0, len(dataset), 1000):
            batch = dataset.select_columns(columns)[start : start + 1000]
            rows = (dict(zip(columns, values, strict=True)) for values in zip(*batch.values(), strict=True))
            _collect(faults, (fault_of(row) for row in rows), start)
        return self._without(dataset, faults)

    def tokenised(self, before: Any, after: Any) -> Any:
        """Check what `max_length` left of each row; `before` and `after` are TRL's input and output.

        Raises:
            ValueError: as above.
        """
        if "chosen_ids" not in (after.column_names or ()):
            return after
        faults: dict[str, list[int]] = {}
        if ROW in after.column_names:
            kept = set(after[ROW])
            lost = [row for row in range(len(before)) if row not in kept]
            if lost:
                faults[NOTHING_LEFT] = lost
            rows: list[int] = list(after[ROW])
            after = after.remove_columns(ROW)
        else:
            rows = list(range(len(after)))
        cut = [index for index, equal in enumerate(self._equal_once_cut(after)) if equal]
        if cut:
            faults[EQUAL_CUT] = [rows[index] for index in cut]
        # After an earlier drop these are not the numbers of the user's rows any more.
        self._report(faults, len(before), numbers=self.bad_rows == "raise")
        if len(cut) == len(after):
            raise ValueError(f"No pair of {self.name} is left: {_summary(faults)}.")
        if cut:
            dropped = set(cut)
            after = after.select([index for index in range(len(after)) if index not in dropped])
        return after

    def _equal_once_cut(self, dataset: Any) -> Iterable[bool]:
        columns = dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
        for start in range(0, len(dataset), 1000):
            batch = columns[start : start + 1000]
            for prompt, chosen, rejected in zip(*batch.values(), strict=True):
                yield (prompt + chosen)[self.kept] == (prompt + rejected)[self.kept]

    def streamed_tokens(self, tokenised: Any) -> Any:
        """The same for a stream that TRL has tokenised without its `max_length`, row by row while it is read."""

        def is_good(row: dict[str, Any], index: int) -> bool:
            fault = self._fault_of_tokens(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"])
            if fault is not None and self.bad_rows == "raise":
                raise ValueError(self._message({fault: [index]}, "of the streamed"))
            return fault is None

        return tokenised.filter(is_good, with_indices=True)

    def _fault_of_tokens(self, prompt: list[int], chosen: list[int], rejected: list[int]) -> str | None:
        if self.keeps_start and self.max_length is not None and len(prompt) >= self.max_length:
            return NOTHING_LEFT
        return EQUAL_CUT if (prompt + chosen)[self.kept] == (prompt + rejected)[self.kept] else None

    def _streamed(self, dataset: Any) -> Any:
        def is_good(row: dict[str, Any], index: int) -> bool:
            self._check_columns(row)
            fault = fault_of(row)
            if fault is not None and self.bad_rows == "raise":
                raise ValueError(self._message({fault: [index]}, "of the streamed"))
            return fault is None

        return dataset.filter(is_good, with_indices=True)

    def _check_columns(self, names: Iterable[str]) -> None:
        names = list(names)
        missing = [name for name in ("chosen", "rejected") if name not in names]
        if missing:
            raise ValueError(
                f"{self.name} has no column {missing}; it has {sorted(names)}. DPO needs `chosen` and "
                "`rejected` (and `prompt`, unless both begin with it): rename_column, or another dataset. Data of the "
                "form (prompt, completion, label) is for KTOTrainer."
            )

    def _without(self, dataset: Any, faults: dict[str, list[int]]) -> Any:
        self._report(faults, len(dataset))
        bad = {row for rows in faults.values() for row in rows}
        if len(bad) == len(dataset):
            raise ValueError(f"No pair of {self.name} is left: {_summary(faults) or 'it is empty'}.")
        return dataset.select([row for row in range(len(dataset)) if row not in bad]) if bad else dataset

    def _report(self, faults: dict[str, list[int]], total: int, numbers: bool = True) -> None:
        if not faults:
            return
        if self.bad_rows == "raise":
            raise ValueError(self._message(faults, f"of {total}"))
        logger.warning(f"bad_rows='drop': of {total} rows {self.name} lost {_summary(faults, numbers)}.")

    def _message(self, faults: dict[str, list[int]], of_what: str) -> str:
        count = sum(len(rows) for rows in faults.values())
        return (
            f"{count} {of_what} rows of {self.name} cannot be trained on: {_summary(faults)}. Repair them, "
            "or set bad_rows='drop'" + (" (or raise max_length)." if {NOTHING_LEFT, EQUAL_CUT} & set(faults) else ".")
        )


def _collect(faults: dict[str, list[int]], found: Iterable[str | None], start: int) -> None:
    for offset, fault in enumerate(found):
        if fault is not None:
            faults.setdefault(fault, []).append(start + offset)


def _summary(faults: dict[str, list[int]], numbers: bool = True) -> str:
    """ "3 with chosen equal to rejected (rows 0, 4, 7); ..." """
    parts = []
    for fault, rows in faults.items():
        listed = ", ".join(map(str, rows[:_SHOWN])) + (", ..." if len(rows) > _SHOWN else "")
        shown = f" (row{'s' if len(rows) > 1 else ''} {listed})" if numbers else ""
        parts.append(f"{len(rows)} with {fault}{shown}")
    return "; ".join(parts)

"""Adapters to libraries that verify answers: math-verify and reasoning-gym."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from trl_ext.rewards.length import _CJK
from trl_ext.rewards.rules import Reward
from trl_ext.rewards.text import completion_text

# Their scorers pass the completion to Python's `eval` or to sympy's `parse_expr`, which is one.
EVALUATING_DATASETS = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
# Their scorers compare with tuples, which JSON and Arrow turn into lists.
_TUPLE_DATASETS = frozenset({"arc_agi", "rearc"})

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x2212: "-"}
_CJK_RUN = re.compile(rf"[{_CJK}\u3000-\u303f]+")
_COLON = re.compile(r"(?<!\d):(?=\S)")
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")


def math_reward(column: str = "answer") -> Reward:
    r"""Makes a reward for completions whose final answer equals the known one mathematically, by math-verify.

    LaTeX (`\boxed` first) and plain numbers count, between Chinese characters and in full-width digits too; 1/2, 0.5
    and \frac{2}{4} are equal. Several boxed answers are a set, so hedging earns nothing.

    Args:
        column: dataset column with the known answer: a number or LaTeX, with or without dollar signs.

    Returns:
        A reward function named `math_reward`: 1 or 0, None where the known answer is missing or cannot be parsed.

    Raises:
        ImportError: math-verify is not installed; says how to install it.
        ValueError: at a call, a column that the data set lacks.

    When it is wrong: it takes the last number of a text without LaTeX, whatever it stands for. A comparison that takes
    math-verify more than 5 s (9^9^9^9) counts as wrong. Its time-outs work in the main thread only, so calls from
    another one start a process, which costs about two seconds a call.
    """
    _require("math_verify", "math-verify")

    def math_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        """1 where the completion's answer is right, 0 where it is wrong, None where that cannot be known."""
        answers = _column("math_reward", column, kwargs)
        pairs = [
            (completion_text(completion), None if answer is None else str(answer))
            for completion, answer in zip(completions, answers, strict=True)
        ]
        return _grade(pairs) if threading.current_thread() is threading.main_thread() else _grade_elsewhere(pairs)

    return math_reward


def reasoning_gym_reward(
    dataset_column: str = "source_dataset",
    *,
    answer_column: str = "answer",
    metadata_column: str = "metadata",
    tag: str | None = "answer",
    allow_eval: bool = False,
) -> Reward:
    """Makes a reward from the scorers of reasoning-gym, which know tasks with many right answers.

    Args:
        dataset_column: dataset column with the name of the row's reasoning-gym data set; if there is no such column,
            the name is taken from the metadata, where reasoning-gym puts it.
        answer_column, metadata_column: columns with the entry's `answer` and `metadata`, the latter a dict or JSON
            text. Prefer JSON: Arrow gives every row of a mixed data set the keys of all.
        tag: the last <tag>...</tag> is scored, and the whole text where there is none; None = always the whole text.
        allow_eval: accept the data sets of `EVALUATING_DATASETS`, see below.

    Returns:
        A reward function named `reasoning_gym_reward`, values as reasoning-gym gives them, mostly in [0, 1]; None for
        a row without data set, 0 for a completion that its scorer cannot read.

    Raises:
        ImportError: reasoning-gym is not installed; says how to install it.
        ValueError: at a call, a column that the data set lacks, a name unknown to reasoning-gym, an entry that its own
            scorer cannot read, or a data set of `EVALUATING_DATASETS` without `allow_eval`.

    When it is wrong: the scorers of `EVALUATING_DATASETS` *run the completion as Python code*, in the trainer, with
    all its rights; one "9**9**9**9" in countdown hangs it for ever. Run them in a checker of `SandboxedReward`
    instead. Some scorers pay a little (0.01 to 0.05) for any answer.
    """
    _require("reasoning_gym", "reasoning-gym")

    def score(text: str, name: str, answer: Any, metadata: dict[str, Any], row: int) -> float:
        if name in EVALUATING_DATASETS and not allow_eval:
            raise ValueError(
                f"row {row}: reasoning-gym scores {name!r} by running the completion as Python code. Use a checker in "
                "SandboxedReward, or set allow_eval=True, which says that you accept that."
            )
        entry = {"answer": answer, "metadata": _tuples(metadata) if name in _TUPLE_DATASETS else metadata}
        scorer = _scorer(name)
        try:
            return float(scorer(_tagged(text, tag), entry))
        except Exception:  # some scorers raise on text that they cannot parse
            _check_entry(scorer, entry, name, row)
            return 0.0

    def reasoning_gym_reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        """The score of each completion by its data set's own scorer; None for a row without data set."""
        metadata = [
            json.loads(cell) if isinstance(cell, str) else (cell or {})
            for cell in _column("reasoning_gym_reward", metadata_column, kwargs)
        ]
        answers = _column("reasoning_gym_reward", answer_column, kwargs)
        names = kwargs.get(dataset_column) or [data.get("source_dataset") for data in metadata]
        rows = zip(completions, names, answers, metadata, strict=True)
        return [
            score(completion_text(completion), name, answer, data, row) if name else None
            for row, (completion, name, answer, data) in enumerate(rows)
        ]

    return reasoning_gym_reward


def _require(module: str, package: str) -> None:
    try:
        __import__(module)
    except ImportError as error:
        raise ImportError(f"this reward needs {package}: pip install {package}") from error


def _column(reward: str, name: str, columns: dict[str, Any]) -> Any:
    if name not in columns:
        raise ValueError(f"{reward}: the data set has no column {name!r}. Its columns: {sorted(columns)}.")
    return columns[name]


def _grade(pairs: list[tuple[str, str | None]]) -> list[float | None]:
    return [None if answer is None else _equal(text, answer) for text, answer in pairs]


def _equal(text: str, answer: str) -> float | None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    known = _parse_known(_spaced(answer))
    if not known:
        return None
    found = parse(_spaced(text), [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    return float(verify(known, found))


def _parse_known(answer: str) -> list[Any]:
    """math-verify's reading of the known answer; empty if there is none."""
    from math_verify import parse

    if any(mark in answer for mark in _DELIMITERS) or _PLAIN_WORD.search(answer):
        return parse(answer)
    # Without dollar signs only the first number of 10^{-3} would be read. A lone string is no mathematics.
    return [value for value in parse(f"${answer}$") if not isinstance(value, str)]


def _spaced(text: str) -> str:
    """Full-width digits as ASCII, spaces around Chinese and after colons: math-verify wants numbers to stand alone."""
    text = _CJK_RUN.sub(lambda run: f" {run.group()} ", text.translate(_FULL_WIDTH))
    return _COLON.sub(": ", text)


def _grade_elsewhere(pairs: list[tuple[str, str | None]]) -> list[float | None]:
    """`_grade` in the main thread of another process; without time-outs one huge power would block all threads."""
    code = "from trl_ext.rewards import verifiers; verifiers._grade_stdin()"
    finished = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(pairs), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(finished.stdout)


def _grade_stdin() -> None:
    json.dump(_grade(json.load(sys.stdin)), sys.stdout)


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}. It has {sorted(DATASETS)}.")
    return get_score_answer_fn(name)


def _tagged(text: str, tag: str | None) -> str:
    from reasoning_gym.utils import extract_answer

    found = extract_answer(text, tag_name=tag) if tag else None
    return text if found is None else found


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _check_entry(scorer: Callable[[str, dict[str, Any]], float], entry: dict[str, Any], name: str, row: int) -> None:
    """Raise `ValueError` if the scorer cannot even read the entry's own answer: then the data is broken."""
    try:
        scorer(entry["answer"], entry)
    except Exception as error:
        raise ValueError(
            f"row {row}: reasoning-gym's {name!r} cannot score its own entry ({error!r}). Give the `answer` and the "
            "whole `metadata` that it made."
        ) from error

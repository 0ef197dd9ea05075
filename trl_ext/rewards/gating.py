"""Reward functions made of other reward functions: a gate, and the diversity of the completions of a prompt."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from trl_ext.formulas.diversity import group_ngram_diversity
from trl_ext.formulas.rewards import Floor, gate_rewards
from trl_ext.rewards.rules import Reward, split_words
from trl_ext.rewards.text import completion_text

LogMetric = Callable[[str, float], None]


def gated(
    reward: Reward,
    gate: Reward,
    threshold: float,
    floor: Floor | float = "worst",
    *,
    num_generations: int | None = None,
    name: str | None = None,
) -> Reward:
    """Makes a reward that is withheld from completions that fail a gate: "safety first, then helpfulness".

    A completion passes when the gate's value is >= `threshold`; None and NaN fail. Metrics `gates/<gate>/pass_rate`
    (share of the rows of the call) and `gates/<reward>/mean_before` (the mean before withholding).

    Args:
        reward, gate: reward functions. A gate that is also among the trainer's `reward_funcs` runs twice; the gate
            gets no `log_extra`, as a column logged twice would no longer fit its table.
        threshold: in the units of the gate.
        floor: what a completion that fails gets: "worst" = min(0, lowest reward of its group), "group_min" = that
            lowest reward, "zero" = 0, or a number. "zero" *pays* it where rewards are mostly negative.
        num_generations: completions per prompt, neighbours in the call; by default rows with equal `prompts` are a
            group, and without `prompts` all rows are one.
        name: the `__name__` of the result; by default that of `reward` plus "_gated".

    Returns:
        A reward function in the units of `reward`; None where `reward` does not apply.

    Raises:
        TypeError: a model or an async function.
        ValueError: a threshold or floor that is no number; at a call, a number of values or rows that does not fit.

    When it is wrong: it sees the rows of one call on one process, so a group spread over processes gets the floor of
    its part, and a cost (a reward with negative weight) is floored at its *best*. The trainer option `reward_gates`
    handles both, gates several rewards at once, and runs before any normalisation; prefer it where there is one.
    """
    reward_name, gate_name = _plain_name(reward, "reward"), _plain_name(gate, "gate")
    _check_gate(threshold, floor)

    def gated_reward(
        completions: list[Any],
        prompts: list[Any] | None = None,
        log_metric: LogMetric | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """The reward, or the floor for completions that fail the gate."""
        if not completions:
            return []
        given = {"completions": completions, "prompts": prompts, "log_metric": log_metric, **kwargs}
        before = _values(reward, reward_name, given)
        gates = _values(gate, gate_name, {**given, "log_extra": None})
        after = before.clone()
        for group in _groups(prompts, num_generations, len(completions)):
            after[group] = _withhold(before[group], gates[group], threshold, floor)
        if log_metric is not None:
            log_metric(f"gates/{gate_name}/pass_rate", (gates >= threshold).double().mean().item())
            if not before.isnan().all():
                log_metric(f"gates/{reward_name}/mean_before", before.nanmean().item())
        return [None if math.isnan(value) else value for value in after.tolist()]

    gated_reward.__name__ = name or f"{reward_name}_gated"
    return gated_reward


def group_diversity(ngram: int = 3, cap: float = 1.0, *, num_generations: int | None = None) -> Reward:
    """Makes a reward for completions that differ from their siblings: 1 - mean Jaccard similarity of n-gram sets.

    N-grams are of `completion_ids` where the trainer passes them, else of words (a CJK character is one). Metric
    `group_diversity/has_siblings`, the share of rows that have another completion of their prompt in the call.

    Args:
        ngram: tokens per n-gram, at least 1.
        cap: largest value paid, in (0, 1].
        num_generations: as for `gated`.

    Returns:
        A reward function named `group_diversity`, values in [0, cap]; None for a row without siblings.

    Raises:
        ValueError: an argument out of range; at a call, a number of rows that `num_generations` does not divide.

    When it is wrong: it rewards *surface* variety, and random text maximises it: keep its weight small. It compares
    within one call on one process; the trainer option `diversity_coef` compares whole groups across processes, and
    can pay only completions that earn their other rewards (`diversity_min_reward`); prefer it where there is one.
    """
    if ngram < 1:
        raise ValueError(f"`ngram` must be at least 1, got {ngram}.")
    if not 0 < cap <= 1:
        raise ValueError(f"`cap` must be in (0, 1], got {cap}.")

    def group_diversity(
        completions: list[Any],
        prompts: list[Any] | None = None,
        completion_ids: list[list[int]] | None = None,
        log_metric: LogMetric | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """How different each completion is from the others of its prompt, in [0, cap]; None without others."""
        ids = _word_ids(completions) if completion_ids is None else completion_ids
        values: list[float | None] = [None] * len(completions)
        for group in _groups(prompts, num_generations, len(completions)):
            if len(group) > 1:
                diversity = _diversity([ids[row] for row in group], ngram).double().clamp(max=cap).tolist()
                for row, value in zip(group, diversity, strict=True):
                    values[row] = value
        if log_metric is not None and values:
            log_metric("group_diversity/has_siblings", sum(value is not None for value in values) / len(values))
        return values

    return group_diversity


def _plain_name(function: Any, role: str) -> str:
    """What TRL calls the reward; its own helper for that takes many seconds to import.

    Raises:
        TypeError: this is no function that can be called for its values.
    """
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    is_async = any(map(inspect.iscoroutinefunction, (plain, getattr(plain, "__call__", None))))  # noqa: B004
    if is_async or isinstance(plain, torch.nn.Module) or not callable(plain):
        raise TypeError(f"`{role}` must be a plain function, got {function!r}. Use the option `reward_gates`.")
    return getattr(plain, "__name__", type(plain).__name__)


def _check_gate(threshold: float, floor: Floor | float) -> None:
    if not math.isfinite(threshold):
        raise ValueError(f"`threshold` must be a finite number, got {threshold!r}.")
    if floor in get_args(Floor):
        return
    if isinstance(floor, str) or not math.isfinite(floor):
        raise ValueError(f"`floor` must be one of {list(get_args(Floor))} or a finite number, got {floor!r}.")


def _withhold(rewards: torch.Tensor, gates: torch.Tensor, threshold: float, floor: Floor | float) -> torch.Tensor:
    """The rewards of one group, the floor where the gate fails."""
    if not isinstance(floor, str):
        failed = ~(gates >= threshold) & ~rewards.isnan()
        return rewards.masked_fill(failed, floor)
    columns = torch.stack([rewards, gates], dim=1)
    return gate_rewards(columns, len(rewards), gate=1, threshold=threshold, gated=[0], floor=floor)[:, 0]


def _values(function: Reward, name: str, given: dict[str, Any]) -> torch.Tensor:
    """(N,) float64, NaN where the function does not apply."""
    values = [math.nan if value is None else float(value) for value in function(**given)]
    if len(values) != len(given["completions"]):
        raise ValueError(f"{name} returned {len(values)} values for {len(given['completions'])} completions.")
    return torch.tensor(values, dtype=torch.float64)


def _groups(prompts: list[Any] | None, num_generations: int | None, rows: int) -> list[list[int]]:
    """Row numbers of each group.

    Raises:
        ValueError: the rows are no multiple of `num_generations`.
    """
    if num_generations is not None:
        if num_generations < 1 or rows % num_generations:
            raise ValueError(f"{rows} completions are not groups of `num_generations`={num_generations}.")
        return [list(range(start, start + num_generations)) for start in range(0, rows, num_generations)]
    if prompts is None:
        return [list(range(rows))] if rows else []
    groups: list[list[int]] = []
    for row, prompt in enumerate(prompts):  # by ==, as prompts may hold dicts and images, which have no hash
        group = next((group for group in groups if prompts[group[0]] == prompt), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _word_ids(completions: list[Any]) -> list[list[int]]:
    vocabulary: dict[str, int] = {}
    texts = map(completion_text, completions)
    return [[vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text)] for text in texts]


def _diversity(ids: list[list[int]], ngram: int) -> torch.Tensor:
    """(G,) for one group."""
    rows = [torch.tensor(row, dtype=torch.long) for row in ids]
    padded = pad_sequence(rows, batch_first=True, padding_value=-1)
    return group_ngram_diversity(padded, (padded >= 0).long(), len(rows), ngram)

"""Preference pairs from the scored completions of one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch

PairRule = Literal["best_worst", "best_random", "all_pairs"]


def select_pairs(
    scores: torch.Tensor | Sequence[float | None],
    texts: Sequence[str],
    rule: PairRule,
    min_margin: float = 0.0,
    seed: int = 0,
) -> list[tuple[int, int]]:
    r"""Choose (chosen, rejected) index pairs among the completions of one prompt.

    Completions without a finite score (NaN, infinity, `None`) are dropped first: they may neither win nor lose. A
    pair needs score(chosen) - score(rejected) > 0 and >= min_margin, and two different texts.

    - best_worst: the best and the worst completion, or nothing if these two are no pair;
    - best_random: the best completion and one drawn uniformly from those it makes a pair with;
    - all_pairs: every pair, ordered by (chosen, rejected) index.

    The best and the worst are the *lowest* index among equal scores.

    Args:
        scores: (N,), larger is better. texts: the N completions, compared as they are.
        rule: one of the names above.
        min_margin: smallest score difference of a pair, at least 0, in units of the score.
        seed: for best_random only; the global random state is not touched. Derive it from the prompt: one seed for
            all prompts draws the same position every time.

    Returns:
        List of (chosen, rejected) indices into `scores`; empty when no pair exists, which the caller should count.

    When it is wrong: best_worst of many samples picks the scorer's outliers, and the more samples the more so; all
    pairs of one prompt are strongly correlated and weigh that prompt by the number of its completions.

    Raises:
        ValueError: `scores` and `texts` differ in length, `rule` is unknown, or `min_margin` is negative or NaN.
    """
    if rule not in get_args(PairRule):
        raise ValueError(f"Unknown rule {rule!r}. Use one of {list(get_args(PairRule))}.")
    if not min_margin >= 0:
        raise ValueError(f"`min_margin` must be at least 0, got {min_margin}.")
    values = _as_vector(scores)
    if len(values) != len(texts):
        raise ValueError(f"`scores` has {len(values)} entries, `texts` has {len(texts)}.")
    finite = values.isfinite()
    if finite.sum() < 2:
        return []
    allowed = _allowed_pairs(values, texts, min_margin)  # (N, N), [chosen, rejected]
    if rule == "all_pairs":
        return [(chosen, rejected) for chosen, rejected in allowed.nonzero().tolist()]
    best = _lowest_index(values == values[finite].max())
    if rule == "best_worst":
        worst = _lowest_index(values == values[finite].min())
        return [(best, worst)] if allowed[best, worst] else []
    candidates = allowed[best].nonzero().flatten().tolist()
    if not candidates:
        return []
    generator = torch.Generator().manual_seed(seed)
    return [(best, candidates[int(torch.randint(len(candidates), (1,), generator=generator))])]


def _as_vector(scores: torch.Tensor | Sequence[float | None]) -> torch.Tensor:
    """(N,) float64 on the CPU, failed scores as NaN."""
    if not isinstance(scores, torch.Tensor):
        scores = torch.tensor([math.nan if score is None else float(score) for score in scores], dtype=torch.float64)
    if scores.dim() != 1:
        raise ValueError(f"`scores` must have 1 dimension(s), got shape {tuple(scores.shape)}.")
    return scores.detach().to("cpu", torch.float64)


def _allowed_pairs(values: torch.Tensor, texts: Sequence[str], min_margin: float) -> torch.Tensor:
    """(N, N) True where row may be the chosen and column the rejected answer."""
    first_seen: dict[str, int] = {}
    text_ids = torch.tensor([first_seen.setdefault(text, index) for index, text in enumerate(texts)])
    finite = values.isfinite()
    margins = values.unsqueeze(1) - values.unsqueeze(0)
    return (
        (finite.unsqueeze(1) & finite.unsqueeze(0))
        & (margins > 0)
        & (margins >= min_margin)
        & (text_ids.unsqueeze(1) != text_ids.unsqueeze(0))
    )


def _lowest_index(where: torch.Tensor) -> int:
    return int(where.nonzero()[0])

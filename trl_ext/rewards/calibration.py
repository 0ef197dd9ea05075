"""Standardisation and temperature of reward models, from pairs whose scores are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trl_ext.formulas.reward_model import fit_temperature
from trl_ext.rewards.members import Members
from trl_ext.rewards.reward_card import RewardCard

TOKENS_PER_BATCH = 8192


def calibrate(card: RewardCard, members: Members, rows: Any, limit: int, held_out: bool) -> RewardCard:
    """`card` with each member's mean and standard deviation, and with held-out pairs the temperature.

    Args:
        rows: a dataset with `chosen_ids` and `rejected_ids`. limit: at most so many pairs, from the front.
        held_out: whether they were not trained on; a temperature from training pairs would be far too confident.

    Returns:
        The card as it was when there is no row.
    """
    part = list(itertools.islice(iter(rows), limit))
    if not part:
        return card
    chosen = members.score_rows([row["chosen_ids"] for row in part], TOKENS_PER_BATCH)
    rejected = members.score_rows([row["rejected_ids"] for row in part], TOKENS_PER_BATCH)
    mean, std = moments(torch.cat([chosen, rejected], dim=1))
    margins = (standardise(chosen, mean, std) - standardise(rejected, mean, std)).mean(0)
    return replace(
        card,
        mean=mean,
        std=std,
        temperature=fit_temperature(margins) if held_out else 1.0,
        calibration=f"{len(part)} {'held-out' if held_out else 'training'} pairs",
    )


def moments(scores: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation (ddof 0) of each row of (M, N), without the scores that are not finite.

    A member whose scores are all equal gets a standard deviation of 1: it says nothing, and must not blow up.
    """
    mean, std = [], []
    for row in scores.double():
        known = row[row.isfinite()]
        mean.append(known.mean().item() if len(known) else 0.0)
        deviation = known.std(correction=0).item() if len(known) else 0.0
        std.append(deviation if deviation > 1e-6 * max(1.0, abs(mean[-1])) else 1.0)
    return mean, std


def standardise(scores: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """(M, N) scores on a common scale; as they are where `mean` is empty."""
    if not mean:
        return scores
    return (scores - torch.tensor(mean).unsqueeze(1)) / torch.tensor(std).unsqueeze(1)

"""Operations on the reward matrix before any normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from trl_ext.formulas.checks import check_groups, check_rank

Floor = Literal["zero", "group_min", "worst"]


def gate_rewards(
    rewards: torch.Tensor,
    num_generations: int,
    gate: int,
    threshold: float,
    gated: Sequence[int],
    floor: Floor = "worst",
) -> torch.Tensor:
    r"""Withhold rewards from completions that fail a gate: "safety first, then helpfulness".

    A row passes when its gate column is >= threshold; NaN fails. A row that fails gets `floor` in every gated column.

    Args:
        rewards: (N, F), raw rewards, N/G groups in order.
        num_generations: G. gate: column of the gate. threshold: in the units of that column.
        gated: columns that are withheld.
        floor: "zero" = 0; "group_min" = the smallest reward of the group in that column, so failing rows are no
            better than the worst; "worst" = min(0, group minimum), the default. "zero" *pays* a failing row when the
            gated reward is mostly negative.

    Returns:
        (N, F), a new tensor. A gated entry that is NaN (does not apply) stays NaN.

    Raises:
        ValueError: a column out of range, the gate among the gated columns, an unknown floor.
    """
    check_rank("rewards", rewards, 2)
    check_groups("rewards", rewards.shape[0], num_generations)
    columns = rewards.shape[1]
    for column in (gate, *gated):
        if not 0 <= column < columns:
            raise ValueError(f"Column {column} does not exist; `rewards` has {columns} column(s).")
    if gate in gated:
        raise ValueError(f"Column {gate} cannot gate itself: remove it from `gated`.")
    if not gated:
        return rewards.clone()
    passed = rewards[:, gate] >= threshold  # NaN compares False
    selected = rewards[:, list(gated)]
    failed = ~passed.unsqueeze(1) & ~selected.isnan()
    result = rewards.clone()
    result[:, list(gated)] = torch.where(failed, _floor_values(selected, num_generations, floor), selected)
    return result


def _floor_values(selected: torch.Tensor, num_generations: int, floor: Floor) -> torch.Tensor:
    """(N, K) value that a failing row gets in each gated column."""
    if floor == "zero":
        return torch.zeros_like(selected)
    if floor not in ("group_min", "worst"):
        raise ValueError(f"Unknown floor {floor!r}. Use 'zero', 'group_min' or 'worst'.")
    known = selected.nan_to_num(nan=torch.inf).reshape(-1, num_generations, selected.shape[1])
    minimum = known.amin(1).repeat_interleave(num_generations, dim=0)
    return minimum if floor == "group_min" else minimum.clamp(max=0.0)

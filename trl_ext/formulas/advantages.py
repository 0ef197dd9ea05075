"""Advantages from a matrix of rewards: group-relative, leave-one-out, GDPO, Pareto fronts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from trl_ext.formulas.checks import at_least_float32, check_groups, check_rank

Scale = Literal["group", "batch", "none"]

EPS = 1e-4  # TRL's, added to every standard deviation
TIE_TOL = 1e-6


@dataclass(frozen=True)
class NanStats:
    """Mean, ddof-1 standard deviation and count of the non-NaN entries along one dimension (kept)."""

    mean: torch.Tensor
    std: torch.Tensor  # 0 where fewer than two entries are left
    count: torch.Tensor

    def tied(self, tie_tol: float) -> torch.Tensor:
        """True where the entries are equal up to rounding: std <= tie_tol * max(1, |mean|)."""
        return self.std <= tie_tol * self.mean.abs().clamp(min=1.0)


def nan_stats(values: torch.Tensor, dim: int) -> NanStats:
    """NaN-aware mean and ddof-1 standard deviation along `dim`, which is kept with size 1."""
    known = ~values.isnan()
    count = known.sum(dim, keepdim=True)
    zeros = torch.zeros_like(values)
    mean = torch.where(known, values, zeros).sum(dim, keepdim=True) / count.clamp(min=1)
    deviation = torch.where(known, values - mean, zeros)
    variance = deviation.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)
    return NanStats(mean, variance.sqrt(), count)


def group_advantages(
    rewards: torch.Tensor, num_generations: int, scale: Scale = "group", eps: float = EPS
) -> torch.Tensor:
    r"""GRPO's advantages (Shao et al. 2024, eq. 3 and TRL 1.16): (r - group mean) / (std + eps).

    Args:
        rewards: (N,), N/G groups in order; NaN = not scorable: out of the statistics, advantage 0.
        num_generations: G.
        scale: "group" divides by the group's std, "batch" by that of all rewards, "none" by nothing (Dr. GRPO).
        eps: added to the std.

    Returns:
        (N,), float32 or wider. Constant groups may keep rounding noise of up to about 1e-7 / eps, as in TRL; use
        `gdpo_advantages` where that matters.

    Raises:
        ValueError: N is not a multiple of G, or `scale` is unknown.
    """
    check_rank("rewards", rewards, 1)
    check_groups("rewards", rewards.numel(), num_generations)
    rewards = at_least_float32(rewards)
    grouped = rewards.reshape(-1, num_generations)
    stats = nan_stats(grouped, 1)
    centred = grouped - stats.mean
    if scale == "group":
        centred = centred / (stats.std + eps)
    elif scale == "batch":
        centred = centred / (nan_stats(rewards, 0).std + eps)
    elif scale != "none":
        raise ValueError(f"Unknown scale {scale!r}. Use 'group', 'batch' or 'none'.")
    return torch.where(grouped.isnan(), torch.zeros_like(centred), centred).reshape(-1)


def leave_one_out_advantages(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    r"""RLOO's advantages (Ahmadian et al. 2024, eq. 9): r_i - mean of the other scorable rewards of its group.

    Args:
        rewards: (N,), NaN = not scorable: no sibling's baseline contains it and its own advantage is 0; so is that of
            a completion without a scorable sibling.
        num_generations: G.

    Returns:
        (N,).
    """
    check_rank("rewards", rewards, 1)
    check_groups("rewards", rewards.numel(), num_generations)
    grouped = at_least_float32(rewards).reshape(-1, num_generations)
    known = ~grouped.isnan()
    total = torch.where(known, grouped, torch.zeros_like(grouped)).sum(1, keepdim=True)
    others = known.sum(1, keepdim=True) - 1
    advantages = grouped - (total - grouped) / others.clamp(min=1)
    return torch.where(known & (others > 0), advantages, torch.zeros_like(advantages)).reshape(-1)


@dataclass(frozen=True)
class GDPOTerms:
    """The parts of GDPO's advantage, for logging and for decisions on groups.

    Attributes:
        weighted: (N, F), w_k * z_k; exactly 0 where the column is tied in its group or the reward is missing.
        tied: (N/G, F), True where a column carries no signal in a group (tied, or fewer than two rewards known).
        combined: (N,), sum of `weighted` over the columns; NaN for a row without any reward.
    """

    weighted: torch.Tensor
    tied: torch.Tensor
    combined: torch.Tensor


def gdpo_terms(
    rewards: torch.Tensor,
    num_generations: int,
    weights: torch.Tensor | Sequence[float],
    eps: float = EPS,
    tie_tol: float = TIE_TOL,
) -> GDPOTerms:
    """Per-column group normalisation of GDPO, before the batch normalisation; see `gdpo_advantages`."""
    check_rank("rewards", rewards, 2)
    check_groups("rewards", rewards.shape[0], num_generations)
    rewards = at_least_float32(rewards)
    weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)
    if weights.shape != (rewards.shape[1],):
        raise ValueError(f"`weights` has shape {tuple(weights.shape)}, expected one per column: ({rewards.shape[1]},).")
    grouped = rewards.reshape(-1, num_generations, rewards.shape[1])  # (N/G, G, F)
    stats = nan_stats(grouped, 1)
    tied = stats.tied(tie_tol)  # (N/G, 1, F)
    normalised = (grouped - stats.mean) / (stats.std + eps)
    no_signal = tied | grouped.isnan()
    weighted = torch.where(no_signal, torch.zeros_like(grouped), normalised * weights).reshape(rewards.shape)
    combined = weighted.sum(1).masked_fill(rewards.isnan().all(1), torch.nan)
    return GDPOTerms(weighted, tied.squeeze(1), combined)


def gdpo_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    weights: torch.Tensor | Sequence[float],
    eps: float = EPS,
    tie_tol: float = TIE_TOL,
) -> torch.Tensor:
    r"""GDPO (Liu et al. 2026, arXiv 2601.05242, eqs. 4-6), safe against ties.

    z = (r - group mean) / (group std + eps) for each column, A = sum_k w_k z_k, then A is normalised over the batch.
    Each reward has a say by its weight, whatever its scale; summing first lets the largest scale drown the others.

    A column whose group std <= tie_tol * max(1, |mean|) is tied: its z is *exactly* 0, and the same rule holds for
    the batch. Without it rounding noise of 1e-8 in a constant group becomes an advantage of the order of 1.

    Args:
        rewards: (N, F), columns of any scale; NaN = does not apply: out of its column's statistics, contributes 0.
        num_generations: G. weights: (F,). eps: added to each std. tie_tol: relative tie tolerance.

    Returns:
        (N,); a row with only NaN gets 0, a batch without signal is 0 everywhere.

    When it is wrong: a column that differs by irrelevant noise is blown up to unit size; give such a reward a small
    weight, or round it.

    Raises:
        ValueError: shapes, group size or the number of weights do not fit.
    """
    return normalise_batch(gdpo_terms(rewards, num_generations, weights, eps, tie_tol).combined, eps, tie_tol)


def normalise_batch(values: torch.Tensor, eps: float = EPS, tie_tol: float = TIE_TOL) -> torch.Tensor:
    """(values - mean) / (std + eps) over all N entries; exactly 0 for NaN entries and for a tied batch."""
    values = at_least_float32(values)
    stats = nan_stats(values, 0)
    normalised = (values - stats.mean) / (stats.std + eps)
    return torch.where(stats.tied(tie_tol) | values.isnan(), torch.zeros_like(values), normalised)


def pareto_fronts(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    r"""Index of the non-dominated front of each completion within its group (Deb et al. 2002), 0 = best.

    Row a dominates row b when it is at least as good in every column and better in one; larger is better. Equal rows
    share a front. No scale enters: only the order within each column.

    Args:
        rewards: (N, F). NaN = does not apply: a pair is compared on the columns known for both. A row without any
            reward dominates nothing and is dominated by nothing.
        num_generations: G.

    Returns:
        (N,), int64, 0 ... G-1.
    """
    check_rank("rewards", rewards, 2)
    check_groups("rewards", rewards.shape[0], num_generations)
    grouped = rewards.reshape(-1, num_generations, rewards.shape[1])
    first, second = grouped.unsqueeze(2), grouped.unsqueeze(1)  # (N/G, G, 1, F), (N/G, 1, G, F)
    unknown = first.isnan() | second.isnan()
    dominates = ((first >= second) | unknown).all(-1) & ((first > second) & ~unknown).any(-1)  # (N/G, G, G)
    fronts = torch.full(grouped.shape[:2], num_generations - 1, dtype=torch.long, device=rewards.device)
    remaining = torch.ones_like(fronts, dtype=torch.bool)
    # With missing rewards dominance may be cyclic; rows left over then stay on the last front.
    for index in range(num_generations):
        dominated = (dominates & remaining.unsqueeze(2)).any(1)
        front = remaining & ~dominated
        fronts = fronts.masked_fill(front, index)
        remaining = remaining & ~front
    return fronts.reshape(-1)


def zero_signal_groups(combined: torch.Tensor, num_generations: int, tie_tol: float = TIE_TOL) -> torch.Tensor:
    """(N/G,) True where the combined value is equal for every completion of the group, up to rounding.

    Decide on the value that is trained on (for GDPO the weighted sum of z), never on the plain sum of the rewards: in
    a group with rewards (1, 0) and (0, 1) that sum is constant although the components differ.
    """
    check_groups("combined", combined.numel(), num_generations)
    return nan_stats(at_least_float32(combined).reshape(-1, num_generations), 1).tied(tie_tol).squeeze(1)

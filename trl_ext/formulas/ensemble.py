"""One score per completion from an ensemble of reward models."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from trl_ext.formulas.checks import check_rank

EnsembleReduction = Literal["mean", "min", "median", "lcb", "uwo"]


def reduce_ensemble(scores: torch.Tensor, how: EnsembleReduction, coef: float = 1.0) -> torch.Tensor:
    r"""Combine the scores of M reward models, pessimistically where they disagree.

    Coste et al. 2024, "Reward Model Ensembles Help Mitigate Overoptimization" (arXiv 2310.02743): "mean", "min"
    (worst-case optimization, WCO) and "uwo" (uncertainty-weighted optimization):

    - mean: m = 1/M sum_i s_i;
    - min: min_i s_i;
    - median: the middle score, or the mean of the two middle ones;
    - lcb: m - coef * sqrt(v), a lower confidence bound in the units of the scores;
    - uwo: m - coef * v, with v = 1/M sum_i (s_i - m)^2 (ddof 0), in *squared* units: rescaling the scores changes
      the weight of the penalty, so `coef` must be chosen again.

    Args:
        scores: (M, N), rows are members, columns are completions; larger is better.
        how: one of the names above.
        coef: weight of the disagreement in "lcb" and "uwo", at least 0; 0 gives exactly "mean". Not used by the rest.

    Returns:
        (N,), float32 or wider. A completion that any member failed to score (NaN) is NaN for every `how`: leaving
        the failed member out would compare completions judged by different juries. One member is its own result.

    When it is wrong: members on different scales. The widest decides "min" and fills the variance, so standardise
    each member first on a fixed calibration set (mean 0, std 1). Members that share a base model make the same
    mistakes, on which no reduction sees a disagreement.

    Raises:
        ValueError: `scores` is not a matrix or has no member, `how` is unknown, or `coef` is negative (it would pay
            for disagreement).
    """
    check_rank("scores", scores, 2)
    if scores.shape[0] == 0:
        raise ValueError("`scores` has no row: an ensemble needs at least one member.")
    if not coef >= 0:
        raise ValueError(f"`coef` must be at least 0, got {coef}: a negative weight would pay for disagreement.")
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # A zero coefficient must not meet an overflowing variance: 0 * inf is NaN.
    if how == "mean" or (how in ("lcb", "uwo") and coef == 0):
        return scores.mean(0)
    if how == "min":
        return scores.amin(0)
    if how == "median":
        return _median(scores)
    deviations = scores - scores.mean(0)
    if how == "lcb":
        # The norm has gradient 0 where all members agree; the square root of the variance would give NaN there.
        return scores.mean(0) - coef * torch.linalg.vector_norm(deviations, dim=0) / math.sqrt(len(scores))
    if how == "uwo":
        return scores.mean(0) - coef * deviations.square().mean(0)
    raise ValueError(f"Unknown reduction {how!r}. Use one of {list(get_args(EnsembleReduction))}.")


def _median(scores: torch.Tensor) -> torch.Tensor:
    """(N,); `torch.median` would return the lower of the two middle scores and ignore the order of NaN."""
    ordered = scores.sort(0).values
    size = len(ordered)
    middle = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
    return torch.where(scores.isnan().any(0), torch.full_like(middle, torch.nan), middle)

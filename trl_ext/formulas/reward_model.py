"""Losses and numbers of reward models trained on pairs."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import at_least_float32, check_same_shape


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | None = None,
    center_coefficient: float | None = None,
) -> torch.Tensor:
    r"""-log sigmoid(chosen - rejected - margin) + c * (chosen + rejected)^2, for each pair and member.

    Bradley and Terry 1952; margin: Touvron et al. 2023 (Llama 2), eq. 2; centring: Eisenstein et al. 2023,
    "Helping or Herding?" (arXiv 2312.09244), eq. 2. The same terms as TRL's RewardTrainer, before its mean over pairs.

    Args:
        chosen, rejected: (B,) or (B, M) scores, logits; a *larger* score is better. margin: (B,), how much better the
            chosen answer is, in logits. center_coefficient: c; keeps the scores near 0.

    Returns:
        The shape of `chosen`, float32 or wider, to *minimise*.

    When it is wrong: pairs that people find equal. The loss is never 0, so it pays to make scores grow without end on
    separable pairs; stop early, or centre.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(chosen=chosen, rejected=rejected)
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    difference = chosen - rejected
    if margin is not None:
        if margin.shape != chosen.shape[:1]:
            raise ValueError(f"`margin` has shape {tuple(margin.shape)}, expected {tuple(chosen.shape[:1])}.")
        difference = difference - (margin if difference.dim() == 1 else margin.unsqueeze(1))
    loss = torch.logaddexp(torch.zeros_like(difference), -difference)
    return loss if center_coefficient is None else loss + center_coefficient * (chosen + rejected).square()


def poisson_counts(uniform: torch.Tensor) -> torch.Tensor:
    r"""Counts of the online bootstrap: Poisson(1) by inversion of its distribution function.

    Oza and Russell 2001, "Online Bagging and Boosting": for many rows, the number of times that a row is in a bootstrap
    sample of the data is Poisson(1).

    Args:
        uniform: any shape, in [0, 1).

    Returns:
        The same shape, int64; 0 for 36.8 % of uniform numbers, 1 for as many, 2 for 18.4 %, ...
    """
    counts = torch.arange(20, dtype=torch.float64)
    # P(count <= k); beyond 20 there is nothing left in float64.
    distribution = torch.exp(-1 - torch.lgamma(counts + 1)).cumsum(0)
    return torch.searchsorted(distribution.to(uniform.device), uniform.double(), right=True)


def fit_temperature(margins: torch.Tensor, steps: int = 60) -> float:
    r"""The T > 0 that minimises the mean of -log sigmoid(margin / T) on held-out pairs.

    Guo et al. 2017, "On Calibration of Modern Neural Networks" (arXiv 1706.04599), section 4.2, for two classes. The
    loss is convex in 1/T; bisection on its derivative.

    Args:
        margins: (N,) chosen minus rejected on pairs that were *not* trained on.

    Returns:
        T in [1e-3, 1e3]; 1e-3 when every pair is right, where no finite T is best, and 1e3 when most are wrong.

    Raises:
        ValueError: no finite margin.
    """
    margins = margins.double()
    margins = margins[margins.isfinite()]
    if not len(margins):
        raise ValueError("`margins` has no finite entry: score held-out pairs first.")
    low, high = 1e-3, 1e3  # of 1/T
    for _ in range(steps):
        middle = (low * high) ** 0.5
        slope = (-margins * torch.sigmoid(-margins * middle)).mean().item()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return 1 / (low * high) ** 0.5


def brier_score(margins: torch.Tensor) -> torch.Tensor:
    r"""Mean of (1 - sigmoid(margin))^2: how far the stated confidence in the label is from certainty about it.

    Brier 1950. 0.25 for a model that knows nothing (margin 0), 0 at best.

    Args:
        margins: (N,), chosen minus rejected, in logits.
    """
    return torch.sigmoid(-at_least_float32(margins)).square().mean()

"""Entropy of the policy: masked mean, and a schedule for the coefficient of its bonus."""

from __future__ import annotations

import math
from typing import Literal

import torch

from trl_ext.formulas.checks import at_least_float32, check_mask

Schedule = Literal["linear", "cosine"]


def mean_token_entropy(entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Mean entropy over the real tokens, in nats per token: sum(mask * H) / max(1, sum(mask)).

    The bonus of an objective is `loss - coef * mean_token_entropy`: a *positive* coefficient raises the entropy.

    Args:
        entropies: (B, T), differentiable. mask: (B, T), 1 = real token.

    Returns:
        Scalar; 0 with gradient 0 when no token is real.
    """
    check_mask(mask, entropies)
    real = mask.bool()
    entropies = at_least_float32(entropies)
    total = torch.where(real, entropies, torch.zeros_like(entropies)).sum()
    return total / real.sum().clamp(min=1)


def mean_sequence_entropy(entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Mean over sequences of the mean entropy of their real tokens, in nats per token.

    Every sequence counts alike, whatever its length, so the value does not depend on how a batch is cut into
    micro-batches of equal size; `mean_token_entropy`, where every token counts alike, does.

    Args:
        entropies: (B, T), differentiable. mask: (B, T), 1 = real token.

    Returns:
        Scalar; a sequence without a real token counts as 0.
    """
    check_mask(mask, entropies)
    real = mask.bool()
    entropies = at_least_float32(entropies)
    sums = torch.where(real, entropies, torch.zeros_like(entropies)).sum(-1)
    return (sums / real.sum(-1).clamp(min=1)).mean()


def scheduled_coefficient(start: float, final: float, progress: float, schedule: Schedule) -> float:
    r"""Coefficient at `progress` in [0, 1] of the run, from `start` to `final`.

    linear: start + (final - start) * p; cosine: final + (start - final) * (1 + cos(pi * p)) / 2. It depends on the
    progress alone, so a resumed run needs no state.

    Raises:
        ValueError: unknown schedule.
    """
    progress = min(max(progress, 0.0), 1.0)
    if schedule == "linear":
        return start + (final - start) * progress
    if schedule == "cosine":
        return final + (start - final) * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"Unknown schedule {schedule!r}. Use 'linear' or 'cosine'.")

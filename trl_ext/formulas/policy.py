"""The clipped surrogate of PPO."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import at_least_float32, check_mask, check_same_shape


def clipped_policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Negative clipped surrogate per token: -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r = exp(logps - old).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7. The minimum is
    pessimistic: a token is cut off (gradient exactly 0) only where moving on would flatter the surrogate, which is
    r > 1 + epsilon_high with A > 0, or r < 1 - epsilon with A < 0. On the other two sides the gradient must stay, or
    a policy that went wrong could not come back.

    Args:
        logps: (B, T), log-probabilities of the policy, with gradient.
        old_logps: (B, T), log-probabilities of the policy that sampled, without gradient.
        advantages: (B, T), without gradient; larger is better.
        epsilon: in [0, 1), the clip below. epsilon_high: at least 0, the clip above; `None` = `epsilon`.
        mask: (B, T), 1 = real token; entries under 0 get loss and gradient exactly 0, whatever is in them. Without it
            padding gives what its inputs give.

    Returns:
        (B, T), a loss to *minimise*, float32 or wider. Clipped tokens stay finite however far the policy has moved.

    When it is wrong: A < 0 with a large ratio is unbounded by design; one token that the new policy finds far more
    likely can rule the batch. `old_logps` recomputed by the training engine and those of the sampler must not be
    mixed: the ratio would measure the engines.

    Raises:
        ValueError: shapes differ, `epsilon` is outside [0, 1), or `epsilon_high` is negative.
    """
    check_same_shape(logps=logps, old_logps=old_logps, advantages=advantages)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    if not 0 <= epsilon < 1:
        raise ValueError(f"`epsilon` must be in [0, 1), got {epsilon}.")
    if not epsilon_high >= 0:
        raise ValueError(f"`epsilon_high` must be at least 0, got {epsilon_high}.")
    # bfloat16 keeps 3 digits: the difference of two log-probabilities would be mostly rounding error.
    log_ratio = at_least_float32(logps) - at_least_float32(old_logps)
    advantages = at_least_float32(advantages)
    if mask is not None:
        check_mask(mask, logps)
        advantages = torch.where(mask.bool(), advantages, torch.zeros_like(advantages))
    ratio = log_ratio.detach().exp()
    upper, lower = torch.full_like(ratio, 1 + epsilon_high), torch.full_like(ratio, 1 - epsilon)
    above, below = (advantages > 0) & (ratio > upper), (advantages < 0) & (ratio < lower)
    # A zero advantage (padding among them) has no loss at any ratio, NaN included; 0 * inf would be NaN.
    is_constant = above | below | (advantages == 0)
    # Chosen before the exponential: an overflowing ratio has gradient 0 * inf = NaN even when the minimum ignores it.
    free_ratio = torch.where(is_constant, torch.zeros_like(log_ratio), log_ratio).exp()
    return -torch.where(above, upper, torch.where(below, lower, free_ratio)) * advantages

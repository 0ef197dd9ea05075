"""Losses and gradient surgery for preference pairs that keep the chosen answer likely."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import at_least_float32, check_rank, check_same_shape


def dpop_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    beta: float,
    dpop_lambda: float,
) -> torch.Tensor:
    r"""DPO-Positive: DPO that pays for pushing the chosen answer below the reference.

    -log sigmoid(beta * [(pi_c - ref_c) - (pi_r - ref_r) - dpop_lambda * max(0, ref_c - pi_c)]), Pal et al. 2024,
    "Smaug: Fixing Failure Modes of Preference Optimisation with DPO-Positive" (arXiv 2402.13228), eq. 3. The penalty
    is inside the sigmoid and inside beta; adding it to the loss, or subtracting it there, is another objective.

    DPO sees only the difference of the two log-ratios, so it may lower both; with pairs that differ in a few tokens
    it does. dpop_lambda = 0 is plain DPO. Where the chosen answer is at or above the reference the penalty and its
    gradient are 0, so the first step of a policy that equals its reference is DPO's.

    Args:
        chosen_logps, rejected_logps: (B,), log-probability of each whole answer under the policy, summed over its
            tokens, in nats, with gradient.
        ref_chosen_logps, ref_rejected_logps: (B,), the same under the frozen reference.
        beta: greater than 0. dpop_lambda: at least 0.

    Returns:
        (B,), a loss to *minimise*, float32 or wider; linear, never infinite, for large negative margins.

    When it is wrong: with log-probabilities averaged over tokens, beta and the size of the penalty mean something
    else. The hinge has a kink: with a large lambda, noise around pi_c = ref_c (dropout, another precision for the
    reference) dominates the gradient.

    Raises:
        ValueError: shapes differ or are not (B,), `beta` is not positive, or `dpop_lambda` is negative.
    """
    check_rank("chosen_logps", chosen_logps, 1)
    check_same_shape(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    if not beta > 0:
        raise ValueError(f"`beta` must be greater than 0, got {beta}.")
    if not dpop_lambda >= 0:
        raise ValueError(f"`dpop_lambda` must be at least 0, got {dpop_lambda}.")
    chosen_log_ratio = at_least_float32(chosen_logps) - at_least_float32(ref_chosen_logps)
    rejected_log_ratio = at_least_float32(rejected_logps) - at_least_float32(ref_rejected_logps)
    # relu and not clamp: at the kink, where training starts, relu has gradient 0 and clamp has gradient 1.
    penalty = torch.relu(-chosen_log_ratio)
    logits = beta * (chosen_log_ratio - rejected_log_ratio - dpop_lambda * penalty)
    # -log sigmoid(x) = log(1 + exp(-x)), without overflow.
    return torch.logaddexp(torch.zeros_like(logits), -logits)


def project_update(update_gradient: torch.Tensor, chosen_gradient: torch.Tensor) -> torch.Tensor:
    r"""Remove from a gradient the part whose descent would lower the chosen log-probability.

    g - max(0, g . c) / (c . c) * c with c the gradient of the chosen log-probability. A step of -lr * g changes that
    log-probability by -lr * g . c to first order, so only g . c > 0 is harmful; afterwards it is 0 and the rest of g
    is kept. The one-sided projection of Yu et al. 2020, "Gradient Surgery for Multi-Task Learning" (arXiv
    2001.06782), with the gradient of the chosen *loss*, -c, as the other task.

    Args:
        update_gradient: g, the gradient that will be descended; any shape.
        chosen_gradient: c, gradient of the *log-probability* (to be raised), not of a loss; same shape. For a whole
            model flatten all parameters into one vector: projecting each parameter is another, stricter rule.

    Returns:
        Same shape, float32 or wider; g itself where g . c <= 0 or c is 0.

    When it is wrong: an optimizer with momentum or per-parameter scaling (Adam) does not step along g, so the
    guarantee holds for plain gradient descent with a small step only. On sharded gradients the two dot products need
    a sum over the ranks, which this function does not make.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(update_gradient=update_gradient, chosen_gradient=chosen_gradient)
    gradient, chosen = at_least_float32(update_gradient), at_least_float32(chosen_gradient)
    if gradient.numel() == 0:
        return gradient
    # Only the direction of c matters; scaling it first keeps c . c from underflow and overflow.
    size = chosen.abs().amax()
    no_direction = size == 0
    direction = chosen / torch.where(no_direction, torch.ones_like(size), size)
    squared_norm = torch.where(no_direction, torch.ones_like(size), direction.square().sum())
    harm = torch.relu((gradient * direction).sum())
    return gradient - harm / squared_norm * direction

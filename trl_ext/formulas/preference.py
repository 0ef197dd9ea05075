"""Losses and gradient surgery for preference pairs that keep the chosen answer likely."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import at_least_float32, check_mask, check_rank, check_same_shape


def sequence_logps(per_token_logps: torch.Tensor, mask: torch.Tensor, ld_alpha: float | None = None) -> torch.Tensor:
    r"""Log-probability of each whole answer: the sum over its tokens, in nats.

    With `ld_alpha` the tokens of the longer answer of a pair beyond the length of the shorter one count `ld_alpha`
    times: LD-DPO, Liu et al. 2024, "Length Desensitization in Direct Preference Optimization" (arXiv 2409.06411).

    Args:
        per_token_logps: (2B, T), the chosen answers, then the rejected ones, pair by pair in the same order.
        mask: (2B, T), 1 = token of the answer; entries under mask 0 change neither value nor gradient.
        ld_alpha: in [0, 1]; None or 1 is the plain sum.

    Returns:
        (2B,), float32 or wider; 0 for an answer without a token.

    Raises:
        ValueError: shapes differ or are not (2B, T), `ld_alpha` is outside [0, 1], or the rows are no pairs.
    """
    check_rank("per_token_logps", per_token_logps, 2)
    check_mask(mask, per_token_logps)
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise ValueError(f"`ld_alpha` must be in [0, 1], got {ld_alpha}.")
    real = mask.bool()
    logps = at_least_float32(per_token_logps)
    masked = torch.where(real, logps, torch.zeros_like(logps))
    if ld_alpha is None:
        return masked.sum(-1)
    if len(masked) % 2:
        raise ValueError(f"`per_token_logps` has {len(masked)} rows, which is not a number of pairs.")
    lengths = real.sum(-1)
    shared = torch.minimum(*lengths.chunk(2)).repeat(2)  # (2B,)
    in_tail = real.cumsum(-1) > shared.unsqueeze(-1)
    # Two sums, in the order in which TRL makes them for the reference: rounding must not tell equal models apart.
    zero = torch.zeros_like(masked)
    return torch.where(in_tail, zero, masked).sum(-1) + ld_alpha * torch.where(in_tail, masked, zero).sum(-1)


def log_ratios(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(pi_c - ref_c, pi_r - ref_r), each (B,), float32 or wider, of (B,) log-probabilities.

    Raises:
        ValueError: shapes differ or are not (B,).
    """
    check_rank("chosen_logps", chosen_logps, 1)
    check_same_shape(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    return (
        at_least_float32(chosen_logps) - at_least_float32(ref_chosen_logps),
        at_least_float32(rejected_logps) - at_least_float32(ref_rejected_logps),
    )


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
    _check_beta(beta)
    if not dpop_lambda >= 0:
        raise ValueError(f"`dpop_lambda` must be at least 0, got {dpop_lambda}.")
    chosen_log_ratio, rejected_log_ratio = log_ratios(
        chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
    )
    # relu and not clamp: at the kink, where training starts, relu has gradient 0 and clamp has gradient 1.
    penalty = torch.relu(-chosen_log_ratio)
    return _minus_log_sigmoid(beta * (chosen_log_ratio - rejected_log_ratio - dpop_lambda * penalty))


def cal_dpo_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    r"""Calibrated DPO: each log-ratio is pulled to a target of its own, +1/(2 beta) and -1/(2 beta), by a square.

    -log sigmoid(h_c - h_r) + (h_c - 1/(2 beta))^2 + (h_r + 1/(2 beta))^2, h = pi - ref (log-probabilities). Xiao et
    al. 2024, "Cal-DPO: Calibrated Direct Preference Optimization for Language Model Alignment" (arXiv 2412.14516,
    NeurIPS 2024). beta enters through the targets alone: the contrastive part has no beta. The authors' released
    training script weighs the two squares by 1/2 instead of 1.

    Args:
        chosen_logps, rejected_logps: (B,), summed over the tokens of each answer, in nats, with gradient.
        ref_chosen_logps, ref_rejected_logps: (B,), the same under the frozen reference.
        beta: greater than 0; a *small* beta asks for a *large* distance from the reference.

    Returns:
        (B,), a loss to *minimise*, float32 or wider. At the reference it is log 2 + 1/(2 beta^2): 50.7 for beta 0.1,
        so it cannot be compared with DPO's number.

    When it is wrong: the targets are in nats per answer, whatever its length; an answer that is already likely cannot
    rise by 1/(2 beta). Where the two answers share most of their tokens the two targets pull against each other, and
    the chosen one may sink more than under DPO. Gradients grow with 1/beta: lower the learning rate, or clip.

    Raises:
        ValueError: shapes differ or are not (B,), or `beta` is not positive.
    """
    _check_beta(beta)
    chosen, rejected = log_ratios(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    target = 1 / (2 * beta)
    return _minus_log_sigmoid(chosen - rejected) + (chosen - target).square() + (rejected + target).square()


def dpo_shift_loss(
    chosen_logps: torch.Tensor,
    rejected_logps: torch.Tensor,
    ref_chosen_logps: torch.Tensor,
    ref_rejected_logps: torch.Tensor,
    beta: float,
    dpo_shift_lambda: float,
) -> torch.Tensor:
    r"""DPO-Shift: DPO with the rejected log-ratio scaled down, so that pushing it down pays less.

    -log sigmoid(beta * [(pi_c - ref_c) - f * (pi_r - ref_r)]) with f = dpo_shift_lambda. Yang et al. 2025,
    "DPO-Shift: Shifting the Distribution of Direct Preference Optimization" (arXiv 2502.07599). f = 1 is plain DPO;
    the smaller, the likelier the chosen answers stay and the smaller the margin becomes.

    Args:
        chosen_logps, rejected_logps: (B,), summed over the tokens of each answer, in nats, with gradient.
        ref_chosen_logps, ref_rejected_logps: (B,), the same under the frozen reference.
        beta: greater than 0. dpo_shift_lambda: in (0, 1]; the authors use 0.55 to 0.99, fixed or linear over the run.

    Returns:
        (B,), a loss to *minimise*, float32 or wider.

    When it is wrong: with f well below 1 the partition function of DPO's derivation no longer cancels, so the margin
    is not a difference of rewards any more. It lowers the pressure on the chosen answer; it does not hold it.

    Raises:
        ValueError: shapes differ or are not (B,), `beta` is not positive, or `dpo_shift_lambda` is outside (0, 1].
    """
    _check_beta(beta)
    if not 0 < dpo_shift_lambda <= 1:
        raise ValueError(f"`dpo_shift_lambda` must be in (0, 1], got {dpo_shift_lambda}.")
    chosen, rejected = log_ratios(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return _minus_log_sigmoid(beta * (chosen - dpo_shift_lambda * rejected))


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"`beta` must be greater than 0, got {beta}.")


def _minus_log_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(x) = log(1 + exp(-x)), without overflow."""
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


def projection_coefficient(dot: float, chosen_square: float) -> float:
    r"""max(0, g . c) / (c . c), what `project_update` multiplies c with, from products already summed over a model.

    0 where c . c is 0: without a direction there is nothing to remove.
    """
    return max(0.0, dot) / chosen_square if chosen_square > 0 else 0.0

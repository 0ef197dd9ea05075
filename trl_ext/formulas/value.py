"""The clipped regression loss of PPO's critic."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import check_mask, check_same_shape


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float | None,
    num_items: torch.Tensor | float | None = None,
) -> torch.Tensor:
    r"""1/2 mean over real tokens of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    The squared error of Schulman et al. 2017 (arXiv 1707.06347), eq. 9, with the clipping of OpenAI's reference
    implementation, which is not in the paper. The maximum is pessimistic: a token whose value has moved more than
    `clip` towards its return gets no further gradient, one that moved away from it keeps its full gradient.

    Args:
        values: (B, T), V of the state before token t from the critic being trained, with gradient.
        old_values: (B, T), V at sampling time. returns: (B, T), the targets. Both without gradient.
        mask: (B, T), 1 = real token; entries under 0 change neither loss nor gradient, whatever is in them.
        clip: largest useful move, in units of the return, at least 0; `None` = plain squared error.
        num_items: divisor instead of the number of real tokens here. With gradient accumulation give the number of
            real tokens of the whole batch, so that 1 x 4 and 4 x 1 make the same update.

    Returns:
        Scalar to *minimise*, in squared units of the return, float32 or wider; 0 when no token is real.

    When it is wrong: `clip` has the scale of the returns, unlike the policy's epsilon. Returns of size 50 with a clip
    of 0.2 hardly train the critic; scale the rewards or switch the clip off.

    Raises:
        ValueError: shapes differ, or `clip` is negative.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    check_mask(mask, values)
    if clip is not None and not clip >= 0:
        raise ValueError(f"`clip` must be at least 0 (or None for no clipping), got {clip}.")
    real = mask.bool()
    values, old_values, returns = (_masked_float(tensor, real) for tensor in (values, old_values, returns))
    error = (values - returns).square()
    if clip is not None:
        clipped = torch.clamp(values, old_values - clip, old_values + clip)
        error = torch.maximum(error, (clipped - returns).square())
    if num_items is None:
        num_items = real.sum().clamp(min=1)
    return 0.5 * error.sum() / num_items


def _masked_float(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """At least float32, and 0 under mask 0, so that NaN there reaches neither the sum nor the gradient."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return torch.where(real, tensor, torch.zeros_like(tensor))

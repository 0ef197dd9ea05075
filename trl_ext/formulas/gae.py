"""Rewards per token, generalized advantage estimation and whitening, for PPO."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import at_least_float32, check_mask, check_rank, check_same_shape

WHITEN_EPS = 1e-8
# A standard deviation below this many units in the last place of the mean is rounding noise, not variation.
_TIE_ULPS = 16


def token_rewards(kl: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor, beta: float) -> torch.Tensor:
    r"""Reward of each token: -beta * kl_t, plus the score of the answer on its last real token.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), eq. 2, spread over
    the tokens as in Ouyang et al. 2022 (arXiv 2203.02155).

    Args:
        kl: (B, T), KL estimate at each token, in nats; "k1" gives the full sequence-level gradient.
        scores: (B,), larger is better.
        mask: (B, T), 1 = real token. The last real token is the last 1 of the row, wherever the padding is and
            however many gaps (tool output) come before it; never the first padding token.
        beta: weight of the KL penalty, at least 0.

    Returns:
        (B, T), float32 or wider; exactly 0 under mask 0. A row without a real token gets no score. A score of NaN
        makes the last token of its row NaN: mask rows that could not be scored.

    When it is wrong: an answer cut by the length limit gets its score on a token that did not end it; mask such rows,
    or bootstrap with `gae(last_values=...)`.

    Raises:
        ValueError: shapes do not fit, or `beta` is negative (it would pay for leaving the reference).
    """
    check_rank("kl", kl, 2)
    check_mask(mask, kl)
    check_rank("scores", scores, 1)
    if len(scores) != len(kl):
        raise ValueError(f"`scores` has {len(scores)} rows, `kl` has {len(kl)}.")
    if not beta >= 0:
        raise ValueError(f"`beta` must be at least 0, got {beta}: a negative weight pays for leaving the reference.")
    real = mask.bool()
    kl, scores = at_least_float32(kl), at_least_float32(scores)
    penalty = -beta * torch.where(real, kl, torch.zeros_like(kl))
    score = torch.where(_is_last_real(real), scores.unsqueeze(1), torch.zeros_like(penalty))
    return penalty + score


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
    last_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Generalized advantage estimation over the real tokens of each row.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv
    1506.02438), eq. 16: A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t, computed
    backwards as A_t = delta_t + gamma lam A_{t+1}. t + 1 is the next *real* token: masked tokens in the middle (tool
    output) are skipped, neither discounted through nor bootstrapped from.

    lam = 0 is the one-step error delta_t (eq. 17), lam = 1 the discounted reward-to-go minus V_t (eq. 18).

    Args:
        rewards: (B, T), reward received for token t.
        values: (B, T), V of the state *before* token t, in units of the reward.
        mask: (B, T), 1 = real token.
        gamma: discount in [0, 1]. lam: trace decay in [0, 1].
        last_values: (B,), value of the state after the last real token, for truncated answers; give 0 for the rows
            that ended by themselves. `None` = 0 for every row.

    Returns:
        advantages (B, T) and returns = advantages + values (B, T), float32 or wider, exactly 0 under mask 0. The
        gradient flows into `values`: pass them detached unless that is wanted.

    When it is wrong: values shifted by one (V after the token) look plausible and train a biased policy; for a model
    whose score head is applied at token t, the state before it is the head's output at position t - 1.

    Raises:
        ValueError: shapes do not fit, or `gamma` or `lam` is outside [0, 1].
    """
    check_rank("rewards", rewards, 2)
    check_same_shape(rewards=rewards, values=values)
    check_mask(mask, rewards)
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"`{name}` must be in [0, 1], got {factor}.")
    real = mask.bool()
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    next_value = _last_values(last_values, values)  # (B,)
    next_advantage = torch.zeros_like(next_value)
    columns = zip(rewards.unbind(1), values.unbind(1), real.unbind(1), strict=True)
    advantages: list[torch.Tensor] = []
    for reward, value, is_real in reversed(list(columns)):
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        # Only the state of real tokens is carried on, so nothing under mask 0 is ever multiplied.
        next_advantage = torch.where(is_real, advantage, next_advantage)
        next_value = torch.where(is_real, value, next_value)
        advantages.append(advantage)
    stacked = torch.stack(advantages[::-1], dim=1) if advantages else torch.zeros_like(values)
    zeros = torch.zeros_like(stacked)
    return torch.where(real, stacked, zeros), torch.where(real, stacked + values, zeros)


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    mean: torch.Tensor | float | None = None,
    var: torch.Tensor | float | None = None,
) -> torch.Tensor:
    r"""(values - mean) / (std + 1e-8) over the real entries, with ddof 0.

    Args:
        values: any shape, usually (B, T). mask: same shape, 1 = real entry.
        mean, var: statistics to use instead of the local ones, scalars; give both or neither. With several
            processes reduce them over all ranks first: whitening per rank makes the update depend on the sharding.

    Returns:
        Same shape, float32 or wider; exactly 0 under mask 0. Also 0 everywhere when there is nothing to whiten:
        fewer than two real local entries (only without `mean` and `var`, which may rest on entries elsewhere), or a
        std within rounding error of the mean, which would blow noise of 1e-8 up to unit size.

    When it is wrong: whitening forgets whether the batch as a whole was better or worse than the critic expected;
    heavy tails give most tokens an advantage near 0.

    Raises:
        ValueError: shapes do not fit, or only one of `mean` and `var` is given.
    """
    check_mask(mask, values)
    if (mean is None) != (var is None):
        raise ValueError("Give both `mean` and `var`, or neither.")
    real = mask.bool()
    values = at_least_float32(values)
    zeros = torch.zeros_like(values)
    if mean is None or var is None:
        count = real.sum().clamp(min=1)
        mean = torch.where(real, values, zeros).sum() / count
        var = torch.where(real, values - mean, zeros).square().sum() / count  # exactly 0 for a single entry
    else:
        mean = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
        var = torch.as_tensor(var, dtype=values.dtype, device=values.device)
    tie_std = _TIE_ULPS * torch.finfo(values.dtype).eps * mean.abs()
    usable = var > tie_std.square()
    # The square root of a variance of 0 has an infinite gradient, even when its result is thrown away below.
    std = torch.where(usable, var, torch.ones_like(var)).sqrt()
    centred = torch.where(real & usable, values - mean, zeros)
    return centred / (std + WHITEN_EPS)


def _is_last_real(real: torch.Tensor) -> torch.Tensor:
    """(B, T) True at the last real token of each row."""
    remaining = real.flip(1).cumsum(1).flip(1)  # number of real tokens from t on
    return real & (remaining == 1)


def _last_values(last_values: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """(B,) the value after the last real token."""
    if last_values is None:
        return values.new_zeros(len(values))
    if last_values.shape != (len(values),):
        raise ValueError(f"`last_values` has shape {tuple(last_values.shape)}, expected ({len(values)},).")
    return last_values.to(values.dtype)

"""Estimators of the KL divergence per token, and controllers for its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from trl_ext.formulas.checks import at_least_float32, check_mask, check_same_shape

KLEstimator = Literal["k1", "k2", "k3"]
ControllerRule = Literal["fixed", "proportional", "doubling"]

# One step of the proportional rule reacts to at most this relative error (Ziegler et al. 2019, eq. 3).
MAX_RELATIVE_ERROR = 0.2


def kl_per_token(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    estimator: KLEstimator,
    max_log_ratio: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Estimate KL(policy || reference) at each token from samples of the policy.

    With u = logps - ref_logps: k1 = u, k2 = u^2 / 2, k3 = exp(-u) - 1 + u (Schulman 2020, "Approximating KL
    Divergence"). All three have the right *value* to second order; their *gradients* as a loss differ:

    - k1: expected gradient exactly 0, it regularises nothing unless multiplied by the ratio pi / pi_old;
    - k2: the true reverse-KL gradient, on-policy;
    - k3: the forward-KL gradient, on-policy; the reverse-KL one when multiplied by the ratio.

    Args:
        logps: (B, T), log-probabilities of the policy in nats.
        ref_logps: (B, T), log-probabilities of the reference in nats.
        estimator: "k1", "k2" or "k3".
        max_log_ratio: clamps u to [-max, max] *before* the exponential of k3, so that value and gradient stay finite
            (after it, 0 * inf would make the gradient NaN). `None` changes no bit. Ignored by k1 and k2, which have
            no exponential. Clamped tokens get no gradient: a value below about 10 also removes honest signal.
        mask: (B, T), 1 = real token. It is applied *before* the exponential: an overflow under mask 0 would turn into
            a NaN gradient even when the result is masked afterwards (0 * inf).

    Returns:
        (B, T) in float32 or wider, 0 under mask 0; k1 may be negative, k2 and k3 never are. Without a mask, entries
        of padding are whatever the inputs there give.

    Raises:
        ValueError: unknown estimator, or shapes that differ.
    """
    check_same_shape(logps=logps, ref_logps=ref_logps)
    log_ratio = _masked_difference(logps, ref_logps, mask)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        if max_log_ratio is not None:
            log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
        # expm1: near the reference exp(-u) - 1 would be rounding error (6e-8) larger than u^2 / 2.
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"Unknown KL estimator {estimator!r}. Use 'k1', 'k2' or 'k3'.")


def policy_kl(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    r"""Estimate KL(old || new) at each token from samples of the old policy: exp(d) - 1 - d, d = logps - old_logps.

    This is the KL of the penalty form of PPO (Schulman et al. 2017, section 4) written with the k3 estimator; since
    the samples come from the *old* policy, its gradient is that of the divergence itself. It is exactly 0, with
    gradient exactly 0, while the policy still is the one that sampled.

    Args:
        logps: (B, T), current policy, nats. old_logps: (B, T), policy that sampled, nats.
        mask: (B, T), 1 = real token, applied before the exponential (see `kl_per_token`).

    Returns:
        (B, T), never negative, 0 under mask 0.
    """
    check_same_shape(logps=logps, old_logps=old_logps)
    difference = _masked_difference(logps, old_logps, mask)
    return torch.expm1(difference) - difference


def _masked_difference(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    difference = at_least_float32(first) - at_least_float32(second)
    if mask is None:
        return difference
    check_mask(mask, difference)
    return torch.where(mask.bool(), difference, torch.zeros_like(difference))


def return_to_go(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Sum of the real entries from each token to the end: out_t = sum_{s >= t} mask_s * x_s.

    With x the k1 estimate this is the part of the sequence-level KL that token t can still influence; used as a
    (negative) advantage it gives the full gradient of the sequence-level reverse KL.

    Args:
        per_token: (B, T). mask: (B, T), 1 = real token.

    Returns:
        (B, T), 0 under mask 0.
    """
    check_same_shape(per_token=per_token, mask=mask)
    real = mask.bool()
    # `where`, not a product: padding may hold inf or NaN.
    masked = torch.where(real, per_token, torch.zeros_like(per_token))
    from_end = masked.flip(-1).cumsum(-1).flip(-1)
    return torch.where(real, from_end, torch.zeros_like(from_end))


@dataclass
class KLController:
    r"""Coefficient of a KL term that follows a target.

    - "proportional" (Ziegler et al. 2019, section 2.2, in exponential form):
      beta <- clip(beta * exp(clip(kl / target - 1, -0.2, 0.2) * n / horizon), beta_min, beta_max);
    - "doubling" (PPO-Penalty, Schulman et al. 2017, section 4): kl > 1.5 target doubles beta, kl < target / 1.5
      halves it, then the same clip;
    - "fixed": beta never moves.

    beta can neither leave [beta_min, beta_max] nor change sign. A `target` that the estimator in use cannot reach
    (for example a positive one below its sampling noise) drives beta to a bound: watch it.

    Args:
        beta: initial coefficient. target: wanted KL in nats per token, of the estimator in use.
        horizon: number of sequences over which an error of 20% moves beta by a factor e^0.2.
        beta_min, beta_max: bounds, 0 < beta_min <= beta_max (not used by "fixed").
        rule: "fixed", "proportional" or "doubling".

    Raises:
        ValueError: naming the argument that is out of range.
    """

    beta: float
    target: float = 0.0
    horizon: float = 10_000.0
    beta_min: float = 1e-4
    beta_max: float = 1.0
    rule: ControllerRule = "fixed"

    def __post_init__(self) -> None:
        if self.rule not in ("fixed", "proportional", "doubling"):
            raise ValueError(f"Unknown rule {self.rule!r}. Use 'fixed', 'proportional' or 'doubling'.")
        if self.rule == "fixed":
            return
        if not self.target > 0:
            raise ValueError(f"`target` must be positive nats per token, got {self.target}.")
        if not self.horizon > 0:
            raise ValueError(f"`horizon` must be a positive number of sequences, got {self.horizon}.")
        if not 0 < self.beta_min <= self.beta_max:
            raise ValueError(f"0 < beta_min <= beta_max is needed, got [{self.beta_min}, {self.beta_max}].")
        if not self.beta_min <= self.beta <= self.beta_max:
            bounds = f"[{self.beta_min}, {self.beta_max}]"
            raise ValueError(f"beta={self.beta} lies outside [beta_min, beta_max] = {bounds}.")

    def update(self, kl: float, n: int = 1) -> float:
        """Move beta after a measured mean `kl` (nats per token) over `n` sequences; returns the new beta.

        Raises:
            ValueError: `kl` is NaN or infinite, which no coefficient can repair.
        """
        if self.rule == "fixed":
            return self.beta
        if not math.isfinite(kl):
            raise ValueError(f"The KL controller got kl={kl}; the policy has diverged or the estimator overflowed.")
        if self.rule == "proportional":
            error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            # e^709 is the largest float: a short horizon must end at a bound, not in an OverflowError.
            self.beta *= math.exp(min(error * n / self.horizon, 700.0))
        elif kl > 1.5 * self.target:
            self.beta *= 2
        elif kl < self.target / 1.5:
            self.beta /= 2
        self.beta = min(max(self.beta, self.beta_min), self.beta_max)
        return self.beta

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs: the moved coefficient (the rest comes from the config)."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient, clipped to the bounds of *this* run's config."""
        beta = float(state["beta"])
        if not math.isfinite(beta):
            raise ValueError(f"The saved beta is {beta}; delete the state to restart from the config's value.")
        self.beta = beta if self.rule == "fixed" else min(max(beta, self.beta_min), self.beta_max)

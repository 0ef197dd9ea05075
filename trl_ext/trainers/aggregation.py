"""From the reward matrix to one value per completion, by `multi_objective_aggregation`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trl_ext.formulas.advantages import (
    GDPOTerms,
    gdpo_terms,
    group_advantages,
    normalise_batch,
    pareto_fronts,
    zero_signal_groups,
)


@dataclass(frozen=True)
class Aggregated:
    """One value per completion before the baseline of the trainer.

    Attributes:
        combined: (N,), NaN = unscorable.
        zero_signal: (N/G,), True where all completions of the group are worth the same.
        terms: GDPO's parts, for its metrics; None for the other rules.
    """

    combined: torch.Tensor
    zero_signal: torch.Tensor
    terms: GDPOTerms | None = None


def aggregate(rewards: torch.Tensor, num_generations: int, weights: torch.Tensor, rule: str) -> Aggregated:
    """Combine the (N, F) matrix by `rule`; zero-signal groups are decided on the combined value."""
    terms = None
    if rule == "sum_then_normalize":
        combined = (rewards * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
    elif rule == "pareto":
        # A weight of 0 takes a reward out, a negative one makes it a cost; sizes do not matter to an order.
        used = weights != 0
        fronts = pareto_fronts(rewards[:, used] * weights[used].sign(), num_generations).to(rewards.dtype)
        combined = (-fronts).masked_fill(rewards.isnan().all(1), torch.nan)
    else:
        terms = gdpo_terms(rewards, num_generations, weights)
        combined = terms.combined
    return Aggregated(combined, zero_signal_groups(combined, num_generations), terms)


def grpo_advantages(aggregated: Aggregated, num_generations: int, rule: str, scale: str) -> torch.Tensor:
    """(N,) advantages of GRPO for the rules that TRL does not have."""
    if rule == "gdpo":
        return normalise_batch(aggregated.combined)
    return group_advantages(aggregated.combined, num_generations, scale)  # type: ignore[arg-type]


def gdpo_metrics(terms: GDPOTerms, names: list[str]) -> dict[str, float]:
    """Health numbers of GDPO per reward: fraction of tied groups, and share of sum |w z|.

    `share` tells which reward drives the update: near 1 for one reward, it eats the others. The fraction of groups
    without any signal is decided on the raw rewards of every column.
    """
    tied = terms.tied.float().mean(0).tolist()
    size = terms.weighted.abs().sum(0)
    share = (size / size.sum().clamp(min=torch.finfo(size.dtype).tiny)).tolist()
    metrics = {f"gdpo/{name}/tie_fraction": value for name, value in zip(names, tied, strict=True)}
    metrics |= {f"gdpo/{name}/share": value for name, value in zip(names, share, strict=True)}
    metrics["gdpo/frac_zero_signal"] = terms.tied.all(1).float().mean().item()
    return metrics

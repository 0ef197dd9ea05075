"""Health numbers of a batch of pairs, over all ranks with one exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.seams.preference import PairForward


@dataclass(frozen=True)
class PairMetrics:
    """Per-pair numbers of one batch, gathered over ranks; (P,) each, detached.

    Attributes:
        chosen, rejected: log-probability of the answer minus the reference's, nats.
        chosen_tokens, rejected_tokens: lengths; an answer without a token counts as one.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor

    def check_finite(self) -> None:
        """Raise `FloatingPointError` when a log-probability is not finite: nothing good follows from such a batch."""
        if not torch.isfinite(self.chosen + self.rejected).all():
            raise FloatingPointError(
                "A log-probability of this batch is not finite: the policy has diverged, or was loaded damaged. Lower "
                "learning_rate, raise beta, or look at the weights of the model."
            )

    def logged(self, with_dpop: bool) -> dict[str, float]:
        """The metrics of `PreferenceOptions`, by name."""
        difference = self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens
        values = {
            "logps/chosen_vs_ref": self.chosen.mean(),
            "logps/rejected_vs_ref": self.rejected.mean(),
            "logps/chosen_vs_ref_per_token": self.chosen.sum() / self.chosen_tokens.sum(),
            "logps/chosen_less_likely": (self.chosen < 0).float().mean(),
            "rewards/accuracies_per_token": (difference.sign() + 1).mean() / 2,
            "rewards/ties_per_token": (difference == 0).float().mean(),
        }
        if with_dpop:
            penalty = torch.relu(-self.chosen)
            values |= {"dpop/penalty_active": (penalty > 0).float().mean(), "dpop/penalty_mean": penalty.mean()}
        numbers = torch.stack(list(values.values())).tolist()
        return dict(zip(values, numbers, strict=True))


def pair_metrics(forward: PairForward, gather: Callable[[torch.Tensor], Any]) -> PairMetrics:
    """The numbers of this batch on all ranks; `gather` joins the rows of all ranks."""
    difference = (forward.logps.detach() - forward.ref_logps).float()
    tokens = forward.mask.sum(-1).clamp(min=1).float()
    local = torch.stack([*difference.chunk(2), *tokens.chunk(2)], dim=1)  # (B, 4)
    return PairMetrics(*gather(local).unbind(1))


@dataclass
class ReferenceDrift:
    """Chosen log-probability against the reference, summed over batches."""

    total: float = 0.0
    tokens: float = 0.0

    def add(self, metrics: PairMetrics) -> None:
        """Add a batch."""
        total, tokens = torch.stack([metrics.chosen.sum(), metrics.chosen_tokens.sum()]).tolist()
        self.total += total
        self.tokens += tokens

    @property
    def per_token(self) -> float:
        """Nats per token; negative = the chosen answers are less likely than under the reference."""
        return self.total / self.tokens

    def reset(self) -> None:
        """Start the next measurement."""
        self.total = self.tokens = 0.0

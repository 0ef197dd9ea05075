"""A KL term with its coefficient: measured over the accumulation window, moved by a controller."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from trl_ext.formulas.kl import KLController


@dataclass
class WindowMean:
    """Mean of a per-token quantity over the micro-batches of one optimiser step and all ranks."""

    total: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0

    def add(self, total: float, tokens: float, sequences: float) -> None:
        """Add one micro-batch, already summed over ranks."""
        self.total += total
        self.tokens += tokens
        self.sequences += sequences

    @property
    def mean(self) -> float:
        """Mean per token; 0 when no token was real."""
        return self.total / self.tokens if self.tokens else 0.0

    def reset(self) -> None:
        """Start the next window."""
        self.total = self.tokens = self.sequences = 0.0


@dataclass
class PenaltyCoefficient:
    """Controller plus the window it is fed from; the same on every rank because its inputs are reduced."""

    controller: KLController
    window: WindowMean = field(default_factory=WindowMean)

    @property
    def value(self) -> float:
        """The coefficient in use."""
        return self.controller.beta

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient can move, and so belongs into the checkpoint."""
        return self.controller.rule != "fixed"

    def end_of_step(self) -> None:
        """Move the coefficient by the window's mean, then start the next window."""
        # An infinite mean stops the updates (kl_early_stop); no coefficient follows from it.
        if self.window.tokens and math.isfinite(self.window.mean):
            self.controller.update(self.window.mean, n=round(self.window.sequences))
        self.window.reset()


def masked_sum(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Detached sum over the real tokens, for metrics."""
    return torch.where(mask.bool(), per_token.detach(), torch.zeros_like(per_token)).sum().float()

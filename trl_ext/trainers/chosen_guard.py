"""An alarm for chosen answers that become less likely than under the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class ChosenGuard:
    """Moving average of the chosen log-probability against the reference, and how often it was below the floor.

    Args:
        floor: nats per token below the reference, at least 0.
        patience: consecutive measurements below the floor before `update` returns True.
        decay: of the average, in [0, 1); the first measurement starts it.

    Attributes:
        average: nats per token, None before the first measurement; negative = less likely than under the reference.
        below: consecutive measurements below the floor; starts over when the guard has acted.
    """

    floor: float
    patience: int
    decay: float
    average: float | None = None
    below: int = 0

    def update(self, chosen_vs_ref: float) -> bool:
        """Take a measurement (nats per token); True when it is time to act.

        Raises:
            FloatingPointError: the measurement is not finite.
        """
        if not math.isfinite(chosen_vs_ref):
            raise FloatingPointError(
                f"The chosen log-probability against the reference is {chosen_vs_ref}: the policy has diverged. Lower "
                "learning_rate, or raise beta."
            )
        previous = chosen_vs_ref if self.average is None else self.average
        self.average = self.decay * previous + (1 - self.decay) * chosen_vs_ref
        self.below = self.below + 1 if self.average < -self.floor else 0
        if self.below < self.patience:
            return False
        self.below = 0
        return True

    @property
    def content(self) -> bool:
        """Whether the average is not below the floor (also before the first measurement)."""
        return self.average is None or self.average >= -self.floor

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"average": self.average, "below": self.below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.average, self.below = state["average"], state["below"]

"""What the reward trainer needs of TRL's private methods."""

from __future__ import annotations

from typing import Any

from trl_ext.seams.metrics import MetricSeams


class RewardSeams(MetricSeams):
    """Metrics, and TRL's tokenisation of pairs."""

    def ext_tokenised(self, rows: Any) -> Any:
        """`rows` with `chosen_ids` and `rejected_ids`, as TRL prepares its training set."""
        return self._prepare_dataset(rows, self.processing_class, self.args, "calibration")

"""TRL's metric lists, which every trainer of TRL has in the same form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _TRLTrainer = Any
else:
    _TRLTrainer = object


class MetricSeams(_TRLTrainer):
    """Access to `_metrics`: TRL averages the values of a name at the next log, with `eval_` before it in evaluation."""

    @property
    def ext_mode(self) -> str:
        """ "train" or "eval", as TRL decides it."""
        return "train" if self.model.training else "eval"

    def ext_log(self, name: str, value: float) -> None:
        """Append to TRL's metric `name`."""
        self._metrics[self.ext_mode][name].append(value)

    def ext_log_train(self, name: str, value: float) -> None:
        """The same for the next training log, also from within an evaluation."""
        self._metrics["train"][name].append(value)

"""`RewardConfig`: TRL's, plus ensembles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trl

KINDS = ("heads", "adapters", "models")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RewardOptions:
    r"""Options added to TRL's `RewardConfig`. Every default trains as TRL does, bit for bit.

    ensemble_size (`int`): number of members M; 1 is TRL's reward model.
    ensemble_kind (`str`): "heads" (M score heads on one trunk, trained together: one forward for all; the trunk is
        shared, so they disagree least), "adapters" (M adapters with a head each on one base, which may be 4-bit; needs
        a `peft_config`), or "models" (M full models; two at a time are in memory). Members of the last two kinds are
        trained one after another, each as TRL trains one, in `output_dir/member-<m>`; a finished one is kept.
        For "heads" the losses of the members are summed, not averaged: averaging would lower each head's learning rate
        with M. Metrics `ensemble/accuracy_min`, `ensemble/accuracy_max` (over members), `ensemble/disagreement`
        (standard deviation of the margin over members, mean over pairs).
    ensemble_bootstrap (`bool`): each member has its own bootstrap sample of the pairs, and always its own seed.
    calibration_rows (`int`): after training, the scores of so many pairs (of `eval_dataset`, else of `train_dataset`)
        give each member's mean and standard deviation, and with an `eval_dataset` the temperature of the margin; they
        are saved with the model in `trl_ext_reward.json`. 0: no calibration.
    """

    ensemble_size: int = _option(1, "Members of the reward-model ensemble; 1 is a single reward model.")
    ensemble_kind: str = _option("heads", "Kind of ensemble: heads, adapters or models.")
    ensemble_bootstrap: bool = _option(True, "Train each member on its own bootstrap sample of the pairs.")
    calibration_rows: int = _option(256, "Pairs on which members are standardised after training; 0 = none.")

    def check_options(self) -> None:
        """Refuse bad values and combinations.

        Raises:
            ValueError: naming the field, the value and the fix.
        """
        if self.ensemble_size < 1:
            raise ValueError(f"ensemble_size={self.ensemble_size} must be at least 1; 1 is a single reward model.")
        if self.ensemble_kind not in KINDS:
            raise ValueError(f"ensemble_kind={self.ensemble_kind!r} is unknown. Use one of {list(KINDS)}.")
        if self.calibration_rows < 0:
            raise ValueError(f"calibration_rows={self.calibration_rows} must be at least 0.")
        if self.ensemble_size == 1 and self.ensemble_kind != "heads":
            raise ValueError(
                f"ensemble_kind={self.ensemble_kind!r} has no effect with ensemble_size=1. Set ensemble_size to 3 or "
                "more, or leave ensemble_kind."
            )
        plugin = getattr(self, "deepspeed_plugin", None)
        if self.ensemble_size > 1 and self.ensemble_kind != "heads" and plugin is not None:
            raise ValueError(
                f"ensemble_kind={self.ensemble_kind!r} trains its members one after another in one process, and "
                "DeepSpeed makes one engine per process. Use ensemble_kind='heads', or train the members one by one."
            )


@dataclass
class RewardConfig(RewardOptions, trl.RewardConfig):
    __doc__ = f"""Drop-in for [`trl.RewardConfig`]: every TRL field keeps its name, default and meaning.

    {RewardOptions.__doc__}
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options()

"""`GRPOConfig`: TRL's, plus the options of `RolloutOptions`."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from trl_ext.trainers.rollout_config import RolloutOptions


@dataclass
class GRPOConfig(RolloutOptions, trl.GRPOConfig):
    __doc__ = f"""Drop-in for [`trl.GRPOConfig`]: every TRL field keeps its name, default and meaning.

    {RolloutOptions.__doc__}
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options()
        _check_grpo(self)

    @property
    def trl_estimator(self) -> str:
        """The estimator in TRL's own code: k3 in the loss."""
        return "k3"

    def samples_are_used_once(self) -> bool:
        """Whether each sample meets only the policy that generated it, so that the importance ratio is exactly 1."""
        generate_every = (self.steps_per_generation or 1) * self.num_iterations
        return self.gradient_accumulation_steps % generate_every == 0


def _check_grpo(config: GRPOConfig) -> None:
    if config.multi_objective_aggregation == "gdpo" and config.scale_rewards != "group":
        raise ValueError(
            f"scale_rewards={config.scale_rewards!r} has no effect with multi_objective_aggregation='gdpo', which "
            "normalises each reward in its group and the sum over the batch. Leave scale_rewards='group'."
        )
    if config.kl_placement == "reward" and config.loss_type == "vespo":
        raise ValueError(
            "kl_placement='reward' makes advantages differ per token, but loss_type='vespo' weights whole sequences "
            "by the sign of their advantage. Set kl_placement='loss', or another loss_type."
        )
    if config.kl_placement == "reward" and config.top_entropy_quantile < 1.0:
        raise ValueError(
            f"top_entropy_quantile={config.top_entropy_quantile} would also mask the KL, which kl_placement='reward' "
            "puts into the advantages. Set kl_placement='loss', or top_entropy_quantile=1.0."
        )
    if config.kl_placement == "reward" and config.off_policy_mask_threshold is not None:
        raise ValueError(
            "kl_placement='reward' makes advantages differ per token, but off_policy_mask_threshold="
            f"{config.off_policy_mask_threshold} keeps or drops whole sequences by the sign of their advantage. Set "
            "kl_placement='loss', or off_policy_mask_threshold=None."
        )

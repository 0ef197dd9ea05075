"""`RLOOConfig`: TRL's, plus the options of `RolloutOptions`."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from trl_ext.trainers.rollout_config import RolloutOptions, _option


@dataclass
class RLOOConfig(RolloutOptions, trl.RLOOConfig):
    __doc__ = f"""Drop-in for [`trl.RLOOConfig`]: every TRL field keeps its name, default and meaning.

    Two fields of GRPO are added: `entropy_coef` (mean per-token entropy, added to the objective) and
    `use_bias_correction_kl` (per-token ratio on a KL term in the loss).

    {RolloutOptions.__doc__}
    """

    kl_placement: str = _option("reward", "Where the KL to the reference enters: loss or reward.")
    entropy_coef: float = _option(0.0, "Coefficient of the entropy bonus: mean per-token entropy, nats.")
    use_bias_correction_kl: bool = _option(False, "Multiply the KL term of the loss by the per-token ratio.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options()
        if self.use_bias_correction_kl and self.kl_estimator is None:
            raise ValueError(
                "use_bias_correction_kl=True corrects a KL term in the loss; RLOO has none by default. Set "
                "kl_estimator='k3' (or 'k1') and kl_placement='loss', or leave it False."
            )
        if self.use_bias_correction_kl and self.kl_placement == "reward":
            raise ValueError(
                "use_bias_correction_kl=True has no effect with kl_placement='reward', RLOO's default: it multiplies "
                "the KL term of the loss. Set kl_placement='loss', or use_bias_correction_kl=False."
            )

    @property
    def trl_estimator(self) -> str:
        """The estimator in TRL's own code: k1 in the reward."""
        return "k1"

    def samples_are_used_once(self) -> bool:
        """Whether each sample meets only the policy that generated it, so that the importance ratio is exactly 1."""
        return self.gradient_accumulation_steps % ((self.steps_per_generation or 1) * self.num_iterations) == 0

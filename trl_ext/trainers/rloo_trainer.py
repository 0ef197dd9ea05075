"""`RLOOTrainer`: TRL's, with the options of `RLOOConfig`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import trl
from typing_extensions import override

from trl_ext.formulas.advantages import leave_one_out_advantages, normalise_batch
from trl_ext.formulas.entropy import mean_token_entropy
from trl_ext.formulas.kl import kl_per_token
from trl_ext.formulas.reduce import sequence_sums
from trl_ext.seams.rollout import PolicyForward, ScoringRecord
from trl_ext.trainers.aggregation import Aggregated
from trl_ext.trainers.penalty import masked_sum
from trl_ext.trainers.rloo_config import RLOOConfig
from trl_ext.trainers.rollout_trainer import RolloutTrainer


class RLOOTrainer(RolloutTrainer, trl.RLOOTrainer):
    """Drop-in for [`trl.RLOOTrainer`]: same arguments, same behaviour, plus the options of `trl_ext.RLOOConfig`.

    With every option at its default the trained weights equal TRL's bit for bit. RLOO's loss is the mean over
    sequences of a sequence-level term, so the KL terms are mean over sequences of token sums.
    """

    entropy_coef: float = 0.0

    @functools.wraps(trl.RLOOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entropy_coef = self.args.entropy_coef if isinstance(self.args, RLOOConfig) else 0.0

    # ---- scoring -----------------------------------------------------------------------------------------------

    @property
    def _ext_rule(self) -> str:
        return self._ext_options.multi_objective_aggregation

    @override
    def ext_scoring_active(self) -> bool:
        return bool(
            self._ext_recomputes_advantages()
            or self._ext_gates
            or self._ext_diversity
            or self._ext_policy_kl is not None
        )

    def _ext_recomputes_advantages(self) -> bool:
        options = self._ext_options
        return self._ext_kl is not None or self._ext_rule != "sum_then_normalize" or options.skip_zero_signal_groups

    @override
    def ext_after_scoring(self, output: dict[str, Any], record: ScoringRecord) -> None:
        output["ext_old_per_token_logps"] = record.logps[0]
        if self.beta != 0.0:
            output["ext_ref_per_token_logps"] = record.logps[1]
        if record.rewards is None or not self._ext_recomputes_advantages():
            return
        aggregated = self._ext_aggregate(record.rewards, self._ext_rule)
        scores = aggregated.combined
        if self.reward_clip_range:
            scores = scores.clamp(min=self.reward_clip_range[0], max=self.reward_clip_range[1])
        advantages = self._ext_baseline(scores - self._ext_reward_kl(output))
        if self._ext_rule != "sum_then_normalize" or self._ext_kl_in_loss():
            self.ext_replace_last_metric("frac_reward_zero_std", aggregated.zero_signal.float().mean().item())
        advantages = self._ext_skip(advantages, aggregated, output)
        self.ext_replace_logged_advantages(advantages)
        output["advantages"] = self._ext_local(advantages, output)

    def _ext_baseline(self, scores: torch.Tensor) -> torch.Tensor:
        """(N,) leave-one-out advantages, normalised over the scorable ones where TRL does."""
        generations = self.ext_num_generations
        advantages = leave_one_out_advantages(scores, generations)
        if not self.normalize_advantages:
            return advantages
        known = ~scores.isnan().reshape(-1, generations)
        scorable = (known & (known.sum(1, keepdim=True) > 1)).reshape(-1)
        return normalise_batch(advantages.masked_fill(~scorable, torch.nan))

    def _ext_skip(self, advantages: torch.Tensor, aggregated: Aggregated, output: dict[str, Any]) -> torch.Tensor:
        if not self._ext_options.skip_zero_signal_groups:
            return advantages
        signal = self._ext_mark_zero_signal(aggregated, output)
        return torch.where(signal, advantages, torch.zeros_like(advantages))

    def _ext_reward_kl(self, output: dict[str, Any]) -> torch.Tensor:
        """(N,) what the KL takes from each completion's reward; 0 when it is in the loss or absent."""
        mask = output["completion_mask"]
        if self._ext_kl is not None and self._ext_options.kl_placement == "loss":
            self.ext_drop_last_metric("kl")  # TRL's k1; the estimator in use is logged by the loss
            return torch.zeros((), device=mask.device)
        if self.beta == 0.0:
            return torch.zeros((), device=mask.device)
        coefficient = self.beta
        kl = self._ext_estimate(output["ext_old_per_token_logps"], output["ext_ref_per_token_logps"], mask)
        if self._ext_kl is not None:
            self._ext_account_reward_kl(kl, mask)
        gathered: Any = self.accelerator.gather(sequence_sums(kl, mask))
        return coefficient * gathered

    def _ext_account_reward_kl(self, kl: torch.Tensor, mask: torch.Tensor) -> None:
        """The KL in the reward is measured once per generation batch, and moves the coefficient once per batch."""
        assert self._ext_kl is not None
        sums = torch.stack([masked_sum(kl, mask), mask.sum().float(), mask.new_tensor(mask.shape[0]).float()])
        reduced: Any = self.accelerator.reduce(sums, reduction="sum")
        total, tokens, sequences = reduced.tolist()
        self.ext_check_kl("kl", total / max(tokens, 1.0))
        self.ext_replace_last_metric("kl", total / max(tokens, 1.0))
        if self.ext_mode == "train":
            self._ext_kl.window.add(total, tokens, sequences)
            self._ext_move_beta()

    def _ext_estimate(self, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options = self._ext_options
        estimator = options.kl_estimator or "k1"  # TRL's own, when only the aggregation is ours
        return kl_per_token(logps, ref_logps, estimator, options.kl_max_log_ratio, mask)  # type: ignore[arg-type]

    # ---- loss --------------------------------------------------------------------------------------------------

    def _ext_kl_in_loss(self) -> bool:
        return self._ext_kl is not None and self._ext_options.kl_placement == "loss"

    def _ext_has_entropy_bonus(self) -> bool:
        return self.entropy_coef != 0.0 or self._ext_options.entropy_coef_final is not None

    @override
    def ext_enable_entropy_bonus(self) -> None:
        """TRL's RLOO has no bonus to enable; ours reads the coefficient at every loss."""

    @override
    def ext_loss_active(self) -> bool:
        return self._ext_kl_in_loss() or self._ext_policy_kl is not None or self._ext_has_entropy_bonus()

    @override
    def _ext_old_logps(self, forward: PolicyForward) -> torch.Tensor:
        return forward.inputs["ext_old_per_token_logps"]

    @override
    def ext_loss_terms(self, forward: PolicyForward) -> torch.Tensor | None:
        # The Trainer divides RLOO's loss by gradient accumulation, so no term here is.
        terms = torch.zeros((), device=forward.logps.device)
        if self._ext_has_entropy_bonus():
            terms = terms - self.entropy_coef * mean_token_entropy(forward.entropies, forward.mask)
            if self.ext_mode == "train" and self.accelerator.sync_gradients:
                self.ext_log("entropy_coef", self.entropy_coef)
        if self._ext_kl_in_loss() and self._ext_kl is not None:
            forward.kl = self._ext_estimate(forward.logps, forward.inputs["ext_ref_per_token_logps"], forward.mask)
            if self.args.use_bias_correction_kl:
                forward.kl = forward.kl * self._ext_ratio(forward)
            terms = terms + self._ext_kl.value * self._ext_mean_of_sums(forward.kl, forward)
        per_token_policy_kl = self._ext_measure_policy_kl(forward)
        if per_token_policy_kl is not None and self._ext_policy_kl is not None:
            terms = terms + self._ext_policy_kl.value * self._ext_mean_of_sums(per_token_policy_kl, forward)
        if forward.kl is not None or per_token_policy_kl is not None:
            self._ext_account(forward, per_token_policy_kl)
        return terms

    def _ext_mean_of_sums(self, per_token: torch.Tensor, forward: PolicyForward) -> torch.Tensor:
        return sequence_sums(self._ext_group_weights(forward, per_token), forward.mask).mean()

"""`GRPOTrainer`: TRL's, with the options of `GRPOConfig`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import trl
from typing_extensions import override

from trl_ext.formulas.kl import kl_per_token, return_to_go
from trl_ext.formulas.reduce import Window, reduce_per_token, sequence_sums
from trl_ext.seams.rollout import PolicyForward, ScoringRecord
from trl_ext.trainers.aggregation import grpo_advantages
from trl_ext.trainers.rollout_trainer import RolloutTrainer

OWN_RULES = ("gdpo", "pareto")


class GRPOTrainer(RolloutTrainer, trl.GRPOTrainer):
    """Drop-in for [`trl.GRPOTrainer`]: same arguments, same behaviour, plus the options of `trl_ext.GRPOConfig`.

    With every option at its default the trained weights equal TRL's bit for bit. `policy_loss` (logged by TRL when the
    entropy bonus is on) is without the KL term when `kl_estimator` is set; the term is `beta * kl`.
    """

    @functools.wraps(trl.GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @property
    def _ext_rule(self) -> str:
        return str(self.args.multi_objective_aggregation)

    # ---- scoring -----------------------------------------------------------------------------------------------

    @override
    def ext_scoring_active(self) -> bool:
        options = self._ext_options
        return bool(
            self._ext_rule in OWN_RULES or self._ext_gates or self._ext_diversity or options.skip_zero_signal_groups
        )

    @override
    def ext_scoring_overrides(self) -> dict[str, Any]:
        # TRL computes advantages by a rule it knows; they are replaced afterwards.
        return {"multi_objective_aggregation": "sum_then_normalize"} if self._ext_rule in OWN_RULES else {}

    @override
    def ext_after_scoring(self, output: dict[str, Any], record: ScoringRecord) -> None:
        skip = self._ext_options.skip_zero_signal_groups
        if record.rewards is None or (self._ext_rule not in OWN_RULES and not skip):
            return
        aggregated = self._ext_aggregate(record.rewards, self._ext_rule)
        if self._ext_rule in OWN_RULES:
            advantages = grpo_advantages(
                aggregated, self.ext_num_generations, self._ext_rule, str(self.args.scale_rewards)
            )
            self.ext_replace_last_metric("frac_reward_zero_std", aggregated.zero_signal.float().mean().item())
        else:
            gathered: Any = self.accelerator.gather(output["advantages"])
            advantages = gathered
        if skip:
            signal = self._ext_mark_zero_signal(aggregated, output)
            advantages = torch.where(signal, advantages, torch.zeros_like(advantages))
        self.ext_replace_logged_advantages(advantages)
        output["advantages"] = self._ext_local(advantages, output)

    # ---- loss --------------------------------------------------------------------------------------------------

    @override
    def ext_loss_active(self) -> bool:
        return self._ext_kl is not None or self._ext_policy_kl is not None

    @override
    def ext_loss_overrides(self) -> dict[str, Any]:
        return {"beta": 0.0} if self._ext_kl is not None else {}

    @override
    def _ext_old_logps(self, forward: PolicyForward) -> torch.Tensor:
        old = forward.inputs.get("old_per_token_logps")
        return forward.logps.detach() if old is None else old

    @override
    def ext_after_policy_forward(self, forward: PolicyForward) -> None:
        if self._ext_kl is None or self._ext_options.kl_placement != "reward":
            return
        kl = self._ext_estimate(self._ext_old_logps(forward).detach(), forward)
        penalty = self._ext_group_weights(forward, kl)
        advantages = forward.inputs["advantages"]
        if self.importance_sampling_level == "token":
            advantages = advantages.unsqueeze(1) - self._ext_kl.value * return_to_go(penalty, forward.mask)
        else:  # one ratio per sequence weighs the whole sequence, so it must carry the whole sequence's KL
            advantages = advantages - self._ext_kl.value * sequence_sums(penalty, forward.mask)
        forward.inputs["advantages"] = advantages
        forward.kl = kl

    @override
    def ext_loss_terms(self, forward: PolicyForward) -> torch.Tensor | None:
        terms: torch.Tensor | None = None
        if self._ext_kl is not None and self._ext_options.kl_placement == "loss":
            forward.kl = self._ext_estimate(forward.logps, forward)
            if self.args.use_bias_correction_kl:
                # Per token also when the policy ratio is per sequence: a sequence weight would bias the gradient.
                forward.kl = forward.kl * self._ext_ratio(forward)
            terms = self._ext_kl.value * self._ext_reduce(forward.kl, forward)
        per_token_policy_kl = self._ext_measure_policy_kl(forward)
        if per_token_policy_kl is not None and self._ext_policy_kl is not None and self._ext_policy_kl.value > 0:
            penalty = self._ext_policy_kl.value * self._ext_reduce(per_token_policy_kl, forward)
            terms = penalty if terms is None else terms + penalty
        self._ext_account(forward, per_token_policy_kl)
        return terms

    def _ext_estimate(self, logps: torch.Tensor, forward: PolicyForward) -> torch.Tensor:
        options = self._ext_options
        return kl_per_token(
            logps,
            forward.inputs["ref_per_token_logps"],
            options.kl_estimator,  # type: ignore[arg-type]
            options.kl_max_log_ratio,
            forward.mask,
        )

    def _ext_reduce(self, per_token: torch.Tensor, forward: PolicyForward) -> torch.Tensor:
        training = self.ext_mode == "train"
        window = Window(
            max_completion_length=int(self.max_completion_length or 0),
            accumulation=self.current_gradient_accumulation_steps if training else 1.0,
            # In evaluation the batch is neither split across steps nor accumulated.
            steps_per_generation=self.args.steps_per_generation if training else 1.0,
            num_processes=self.accelerator.num_processes,
            num_items_in_batch=forward.inputs.get("num_items_in_batch"),
        )
        return reduce_per_token(self._ext_group_weights(forward, per_token), forward.mask, self.loss_type, window)

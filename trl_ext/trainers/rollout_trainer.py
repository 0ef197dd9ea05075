"""What our GRPO and RLOO share: reward shaping, KL coefficients, early stop, entropy schedule, checkpoint state."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from trl_ext.formulas.entropy import scheduled_coefficient
from trl_ext.formulas.kl import KLController, policy_kl
from trl_ext.models.quantized import prepare_quantized
from trl_ext.seams.rollout import PolicyForward, RolloutSeams, reward_names
from trl_ext.trainers.aggregation import Aggregated, aggregate, gdpo_metrics
from trl_ext.trainers.penalty import PenaltyCoefficient, masked_sum
from trl_ext.trainers.preflight import check_arguments, check_trainable
from trl_ext.trainers.reward_shaping import (
    DIVERSITY_NAME,
    DiversityReward,
    ResolvedGate,
    apply_gates,
    check_finite,
    resolve_gates,
)
from trl_ext.trainers.rollout_config import RolloutOptions
from trl_ext.trainers.state import load_state, save_state

logger = get_logger(__name__)

OVERFLOW_FIX = {
    "kl": "Set kl_max_log_ratio=10 (k3), use kl_estimator='k2', lower learning_rate or raise beta.",
    "policy_kl": "Set kl_early_stop, lower learning_rate or num_iterations, or raise policy_kl_coef.",
}


class RolloutTrainer(RolloutSeams):
    """Mixin in front of a TRL rollout trainer; the subclass says how the KL enters the loss or the reward."""

    _ext_options: RolloutOptions = RolloutOptions()
    _ext_gates: Sequence[ResolvedGate] = ()
    _ext_diversity: DiversityReward | None = None
    _ext_kl: PenaltyCoefficient | None = None
    _ext_policy_kl: PenaltyCoefficient | None = None
    _ext_stopped: bool = False
    _ext_hooked: torch.optim.Optimizer | None = None
    _ext_withheld: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args")
        # A plain TRL config has none of our fields: all options are off.
        options = config if isinstance(config, RolloutOptions) else RolloutOptions()
        names = reward_names(given.get("reward_funcs"))
        check_arguments(given, options, names)
        prepare_quantized(given)
        super().__init__(*args, **kwargs)
        check_trainable(self.model)
        if options.kl_early_stop is not None and _optimizer_is_offloaded(self.accelerator):
            raise ValueError(
                f"kl_early_stop={options.kl_early_stop} must withhold updates, and with an offloaded optimizer "
                "DeepSpeed steps an optimiser of its own, which cannot be held. Set offload_optimizer_device: none, "
                "or leave kl_early_stop unset (policy_kl_coef works everywhere)."
            )
        self._ext_options = options
        if options.diversity_coef != 0.0:
            column = self.ext_add_reward_column(DIVERSITY_NAME, options.diversity_coef)
            self._ext_diversity = DiversityReward(
                column, options.diversity_ngram, options.diversity_cap, options.diversity_min_reward
            )
        # Again by the final names: environments add rewards of their own.
        self._ext_gates = resolve_gates(options.reward_gates, self.reward_func_names)
        self._ext_make_penalties(options)
        if options.entropy_coef_final:
            self.ext_enable_entropy_bonus()

    def _ext_make_penalties(self, options: RolloutOptions) -> None:
        if options.kl_estimator is not None:
            self._ext_kl = PenaltyCoefficient(
                KLController(
                    self.args.beta,
                    options.kl_target or 0.0,
                    options.kl_horizon,
                    options.beta_min,
                    options.beta_max,
                    options.kl_controller,  # type: ignore[arg-type]
                )
            )
        if options.policy_kl_coef > 0 or options.kl_early_stop is not None:
            self._ext_policy_kl = PenaltyCoefficient(
                KLController(
                    options.policy_kl_coef,
                    options.policy_kl_target or 0.0,
                    options.policy_kl_horizon,
                    options.policy_kl_coef_min,
                    options.policy_kl_coef_max,
                    options.policy_kl_controller,  # type: ignore[arg-type]
                )
            )

    # ---- rewards -----------------------------------------------------------------------------------------------

    @override
    def ext_before_generation(self) -> None:
        if self.ext_mode == "train":
            self._ext_stopped = False

    @override
    def ext_shape_rewards(self, rewards: torch.Tensor, completion_ids: list[list[int]]) -> torch.Tensor:
        check_finite(rewards, self.reward_func_names)
        generations = self.ext_num_generations
        if self._ext_diversity is not None:
            rewards = self._ext_diversity.fill(rewards, completion_ids, self.accelerator, generations)
        if self._ext_gates:
            self._ext_log_before_gates(rewards)
            weights = self.reward_weights.to(rewards.device)
            rewards, pass_rates = apply_gates(rewards, self._ext_gates, generations, weights)
            for name, rate in pass_rates:
                self.ext_log(f"gates/{name}/pass_rate", rate)
        if self._ext_diversity is not None:
            rewards = self._ext_diversity.withhold(rewards, self.reward_weights.to(rewards.device))
        return rewards

    def _ext_log_before_gates(self, rewards: torch.Tensor) -> None:
        """TRL's `rewards/<name>/mean` is what is trained on; this is what the function really returned."""
        for column in sorted({column for gate in self._ext_gates for column in gate.gated}):
            name = self.reward_func_names[column]
            self.ext_log(f"gates/{name}/mean_before", rewards[:, column].nanmean().item())

    def _ext_aggregate(self, rewards: torch.Tensor, rule: str) -> Aggregated:
        """Combine the gathered rewards and log the health numbers of the rule."""
        aggregated = aggregate(rewards, self.ext_num_generations, self.reward_weights.to(rewards.device), rule)
        if aggregated.terms is not None and rule == "gdpo":
            for name, value in gdpo_metrics(aggregated.terms, self.reward_func_names).items():
                self.ext_log(name, value)
        return aggregated

    def _ext_local(self, values: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
        """This rank's rows of a gathered (N,) tensor."""
        rows = output["completion_ids"].shape[0]
        start = self.accelerator.process_index * rows
        return values[start : start + rows]

    def _ext_mark_zero_signal(self, aggregated: Aggregated, output: dict[str, Any]) -> torch.Tensor:
        """(N,) True for rows of groups with signal; the local part rides along with the batch."""
        signal = ~aggregated.zero_signal.repeat_interleave(self.ext_num_generations)
        output["ext_group_signal"] = self._ext_local(signal, output).float()
        self.ext_log("groups/zero_signal_skipped", float(aggregated.zero_signal.sum().item()))
        return signal

    # ---- KL ----------------------------------------------------------------------------------------------------

    def _ext_old_logps(self, forward: PolicyForward) -> torch.Tensor:
        """(B, T) log-probabilities of the policy that sampled; the current ones while it has not moved."""
        raise NotImplementedError

    def _ext_ratio(self, forward: PolicyForward) -> torch.Tensor:
        """(B, T) pi / pi_old per token, differentiable; 1 under the mask, where it must not overflow."""
        log_ratio = forward.logps - self._ext_old_logps(forward)
        return torch.where(forward.mask.bool(), log_ratio, torch.zeros_like(log_ratio)).exp()

    def _ext_group_weights(self, forward: PolicyForward, per_token: torch.Tensor) -> torch.Tensor:
        """`per_token` without the rows of groups that `skip_zero_signal_groups` leaves out."""
        signal = forward.inputs.get("ext_group_signal")
        if signal is None:
            return per_token
        return torch.where(signal.bool().unsqueeze(1), per_token, torch.zeros_like(per_token))

    def _ext_measure_policy_kl(self, forward: PolicyForward) -> torch.Tensor | None:
        if self._ext_policy_kl is None:
            return None
        return policy_kl(forward.logps, self._ext_old_logps(forward), forward.mask)

    def _ext_account(self, forward: PolicyForward, per_token_policy_kl: torch.Tensor | None) -> None:
        """Log both KLs of this micro-batch and, at the end of the window, move coefficients and decide the stop.

        One reduction over ranks serves all, so every rank moves and stops alike.
        """
        zero = torch.zeros((), device=forward.mask.device)
        sums = [
            forward.mask.sum().float(),
            torch.tensor(float(forward.mask.shape[0]), device=forward.mask.device),
            zero if forward.kl is None else masked_sum(forward.kl, forward.mask),
            zero if per_token_policy_kl is None else masked_sum(per_token_policy_kl, forward.mask),
        ]
        reduced: Any = self.accelerator.reduce(torch.stack(sums), reduction="sum")
        tokens, sequences, kl_sum, policy_kl_sum = reduced.tolist()
        limit = self._ext_options.kl_early_stop
        parts = (
            ("kl", self._ext_kl if forward.kl is not None else None, kl_sum),
            ("policy_kl", self._ext_policy_kl, policy_kl_sum),
        )
        for name, penalty, total in parts:
            if penalty is None:
                continue
            mean = total / max(tokens, 1.0)
            # With an early stop an infinite policy KL is a reason to stop, not to fail.
            if name == "kl" or limit is None or math.isnan(mean):
                self.ext_check_kl(name, mean)
            self.ext_log(name, mean)
            if self.ext_mode == "train":
                penalty.window.add(total, tokens, sequences)
        if self.ext_mode == "train" and self.accelerator.sync_gradients:
            self._ext_end_of_step(kl_was_measured=forward.kl is not None)

    def ext_check_kl(self, name: str, mean: float) -> None:
        """Stop before a KL that overflowed becomes a NaN gradient.

        Raises:
            FloatingPointError: with the ways out.
        """
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"The {name} of this batch is {mean}: the policy is so far from the other one that the estimator "
                f"overflowed. {OVERFLOW_FIX[name]}"
            )

    def _ext_end_of_step(self, kl_was_measured: bool) -> None:
        limit = self._ext_options.kl_early_stop
        if self._ext_stopped:
            # Nothing has moved since the stop: the same KL again must not move the coefficients again.
            self.ext_log("kl_early_stop/skipped", 1.0)
            for penalty in (self._ext_kl, self._ext_policy_kl):
                if penalty is not None:
                    penalty.window.reset()
            return
        if limit is not None and self._ext_policy_kl is not None:
            self._ext_stopped = self._ext_policy_kl.window.mean > limit
            self.ext_log("kl_early_stop/skipped", float(self._ext_stopped))
        if self._ext_policy_kl is not None:
            if self._ext_options.policy_kl_coef > 0:
                self.ext_log("policy_kl_coef", self._ext_policy_kl.value)
            self._ext_policy_kl.end_of_step()
        if kl_was_measured:
            self._ext_move_beta()

    def _ext_move_beta(self) -> None:
        """End the KL window: log the coefficient that was trained with, then move it for the next step."""
        if self._ext_kl is None:
            return
        self.ext_log("kl_coef", self._ext_kl.value)
        self._ext_kl.end_of_step()
        self.beta = self._ext_kl.value

    # ---- early stop --------------------------------------------------------------------------------------------

    @override
    def ext_update_is_skipped(self) -> bool:
        # DeepSpeed and FSDP expect a backward through their own hooks, a gradient scaler one that it can check; there
        # only the update is withheld.
        needs_backward = self.is_deepspeed_enabled or self.is_fsdp_enabled or self.accelerator.scaler is not None
        return self._ext_stopped and self.ext_mode == "train" and not needs_backward

    @override
    def ext_on_skipped_update(self) -> None:
        if self.accelerator.sync_gradients:
            self.ext_log("kl_early_stop/skipped", 1.0)

    @override
    def ext_after_create_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._ext_options.kl_early_stop is None:
            return
        # A second train() meets the optimiser of the first, wrapped by accelerate and perhaps by DeepSpeed.
        while (inner := getattr(optimizer, "optimizer", None)) is not None:
            optimizer = inner
        if optimizer is self._ext_hooked:
            return
        self._ext_hooked = optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"kl_early_stop={self._ext_options.kl_early_stop} must withhold updates, and the optimiser is made by "
                "DeepSpeed from its own config. Remove `optimizer` there; the training arguments then make it."
            )
        optimizer.register_step_pre_hook(self._ext_withhold_update)
        optimizer.register_step_post_hook(self._ext_give_back)

    def _ext_withhold_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hide the gradients of a stopped step: optimisers skip parameters without one, weight decay included."""
        if self._ext_stopped:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._ext_withheld = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _ext_give_back(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """DeepSpeed's offload keeps its gradient buffers over the steps and must find them again."""
        for parameter, gradient in self._ext_withheld:
            parameter.grad = gradient
        self._ext_withheld = []

    # ---- entropy -----------------------------------------------------------------------------------------------

    @override
    def ext_before_loss(self) -> None:
        final = self._ext_options.entropy_coef_final
        if final is not None:
            # The last step has global_step = max_steps - 1 and gets exactly the final value.
            progress = self.state.global_step / max(self.state.max_steps - 1, 1)
            self.entropy_coef = scheduled_coefficient(
                self.args.entropy_coef,
                final,
                progress,
                self._ext_options.entropy_coef_schedule,  # type: ignore[arg-type]
            )

    # ---- checkpoint --------------------------------------------------------------------------------------------

    def _ext_stateful(self) -> dict[str, PenaltyCoefficient]:
        parts = {"kl_controller": self._ext_kl, "policy_kl_controller": self._ext_policy_kl}
        return {name: part for name, part in parts.items() if part is not None and part.adaptive}

    @override
    def ext_save_state(self, run_dir: str) -> None:
        stateful = self._ext_stateful()
        if stateful and self.args.should_save:
            folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            save_state(folder, {name: part.controller.state_dict() for name, part in stateful.items()})

    @override
    def ext_load_state(self, checkpoint: str) -> None:
        stateful = self._ext_stateful()
        if not stateful:
            return
        state = load_state(checkpoint) or {}
        for name, part in stateful.items():
            if name in state:
                part.controller.load_state_dict(state[name])
            else:
                logger.warning(
                    f"{checkpoint} holds no state of {name}; it starts from the config's value {part.value}."
                )
        if self._ext_kl is not None:
            self.beta = self._ext_kl.value


def _optimizer_is_offloaded(accelerator: Any) -> bool:
    """Whether DeepSpeed keeps the optimiser in CPU memory or on disk."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    zero = {} if plugin is None else plugin.deepspeed_config.get("zero_optimization", {})
    return (zero.get("offload_optimizer") or {}).get("device", "none") not in (None, "none")

"""Interception of TRL's rollout trainers, GRPO and RLOO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import get_callable_name, get_config_model_id
from typing_extensions import override

from trl_ext.seams.metrics import MetricSeams
from trl_ext.temporarily import temporarily

if TYPE_CHECKING:
    # GRPO or RLOO; no common type has the private attributes of both.
    _TRLRolloutTrainer = Any
else:
    _TRLRolloutTrainer = object


def reward_names(reward_funcs: Any) -> list[str]:
    """The names under which TRL will log these reward functions, known before any model is loaded."""
    names = []
    for func in _as_list(reward_funcs):
        if isinstance(func, str):
            names.append(func.split("/")[-1])
        elif isinstance(func, torch.nn.Module):
            names.append(get_config_model_id(func.config).split("/")[-1])  # type: ignore[arg-type]
        else:
            names.append(get_callable_name(func))
    return names


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


@dataclass
class PolicyForward:
    """What one policy forward inside the loss produced.

    Attributes:
        inputs: the batch that TRL's loss reads; hooks may replace entries, `advantages` above all.
        mask: (B, T), 1 = token of the policy (neither padding nor tool output).
        logps, entropies: (B, T), differentiable.
        kl: (B, T), the KL that a hook already put into the advantages, for the metrics.
    """

    inputs: dict[str, Any]
    mask: torch.Tensor
    logps: torch.Tensor = field(init=False)
    entropies: torch.Tensor = field(init=False)
    kl: torch.Tensor | None = None


@dataclass
class ScoringRecord:
    """What was intercepted while TRL generated and scored a batch.

    Attributes:
        logps: log-probabilities in the order of TRL's calls: old policy (if any), then reference (if any).
        rewards: (N, F), the gathered matrix after our shaping, NaN = not applicable.
    """

    logps: list[torch.Tensor] = field(default_factory=list)
    rewards: torch.Tensor | None = None


class RolloutSeams(MetricSeams, _TRLRolloutTrainer):
    """Interception of TRL's rollout trainers; hooks are the methods that start with `ext_`."""

    reward_funcs: list[Any]
    reward_processing_classes: list[Any]
    reward_func_names: list[str]
    reward_weights: torch.Tensor
    _ext_forward: PolicyForward | None = None
    _ext_record: ScoringRecord | None = None

    # ---- hooks -------------------------------------------------------------------------------------------------

    def ext_scoring_active(self) -> bool:
        """Whether rewards or advantages differ from TRL's, so that scoring must be intercepted."""
        return False

    def ext_scoring_overrides(self) -> dict[str, Any]:
        """Attributes that TRL must see while it scores."""
        return {}

    def ext_shape_rewards(self, rewards: torch.Tensor, completion_ids: list[list[int]]) -> torch.Tensor:
        """Change the gathered (N, F) reward matrix before any normalisation."""
        return rewards

    def ext_before_generation(self) -> None:
        """Called before each generation, active or not."""

    def ext_after_scoring(self, output: dict[str, Any], record: ScoringRecord) -> None:
        """Replace `advantages` in the scored batch and add our own keys."""

    def ext_before_loss(self) -> None:
        """Called before each loss computation, active or not."""

    def ext_loss_active(self) -> bool:
        """Whether the loss differs from TRL's."""
        return False

    def ext_loss_overrides(self) -> dict[str, Any]:
        """Attributes that TRL must see while it computes the loss."""
        return {}

    def ext_update_is_skipped(self) -> bool:
        """Whether this micro-batch contributes nothing, so that even its forward can be saved."""
        return False

    def ext_on_skipped_update(self) -> None:
        """Called instead of the loss of a skipped micro-batch."""

    def ext_after_policy_forward(self, forward: PolicyForward) -> None:
        """Called between TRL's policy forward and its use of `advantages`."""

    def ext_loss_terms(self, forward: PolicyForward) -> torch.Tensor | None:
        """Terms added to TRL's loss, scaled like it."""
        return None

    def ext_load_state(self, checkpoint: str) -> None:
        """Restore the state from a checkpoint folder."""

    # ---- access to TRL's private attributes --------------------------------------------------------------------

    @property
    def ext_num_generations(self) -> int:
        """Group size of the current mode."""
        return self.num_generations if self.ext_mode == "train" else self.num_generations_eval

    def ext_replace_last_metric(self, name: str, value: float) -> None:
        """Overwrite the value that TRL just logged under its own definition."""
        values = self._metrics[self.ext_mode][name]
        if values:
            values[-1] = value
        else:
            values.append(value)

    def ext_drop_last_metric(self, name: str) -> None:
        """Withdraw the value that TRL just logged."""
        values = self._metrics[self.ext_mode][name]
        if values:
            values.pop()
        if not values:
            del self._metrics[self.ext_mode][name]

    def ext_add_to_last_metric(self, name: str, value: float) -> None:
        """Add to the value that TRL just logged, when it did."""
        values = self._metrics[self.ext_mode].get(name)
        if values:
            values[-1] += value

    def ext_replace_logged_advantages(self, advantages: torch.Tensor) -> None:
        """Put the advantages that are trained on into TRL's completions table."""
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), advantages.numel())):
            logged.pop()
        logged.extend(advantages.tolist())

    def ext_enable_entropy_bonus(self) -> None:
        """TRL decides at construction from a non-zero start value; a schedule may start at 0."""
        self._entropy_bonus_enabled = True

    def ext_add_reward_column(self, name: str, weight: float) -> int:
        """Register a reward column that `ext_shape_rewards` fills; returns its index."""

        def not_scored_here(completions: Sequence[Any], **_: Any) -> list[None]:
            return [None] * len(completions)

        not_scored_here.__name__ = name
        # New lists: TRL keeps the caller's own list of reward functions.
        self.reward_funcs = [*self.reward_funcs, not_scored_here]
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        self.reward_func_names = [*self.reward_func_names, name]
        weights: torch.Tensor = self.reward_weights
        self.reward_weights = torch.cat([weights, torch.tensor([weight], dtype=torch.float32)])
        return len(self.reward_funcs) - 1

    # ---- overrides ---------------------------------------------------------------------------------------------

    @override
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._ext_forward is not None:
            self._ext_forward.logps, self._ext_forward.entropies = result[0], result[1]
            self.ext_after_policy_forward(self._ext_forward)
        elif self._ext_record is not None:
            self._ext_record.logps.append(result[0])
        return result

    @override
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._ext_record is None:
            return rewards
        self._ext_record.rewards = self.ext_shape_rewards(rewards, completion_ids_list)
        return self._ext_record.rewards

    @override
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.ext_before_generation()
        if not self.ext_scoring_active():
            return super()._generate_and_score_completions(inputs)
        record = ScoringRecord()
        with temporarily(self, _ext_record=record, **self.ext_scoring_overrides()):
            output = super()._generate_and_score_completions(inputs)
        self.ext_after_scoring(output, record)
        return output

    @override
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.ext_before_loss()
        if not self.ext_loss_active():
            return super()._compute_loss(model, inputs)
        if self.ext_update_is_skipped():
            self.ext_on_skipped_update()
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        # A copy: hooks replace `advantages`, and TRL reuses the buffered batch in the next iteration.
        forward = PolicyForward(inputs=dict(inputs), mask=mask)
        with temporarily(self, _ext_forward=forward, **self.ext_loss_overrides()):
            loss = super()._compute_loss(model, forward.inputs)
        terms = self.ext_loss_terms(forward)
        return loss if terms is None else loss + terms

    @override
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        self.ext_after_create_optimizer(optimizer)
        return optimizer

    def ext_after_create_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called with the optimiser before it is wrapped by accelerate or DeepSpeed."""

    @override
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.ext_save_state(self._get_output_dir(trial=trial))

    def ext_save_state(self, run_dir: str) -> None:
        """Write our state into the checkpoint folder that TRL has just completed."""

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.ext_load_state(checkpoint)

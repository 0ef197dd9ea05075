"""`DPOTrainer`: TRL's, plus what keeps the chosen answers likely."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any

import datasets
import torch
import trl
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from trl_ext.formulas.entropy import mean_sequence_entropy
from trl_ext.formulas.preference import cal_dpo_loss, dpo_shift_loss, dpop_loss
from trl_ext.models.quantized import prepare_quantized
from trl_ext.seams.preference import PairForward, PreferenceSeams, trl_loss_types
from trl_ext.trainers.chosen_guard import ChosenGuard
from trl_ext.trainers.chosen_projection import ChosenProjection, deepspeed_gradients, write_deepspeed_gradient
from trl_ext.trainers.dpo_config import OWN_LOSSES, PreferenceOptions
from trl_ext.trainers.preference_metrics import PairMetrics, ReferenceDrift, pair_metrics
from trl_ext.trainers.preference_rows import ROW, RowCheck
from trl_ext.trainers.preflight import check_peft_trainable, check_trainable
from trl_ext.trainers.reference_init import train_reference
from trl_ext.trainers.state import load_state, save_state

logger = get_logger(__name__)
TEXT_KEYS = {
    "input_ids", "attention_mask", "completion_mask", "token_type_ids", "ref_chosen_logps", "ref_rejected_logps"
}  # fmt: skip


class DPOTrainer(PreferenceSeams, trl.DPOTrainer):
    """Drop-in for [`trl.DPOTrainer`]; the options are in [`DPOConfig`]. A plain `trl.DPOConfig` trains as TRL does.

    Raises:
        ValueError: when it is built, naming what cannot work and the fix: bad rows, an unknown loss type, a model
            without a trainable parameter.
        FloatingPointError: while it trains, instead of a NaN that trains on.
    """

    _ext_options: PreferenceOptions | None = None
    _ext_guard: ChosenGuard | None = None
    _ext_projection: ChosenProjection | None = None
    _ext_lambda_factor: float = 1.0
    _ext_evaluating: bool = False
    _ext_measured_at: int = -1
    _ext_unapproved: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        config = given.arguments.get("args")
        options = config if isinstance(config, PreferenceOptions) else None
        self._ext_checked: list[Any] = []
        self._ext_drift = ReferenceDrift()
        if isinstance(given.arguments.get("model"), torch.nn.Module):
            check_peft_trainable(given.arguments["model"], given.arguments.get("peft_config"))
        prepare_quantized(given.arguments)
        if options is not None:
            _check_loss_types(config)
            for name in ("train_dataset", "eval_dataset"):
                if given.arguments.get(name) is not None:
                    given.arguments[name] = self._ext_check_rows(given.arguments[name], config, name)
            if options.ref_init == "sft_on_chosen":
                train_reference(given.arguments, config)
        self._ext_options = options
        super().__init__(*given.args, **given.kwargs)
        check_trainable(self.model)
        if options is None:
            return
        if options.project_chosen_gradient:
            if self.is_fsdp_enabled:
                raise ValueError(
                    "project_chosen_gradient=True is not supported with FSDP, which shards gradients. Set it to False; "
                    "loss_type ['dpop'] works everywhere."
                )
            self._ext_projection = ChosenProjection(self.model)
        if options.chosen_guard != "off":
            decay = options.chosen_guard_decay
            if decay is None:
                decay = 0.5 if self._ext_guard_on_evaluation else 0.9
            self._ext_guard = ChosenGuard(options.chosen_guard_floor, options.chosen_guard_patience, decay)

    # ---- data --------------------------------------------------------------------------------------------------

    def _ext_check_rows(self, dataset: Any, config: Any, name: str) -> Any:
        """`dataset` (or a dict of them) without its bad rows, before a model is loaded."""
        if isinstance(dataset, Mapping):
            checked = {key: self._ext_check_rows(part, config, f"{name}[{key!r}]") for key, part in dataset.items()}
            return type(dataset)(checked) if isinstance(dataset, dict) else checked
        if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
            return dataset  # TRL says what it accepts
        checked_rows = RowCheck(config.bad_rows, name, config.max_length, config.truncation_mode).raw(dataset)
        self._ext_checked.append(checked_rows)
        return checked_rows

    @override
    def ext_prepare_rows(self, dataset: Any, dataset_name: str, args: Any, prepare: Any) -> Any:
        if self._ext_options is None:
            return prepare(dataset)
        check = RowCheck(
            self._ext_options.bad_rows, f"the {dataset_name} dataset", args.max_length, args.truncation_mode
        )
        if not any(dataset is checked for checked in self._ext_checked):
            dataset = check.raw(dataset)  # given to evaluate()
        if isinstance(dataset, datasets.IterableDataset):
            without_limit = copy.copy(args)  # TRL would drop rows without a word
            without_limit.max_length = None
            return check.streamed_tokens(prepare(dataset, without_limit))
        if isinstance(dataset, datasets.Dataset) and ROW not in dataset.column_names:
            dataset = dataset.add_column(ROW, list(range(len(dataset))))
        return check.tokenised(dataset, prepare(dataset))

    # ---- loss --------------------------------------------------------------------------------------------------

    @override
    def ext_loss_active(self) -> bool:
        return self._ext_options is not None

    @override
    def ext_forward_in_halves(self, inputs: dict[str, Any]) -> bool:
        # Halves the price of the second gradient; rows of images and the like do not split with the others.
        return self._ext_projection is not None and self.ext_mode == "train" and inputs.keys() <= TEXT_KEYS

    @override
    def ext_is_own_loss(self, loss_type: str) -> bool:
        return loss_type in OWN_LOSSES

    @property
    def ext_dpop_lambda(self) -> float:
        """The size of DPOP's penalty in use: warmed up, and raised by the guard."""
        options = self._ext_options or PreferenceOptions()
        warm = options.dpop_lambda_warmup_steps
        share = min(1.0, self.state.global_step / warm) if warm else 1.0
        return options.dpop_lambda * share * self._ext_lambda_factor

    @property
    def ext_dpo_shift_lambda(self) -> float:
        """The weight of the rejected log-ratio in use."""
        options = self._ext_options or PreferenceOptions()
        if options.dpo_shift_lambda_final is None:
            return options.dpo_shift_lambda
        # The last step has global_step = max_steps - 1 and gets exactly the final value.
        progress = min(1.0, self.state.global_step / max(self.state.max_steps - 1, 1))
        return options.dpo_shift_lambda + progress * (options.dpo_shift_lambda_final - options.dpo_shift_lambda)

    @override
    def ext_loss_terms(self, forward: PairForward) -> torch.Tensor | None:
        terms: torch.Tensor | None = None
        for name, weight in zip(self.loss_types, self.loss_weights, strict=True):
            if self.ext_is_own_loss(name):
                term = weight * self._ext_own_loss(name, forward).mean()
                terms = term if terms is None else terms + term
        coefficient = self._ext_options.entropy_coef if self._ext_options is not None else 0.0
        if coefficient and forward.entropies is not None:
            chosen_entropy = mean_sequence_entropy(forward.entropies.chunk(2)[0], forward.mask.chunk(2)[0])
            self.ext_log("entropy_chosen", self.accelerator.gather(chosen_entropy.detach()).mean().item())
            bonus = -coefficient * chosen_entropy
            terms = bonus if terms is None else terms + bonus
        return terms

    def _ext_own_loss(self, name: str, forward: PairForward) -> torch.Tensor:
        if name == "dpop":
            return dpop_loss(*forward.pair_logps(), self.beta, self.ext_dpop_lambda)
        if name == "cal_dpo":
            return cal_dpo_loss(*forward.pair_logps(), self.beta)
        return dpo_shift_loss(*forward.pair_logps(), self.beta, self.ext_dpo_shift_lambda)

    @override
    def ext_after_loss(self, forward: PairForward) -> None:
        if self._ext_projection is not None and self.ext_mode == "train":
            # The whole answer, whatever ld_alpha the loss uses.
            # DeepSpeed counts the outputs of its engine that a backward pass reaches; there it must reach both halves.
            logps = forward.chosen_per_token_logps
            if self.is_deepspeed_enabled:
                logps = forward.per_token_logps.chunk(2)[0]
            chosen = torch.where(forward.mask.chunk(2)[0].bool(), logps, 0.0)
            self._ext_projection.add(chosen.sum(-1))
        # In training `gather_for_metrics` would cut batches of a window that reaches the end of the data.
        gather = self.accelerator.gather if self.ext_mode == "train" else self.accelerator.gather_for_metrics
        metrics = pair_metrics(forward, gather)
        if self.ext_mode == "train":
            metrics.check_finite()
        for key, value in metrics.logged("dpop" in self.loss_types).items():
            self.ext_log(key, value)
        if "dpop" in self.loss_types:
            self.ext_log("dpop/lambda", self.ext_dpop_lambda)
        if self._ext_guard is not None and (self.ext_mode == "train") != self._ext_evaluating:
            self._ext_guard_sees(metrics)

    # ---- gradient ----------------------------------------------------------------------------------------------

    @override
    def ext_gradients_watched(self) -> bool:
        return self._ext_projection is not None

    @override
    def ext_on_gradients(self) -> None:
        projection = self._ext_projection
        if projection is None:
            return

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            reduced: Any = self.accelerator.reduce(tensor, reduction="sum")
            return reduced

        if self.is_deepspeed_enabled:
            metrics = projection.apply(
                lambda: deepspeed_gradients(projection.parameters), write_deepspeed_gradient, reduce
            )
        else:
            metrics = projection.apply(lambda: [p.grad for p in projection.parameters], None, reduce)
        for name, value in metrics.items():
            self.ext_log(name, value)

    # ---- guard -------------------------------------------------------------------------------------------------

    def _ext_guard_sees(self, metrics: PairMetrics) -> None:
        """Collect a batch, of the evaluation set when there is one, else of training."""
        if (self.ext_mode == "train") != self._ext_guard_on_evaluation:
            self._ext_drift.add(metrics)

    @property
    def _ext_guard_on_evaluation(self) -> bool:
        """Whether the guard measures on the evaluation set; one that is never evaluated during training is none."""
        return self.eval_dataset is not None and self.args.eval_strategy != "no"

    @override
    def ext_on_micro_batch(self) -> None:
        if self._ext_guard is not None and not self._ext_guard_on_evaluation and self.accelerator.sync_gradients:
            self._ext_guard_measures()

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # TRL and transformers call this method again for each of several evaluation sets; they count as one.
        outermost = not self._ext_evaluating
        self._ext_evaluating = True
        try:
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        finally:
            if outermost:
                self._ext_evaluating = False
        if outermost and self._ext_guard is not None and self._ext_guard_on_evaluation:
            if self.is_in_train:
                self._ext_guard_measures()
            self._ext_drift.reset()
        return metrics

    def _ext_guard_measures(self) -> None:
        guard, options = self._ext_guard, self._ext_options
        if guard is None or options is None or not self._ext_drift.tokens:
            return
        value = self._ext_drift.per_token
        self._ext_drift.reset()
        acts = guard.update(value)
        self._ext_measured_at = self.state.global_step
        if self._ext_unapproved is not None and guard.content:
            self._ext_approve(self._ext_unapproved)
        self._ext_unapproved = None
        # The average belongs to training, whichever set it was measured on: it is logged with the next step.
        self.ext_log_train("chosen_guard/ema", guard.average or 0.0)
        if acts:
            self._ext_guard_acts(guard, options)

    def _ext_guard_acts(self, guard: ChosenGuard, options: PreferenceOptions) -> None:
        says = (
            f"chosen_guard: at step {self.state.global_step} the chosen answers are {-(guard.average or 0.0):.3g} nats "
            f"per token less likely than under the reference (floor {guard.floor:g}, {guard.patience} measurements)."
        )
        if options.chosen_guard == "raise_lambda":
            limit = options.chosen_guard_lambda_max / options.dpop_lambda
            self._ext_lambda_factor = min(2 * self._ext_lambda_factor, limit)
            says += f" dpop_lambda is now {options.dpop_lambda * self._ext_lambda_factor:g}."
        elif options.chosen_guard == "stop":
            self.control.should_training_stop = True
            best = self.state.best_model_checkpoint
            says += f" The run ends; the checkpoint to use is {best}." if best else " The run ends; no checkpoint was"
            says += "" if best else " written before the fall."
        else:
            says += " Use loss_type ['dpop'], a lower learning_rate or a larger beta."
        logger.warning(says)

    # ---- checkpoint --------------------------------------------------------------------------------------------

    @override
    def ext_before_save(self) -> None:
        guard, options = self._ext_guard, self._ext_options
        if guard is None or options is None or options.chosen_guard != "stop":
            return
        if self.args.metric_for_best_model is not None:
            return
        step = self.state.global_step
        if not self._ext_guard_on_evaluation:
            self._ext_unapproved = step  # the next batch is the first that is measured with these weights
        elif guard.content and self._ext_measured_at == step:
            self._ext_approve(step)

    def _ext_approve(self, step: int) -> None:
        """The Trainer protects this checkpoint from `save_total_limit`, and records its path."""
        self.state.best_global_step = step
        self.state.best_model_checkpoint = os.path.join(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")

    @override
    def ext_save_state(self, run_dir: str) -> None:
        if self._ext_guard is not None and self.args.should_save:
            folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            save_state(
                folder, {"chosen_guard": self._ext_guard.state_dict(), "dpop_lambda_factor": self._ext_lambda_factor}
            )

    @override
    def ext_load_state(self, checkpoint: str) -> None:
        if self._ext_guard is None:
            return
        state = load_state(checkpoint) or {}
        if "chosen_guard" in state:
            self._ext_guard.load_state_dict(state["chosen_guard"])
            self._ext_lambda_factor = state["dpop_lambda_factor"]
        else:
            logger.warning(f"{checkpoint} holds no state of chosen_guard; it starts over.")


def _check_loss_types(config: Any) -> None:
    """TRL finds an unknown loss type in the first training step only."""
    known = trl_loss_types()
    unknown = [name for name in config.loss_type if name not in OWN_LOSSES and known and name not in known]
    if unknown:
        raise ValueError(f"loss_type {unknown} is unknown. Use some of {[*OWN_LOSSES, *known]}.")

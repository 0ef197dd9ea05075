"""Interception of TRL's DPO trainer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

# Not `trl.DPOTrainer`: the command line puts our class in that place.
from trl.trainer.dpo_trainer import DPOTrainer as TRL_DPOTrainer
from typing_extensions import override

from trl_ext.formulas.preference import sequence_logps
from trl_ext.seams.metrics import MetricSeams
from trl_ext.temporarily import temporarily

if TYPE_CHECKING:
    _TRLDPOTrainer = Any
else:
    _TRLDPOTrainer = object


@dataclass
class PairForward:
    """What the one policy and the one reference forward of a batch of pairs produced.

    Rows of a (2B, T) tensor: the B chosen answers, then the B rejected ones in the same order.

    Attributes:
        inputs: the batch that TRL's loss reads.
        mask: (2B, T), 1 = token of an answer, aligned with the log-probabilities.
        per_token_logps, entropies: (2B, T), differentiable; entropies are None unless the model returned them.
        chosen_per_token_logps: (B, T), the first half; of a graph of its own where the forward was made in halves.
        logps: (2B,), per answer, as TRL sums them (`ld_alpha` included), differentiable.
        ref_logps: (2B,), the same under the reference.
    """

    inputs: dict[str, Any]
    mask: torch.Tensor
    per_token_logps: torch.Tensor = field(init=False)
    chosen_per_token_logps: torch.Tensor = field(init=False)
    entropies: torch.Tensor | None = field(init=False, default=None)
    logps: torch.Tensor = field(init=False)
    ref_logps: torch.Tensor = field(init=False)

    def pair_logps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B,) each: chosen, rejected, reference chosen, reference rejected."""
        return (*self.logps.chunk(2), *self.ref_logps.chunk(2))  # type: ignore[return-value]


class RecordingModel:
    """Stands in for the model in TRL's loss: passes every call on and shows the outputs of the first one.

    Attributes that it does not have are the model's.
    """

    def __init__(self, model: Any, on_output: Callable[[Any], None]) -> None:
        self._model = model
        self._on_output: Callable[[Any], None] | None = on_output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        if self._on_output is not None:
            on_output, self._on_output = self._on_output, None
            on_output(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class HalvesModel:
    """Stands in for the model in TRL's loss: one forward of the chosen and one of the rejected rows, the same work.

    The graphs are separate, so a gradient of the chosen answers alone does not run through the rejected ones.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **kwargs: Any) -> Any:
        rows = len(kwargs["input_ids"])
        split = {k: v.chunk(2) for k, v in kwargs.items() if isinstance(v, torch.Tensor) and len(v) == rows}
        halves = [self._model(**(kwargs | {key: value[half] for key, value in split.items()})) for half in (0, 1)]
        fields = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
        joined = {name: _joined([getattr(half, name, None) for half in halves]) for name in fields}
        # Not a slice of the joined tensor, whose backward pass would send zeros through the rejected half.
        return SimpleNamespace(aux_loss=None, chosen_log_probs=halves[0].log_probs, **joined)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _joined(parts: list[Any]) -> torch.Tensor | None:
    return None if parts[0] is None else torch.cat(parts)


def trl_loss_types() -> list[str]:
    """The loss types that TRL's DPO knows, read from its loss; empty when they cannot be told."""
    source = inspect.getsource(TRL_DPOTrainer._compute_loss)
    return re.findall(r'loss_type == "(\w+)"', source)


class PreferenceSeams(MetricSeams, _TRLDPOTrainer):
    """Interception of TRL's DPO trainer; hooks are the methods that start with `ext_`."""

    # ---- hooks -------------------------------------------------------------------------------------------------

    def ext_loss_active(self) -> bool:
        """Whether the loss is intercepted at all."""
        return False

    def ext_forward_in_halves(self, inputs: dict[str, Any]) -> bool:
        """Whether the policy's forward is made of two, see `HalvesModel`."""
        return False

    def ext_is_own_loss(self, loss_type: str) -> bool:
        """Whether `ext_loss_terms` computes this loss type, which TRL does not know."""
        return False

    def ext_loss_terms(self, forward: PairForward) -> torch.Tensor | None:
        """Terms added to TRL's loss, each a mean over pairs; the Trainer divides by gradient accumulation."""
        return None

    def ext_after_loss(self, forward: PairForward) -> None:
        """Called with the graph still alive, before the backward pass."""

    def ext_gradients_watched(self) -> bool:
        """Whether `ext_on_gradients` must be called."""
        return False

    def ext_on_gradients(self) -> None:
        """Called when the gradients of an optimiser step are complete and reduced, before clipping."""

    def ext_on_micro_batch(self) -> None:
        """Called after the backward pass of every micro-batch."""

    def ext_prepare_rows(self, dataset: Any, dataset_name: str, args: Any, prepare: Callable[..., Any]) -> Any:
        """`prepare(dataset)` is TRL's: extract the prompt, tokenise, drop what `max_length` leaves empty.

        It takes other `args` as a second argument.
        """
        return prepare(dataset)

    def ext_save_state(self, run_dir: str) -> None:
        """Write our state into the checkpoint folder that TRL has just completed."""

    def ext_before_save(self) -> None:
        """Called before a checkpoint is written."""

    def ext_load_state(self, checkpoint: str) -> None:
        """Restore the state from a checkpoint folder."""

    # ---- overrides ---------------------------------------------------------------------------------------------

    @override
    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        if not self.ext_loss_active():
            return super()._compute_loss(model, inputs, return_outputs)
        # A copy: the reference log-probabilities are added to it, where TRL expects the precomputed ones.
        forward = PairForward(inputs=dict(inputs), mask=inputs["completion_mask"][..., 1:])
        if self.ext_forward_in_halves(forward.inputs) and not self.aux_loss_enabled:
            model = HalvesModel(model)
        recording = RecordingModel(model, lambda output: self._ext_record(forward, output))
        weighted = zip(self.loss_types, self.loss_weights, strict=True)
        theirs = [(name, weight) for name, weight in weighted if not self.ext_is_own_loss(name)]
        with temporarily(
            self,
            loss_types=[name for name, _ in theirs],
            loss_weights=[weight for _, weight in theirs],
            precompute_ref_logps=True,
        ):
            result = super()._compute_loss(recording, forward.inputs, return_outputs)
        loss = result[0] if return_outputs else result
        terms = self.ext_loss_terms(forward)
        if terms is not None:
            loss = loss + terms
        self.ext_after_loss(forward)
        return (loss, result[1]) if return_outputs else loss

    def _ext_record(self, forward: PairForward, output: Any) -> None:
        """After TRL's policy forward, where TRL itself would call the reference: the same order of random numbers."""
        length = forward.mask.size(1)  # prompt-learning adapters prepend virtual tokens
        forward.per_token_logps = output.log_probs[:, -length:]
        chosen = getattr(output, "chosen_log_probs", None)
        forward.chosen_per_token_logps = forward.per_token_logps.chunk(2)[0] if chosen is None else chosen[:, -length:]
        forward.entropies = None if output.entropy is None else output.entropy[:, -length:]
        forward.logps = sequence_logps(forward.per_token_logps, forward.mask, self.ld_alpha)
        if "ref_chosen_logps" not in forward.inputs:
            reference = self.model if self.ref_model is None else self.ref_model
            chosen, rejected = self.compute_ref_log_probs(reference, forward.inputs)
            forward.inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        forward.ref_logps = torch.cat([forward.inputs["ref_chosen_logps"], forward.inputs["ref_rejected_logps"]])

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.ext_gradients_watched():
            loss = super().training_step(*args, **kwargs)
        elif self.is_deepspeed_enabled:
            # accelerate runs the engine's optimiser step inside its backward pass; between the two is this method.
            engine = self.accelerator.deepspeed_engine_wrapped.engine
            step = engine.step

            def step_after_hook(*step_args: Any, **step_kwargs: Any) -> Any:
                self.ext_on_gradients()
                return step(*step_args, **step_kwargs)

            with temporarily(engine, step=step_after_hook):
                loss = super().training_step(*args, **kwargs)
        else:
            loss = super().training_step(*args, **kwargs)
            if self.accelerator.sync_gradients:
                self.ext_on_gradients()
        self.ext_on_micro_batch()
        return loss

    @override
    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        def prepare(rows: Any, settings: Any = args) -> Any:
            return super(PreferenceSeams, self)._prepare_dataset(rows, processing_class, settings, dataset_name)

        return self.ext_prepare_rows(dataset, dataset_name, args, prepare)

    @override
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.ext_before_save()
        super()._save_checkpoint(model, trial)
        self.ext_save_state(self._get_output_dir(trial=trial))

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.ext_load_state(checkpoint)

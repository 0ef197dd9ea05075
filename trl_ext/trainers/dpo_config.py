"""`DPOConfig`: TRL's, plus options against falling chosen answers, and the checks that refuse bad combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import trl

OWN_LOSSES = ("dpop", "cal_dpo", "dpo_shift")
GUARDS = ("off", "warn", "raise_lambda", "stop")
REF_INITS = ("given", "sft_on_chosen")
BAD_ROWS = ("raise", "drop")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PreferenceOptions:
    r"""Options added to TRL's `DPOConfig`. Every default trains as TRL does, bit for bit.

    Log-probabilities are in nats, summed over the tokens of an answer unless "per token" is said. Always logged:
    `logps/chosen_vs_ref`, `logps/rejected_vs_ref` (mean over pairs), `logps/chosen_vs_ref_per_token`,
    `logps/chosen_less_likely` (fraction of pairs whose chosen answer is less likely than under the reference),
    `rewards/accuracies_per_token` (length-normalised; a tie counts half) and `rewards/ties_per_token` (fraction).

    Losses, in `loss_type` alone or mixed with TRL's by `loss_weights`:
        "dpop": DPO-Positive (Pal et al. 2024, arXiv 2402.13228, eq. 3): -log sigmoid(beta * [margin - dpop_lambda *
            max(0, ref_c - pi_c)]). Metrics `dpop/penalty_active` (fraction of pairs), `dpop/penalty_mean` (nats),
            `dpop/lambda`.
        "cal_dpo": Cal-DPO (Xiao et al. 2024, arXiv 2412.14516): the log-ratios are pulled to +-1/(2 beta).
        "dpo_shift": DPO-Shift (Yang et al. 2025, arXiv 2502.07599): the rejected log-ratio counts
            `dpo_shift_lambda` times.
        dpop_lambda (`float`): size of DPOP's penalty; 50 in the paper. dpop_lambda_warmup_steps (`int`): it grows
            linearly from 0 over so many optimiser steps.
        dpo_shift_lambda (`float`): in (0, 1]; 1 is DPO. dpo_shift_lambda_final (`float`, *optional*): its value at
            the end of the run, linear in between.
        entropy_coef (`float`): adds -entropy_coef * (mean over pairs of the mean per-token entropy of the chosen
            answer): a positive value keeps the policy from becoming certain. Metric `entropy_chosen`.

    Gradient:
        project_chosen_gradient (`bool`): before each update, the component of the gradient whose descent would lower
            the mean chosen log-probability of the batch is removed (Yu et al. 2020, arXiv 2001.06782, one-sided). One
            more backward pass, of the chosen half, and one float32 copy of the trainable parameters; refused with
            ZeRO-3, FSDP, fp16 and reentrant checkpointing. With Adam the step is not along the gradient, so the
            guarantee is SGD's only. With DeepSpeed's optimizer offload, clipping uses the norm before the projection.
            Metrics `projection/cosine` (of gradient and chosen gradient; > 0 is harmful), `projection/active`.

    Guard:
        chosen_guard (`str`): "off", "warn", "raise_lambda" (doubles `dpop_lambda`, up to
            `chosen_guard_lambda_max`) or "stop" (ends the run; the newest checkpoint whose weights the guard measured
            and found above the floor is kept by `save_total_limit` and recorded as `best_model_checkpoint`, unless
            `metric_for_best_model` chooses one; with an evaluation set that is one written at a step that evaluates).
            It watches an exponential moving average of `chosen_vs_ref` per token, on the evaluation set when one is
            evaluated (once per evaluation), else on the batches (once per optimiser step). Metric `chosen_guard/ema`.
        chosen_guard_floor (`float`): nats per token below the reference. chosen_guard_patience (`int`): consecutive
            measurements below it. chosen_guard_decay (`float`, *optional*): of the average; unset = 0.5 on an
            evaluation set, 0.9 on batches.

    Reference and data:
        ref_init (`str`): "given" (TRL's reference), or "sft_on_chosen": first train `model` by maximum likelihood on
            the chosen answers, then run DPO from it with it as the reference (Rafailov et al. 2023, section 4: what to
            do when no SFT model made the data). Kept in `output_dir`, reused when data, model and settings are the
            same. ref_init_epochs, ref_init_learning_rate: of that run.
        bad_rows (`str`): "raise" or "drop" pairs that cannot be trained on: an empty, None or white-space answer,
            chosen equal to rejected, a prompt so long that `max_length` leaves nothing of an answer.
    """

    dpop_lambda: float = _option(50.0, "Size of DPOP's penalty on a chosen answer below the reference.")
    dpop_lambda_warmup_steps: int = _option(0, "Optimiser steps over which dpop_lambda grows from 0.")
    dpo_shift_lambda: float = _option(0.95, "Weight of the rejected log-ratio in DPO-Shift, in (0, 1]; 1 = DPO.")
    dpo_shift_lambda_final: float | None = _option(None, "dpo_shift_lambda at the end of the run, linear in between.")
    entropy_coef: float = _option(0.0, "Coefficient of the entropy bonus on the chosen answers.")
    project_chosen_gradient: bool = _option(
        False, "Remove the part of each gradient whose descent would make the chosen answers less likely."
    )
    chosen_guard: str = _option("off", "What to do when chosen answers fall: off, warn, raise_lambda or stop.")
    chosen_guard_floor: float = _option(0.1, "Nats per token below the reference at which the guard acts.")
    chosen_guard_patience: int = _option(3, "Consecutive measurements below the floor before the guard acts.")
    chosen_guard_decay: float | None = _option(None, "Decay of the guard's moving average, in [0, 1).")
    chosen_guard_lambda_max: float = _option(500.0, "Largest dpop_lambda that chosen_guard='raise_lambda' sets.")
    ref_init: str = _option("given", "Reference: given, or sft_on_chosen (train it on the chosen answers first).")
    ref_init_epochs: float = _option(1.0, "Epochs of ref_init='sft_on_chosen'.")
    ref_init_learning_rate: float = _option(2e-5, "Learning rate of ref_init='sft_on_chosen'.")
    bad_rows: str = _option("raise", "Pairs that cannot be trained on: raise or drop.")

    def check_options(self) -> None:
        """Refuse bad values and combinations; called once TRL has resolved its own fields.

        Raises:
            ValueError: naming the field, the value and the fix.
        """
        _check_values(self)
        _check_losses(self)
        _check_projection(self)
        _check_guard(self)
        _check_reference(self)


@dataclass
class DPOConfig(PreferenceOptions, trl.DPOConfig):
    __doc__ = f"""Drop-in for [`trl.DPOConfig`]: every TRL field keeps its name, default and meaning.

    {PreferenceOptions.__doc__}
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options()


def _check_values(config: Any) -> None:
    choices = {"chosen_guard": GUARDS, "ref_init": REF_INITS, "bad_rows": BAD_ROWS}
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name}={getattr(config, name)!r} is unknown. Use one of {list(allowed)}.")
    ranges = {
        "dpop_lambda": (lambda value: value > 0, "positive; 50 in the paper. For plain DPO use loss_type='sigmoid'"),
        "dpop_lambda_warmup_steps": (lambda value: value >= 0, "at least 0"),
        "dpo_shift_lambda": (lambda value: 0 < value <= 1, "in (0, 1]; 0.95 is a mild shift, 1 is plain DPO"),
        "dpo_shift_lambda_final": (lambda value: 0 < value <= 1, "in (0, 1]"),
        "entropy_coef": (lambda value: True, "finite"),
        "ld_alpha": (lambda value: 0 <= value <= 1, "in [0, 1]"),
        "chosen_guard_floor": (lambda value: value >= 0, "at least 0: nats per token *below* the reference"),
        "chosen_guard_patience": (lambda value: value >= 1, "at least 1"),
        "chosen_guard_decay": (lambda value: 0 <= value < 1, "in [0, 1)"),
        "chosen_guard_lambda_max": (lambda value: value > 0, "positive"),
        "ref_init_epochs": (lambda value: value > 0, "positive"),
        "ref_init_learning_rate": (lambda value: value > 0, "positive"),
    }
    for name, (is_good, text) in ranges.items():
        value = getattr(config, name)
        if value is None and name in ("dpo_shift_lambda_final", "chosen_guard_decay", "ld_alpha"):
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and is_good(value)):
            raise ValueError(f"{name}={value!r} must be a number, {text}.")
    if not config.loss_type:
        raise ValueError("loss_type=[] is no loss. Name at least one, e.g. loss_type=['dpop'].")


def _check_losses(config: Any) -> None:
    own = [name for name in config.loss_type if name in OWN_LOSSES]
    for name, owner in (
        ("dpop_lambda", "dpop"),
        ("dpop_lambda_warmup_steps", "dpop"),
        ("dpo_shift_lambda", "dpo_shift"),
        ("dpo_shift_lambda_final", "dpo_shift"),
    ):
        if owner not in own and _is_set(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)} has no effect with loss_type={config.loss_type}. Add '{owner}' to "
                f"loss_type, or leave {name}."
            )
    if not own:
        return
    if config.beta <= 0:
        raise ValueError(f"beta={config.beta} must be positive with loss_type {own}.")
    if config.f_divergence_type != "reverse_kl":
        raise ValueError(
            f"f_divergence_type={config.f_divergence_type!r} is not defined for loss_type {own}, whose terms are plain "
            "log-ratios. Use f_divergence_type='reverse_kl', or a TRL loss type."
        )
    if config.use_weighting:
        raise ValueError(
            f"use_weighting=True (WPO) is not defined for loss_type {own}. Use use_weighting=False, or a TRL loss type."
        )
    if config.label_smoothing != 0 and len(own) == len(config.loss_type):
        raise ValueError(f"label_smoothing={config.label_smoothing} has no effect with loss_type {own}. Leave it 0.")


def _check_projection(config: Any) -> None:
    if not config.project_chosen_gradient:
        return
    fix = "Set project_chosen_gradient=False (loss_type ['dpop'] works everywhere)"
    if config.fp16:
        raise ValueError(f"project_chosen_gradient=True needs gradients without a loss scale. {fix}, or bf16=True.")
    if (config.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "project_chosen_gradient=True takes a second gradient of the same forward pass, which reentrant "
            f"checkpointing cannot give. Set use_reentrant=False in activation_checkpointing_kwargs. Or: {fix}."
        )
    if config.activation_offloading:
        raise ValueError(
            "project_chosen_gradient=True takes a second gradient of the same forward pass, and activation_offloading "
            f"gives its activations away after the first. Set activation_offloading=False. Or: {fix}."
        )
    plugin = getattr(config, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            "project_chosen_gradient=True needs the gradients of all parameters at once, and ZeRO-3 keeps neither "
            f"parameters nor gradients whole. Use ZeRO-1 or ZeRO-2. Or: {fix}."
        )
    if getattr(config, "fsdp_plugin_args", None) or config.fsdp:
        raise ValueError(f"project_chosen_gradient=True is not supported with FSDP, which shards gradients. {fix}.")


def _check_guard(config: Any) -> None:
    if config.chosen_guard == "off":
        for name in ("chosen_guard_floor", "chosen_guard_patience", "chosen_guard_decay"):
            if _is_set(config, name):
                raise ValueError(
                    f"{name}={getattr(config, name)} has no effect with chosen_guard='off'. Set chosen_guard to "
                    f"'warn', 'raise_lambda' or 'stop', or leave {name}."
                )
    if config.chosen_guard != "raise_lambda" and _is_set(config, "chosen_guard_lambda_max"):
        raise ValueError(
            f"chosen_guard_lambda_max={config.chosen_guard_lambda_max} has no effect with chosen_guard="
            f"{config.chosen_guard!r}. Set chosen_guard='raise_lambda', or leave it."
        )
    if config.chosen_guard == "raise_lambda" and "dpop" not in config.loss_type:
        raise ValueError(
            f"chosen_guard='raise_lambda' raises DPOP's penalty, but loss_type={config.loss_type} has none. Add "
            "'dpop' to loss_type, or use chosen_guard='stop'."
        )
    if config.chosen_guard == "raise_lambda" and config.chosen_guard_lambda_max < config.dpop_lambda:
        raise ValueError(
            f"chosen_guard_lambda_max={config.chosen_guard_lambda_max} is below dpop_lambda={config.dpop_lambda}, so "
            "the guard could raise nothing. Raise it."
        )
    if config.chosen_guard == "stop" and config.save_strategy == "no":
        raise ValueError(
            "chosen_guard='stop' must leave a checkpoint from before the fall, but save_strategy='no' writes none. Set "
            "save_strategy='steps' (and save_steps), or chosen_guard='warn'."
        )


def _check_reference(config: Any) -> None:
    if config.ref_init == "given":
        for name in ("ref_init_epochs", "ref_init_learning_rate"):
            if _is_set(config, name):
                raise ValueError(
                    f"{name}={getattr(config, name)} has no effect with ref_init='given'. Set "
                    f"ref_init='sft_on_chosen', or leave {name}."
                )
    plugin = getattr(config, "deepspeed_plugin", None)
    if config.ref_init == "sft_on_chosen" and plugin is not None:
        raise ValueError(
            "ref_init='sft_on_chosen' runs two trainings in one process, and DeepSpeed makes one engine per process. "
            "Train the reference first (`trl sft` on the chosen answers), and give its folder as the model."
        )


def _is_set(config: Any, name: str) -> bool:
    return bool(getattr(config, name) != getattr(PreferenceOptions, name))

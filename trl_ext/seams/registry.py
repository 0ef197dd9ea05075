"""Each TRL method relied on, with its argument names and the hash of its body.

`tests/test_seams.py` fails on a TRL release that changed one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
DPO = "trl.trainer.dpo_trainer:DPOTrainer"
REWARD = "trl.trainer.reward_trainer:RewardTrainer"


@dataclass(frozen=True)
class Seam:
    """A TRL method that we override or rely on, as it was when our code was checked against it."""

    owner: str  # "module:Class"
    method: str
    parameters: tuple[str, ...]
    body_hash: str
    relies_on: str

    def current(self) -> Callable[..., Any]:
        """The method of the installed TRL."""
        module, _, name = self.owner.partition(":")
        return inspect.unwrap(getattr(getattr(importlib.import_module(module), name), self.method))


def body_hash(function: Callable[..., Any]) -> str:
    """Hash of a function's source, 16 hex digits."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


_FORWARD = (
    "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
    "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
    "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
_FORWARD_RELIES = "returns (logps, entropies, aux_loss); one call in the loss; in scoring old (if any), then reference"
_REWARDS = ("self", "inputs", "prompts", "completions", "completion_ids_list")
_REWARDS_RELIES = "returns the (N, F) matrix gathered over all ranks, NaN = not applicable"
_SCORE_RELIES = "returns a dict with the local `advantages` (B,); runs in evaluation too; before the shuffle"

TRL_SEAMS = (
    Seam(GRPO, "_get_per_token_logps_and_entropies", _FORWARD, "ea73c3909275851d", _FORWARD_RELIES),
    Seam(RLOO, "_get_per_token_logps_and_entropies", _FORWARD, "ea73c3909275851d", _FORWARD_RELIES),
    Seam(GRPO, "_calculate_rewards", _REWARDS, "736ae29b083840b5", _REWARDS_RELIES),
    Seam(RLOO, "_calculate_rewards", _REWARDS, "81ef76d93756be6f", _REWARDS_RELIES),
    Seam(GRPO, "_generate_and_score_completions", ("self", "inputs"), "1fa48922792dcd5c", _SCORE_RELIES),
    Seam(RLOO, "_generate_and_score_completions", ("self", "inputs"), "93ebbf5e70d31778", _SCORE_RELIES),
    Seam(
        GRPO,
        "_compute_loss",
        ("self", "model", "inputs"),
        "80295546bbdbf6f7",
        "reads `advantages` after its one forward, (B, T) accepted; `beta == 0.0` removes exactly the KL term; divides "
        "by gradient accumulation itself; logs `policy_loss` when the entropy bonus is on",
    ),
    Seam(
        RLOO,
        "_compute_loss",
        ("self", "model", "inputs"),
        "c1f9fa0cd5a6948c",
        "reads `advantages` after its one forward; uses no beta; the Trainer divides by gradient accumulation",
    ),
    Seam(
        GRPO,
        "_save_checkpoint",
        ("self", "model", "trial"),
        "ec91bde123649111",
        "writes into `checkpoint-<global_step>`",
    ),
    Seam(
        RLOO,
        "_save_checkpoint",
        ("self", "model", "trial"),
        "b6ee0a370c266b6f",
        "writes into `checkpoint-<global_step>`",
    ),
    Seam(GRPO, "_load_optimizer_and_scheduler", ("self", "checkpoint"), "5c1772becdfd7fdb", "called once on resume"),
    Seam(RLOO, "_load_optimizer_and_scheduler", ("self", "checkpoint"), "741032f57d6fb802", "called once on resume"),
    Seam(
        GRPO,
        "_prepare_inputs",
        ("self", "generation_batch"),
        "f824e7fb07147956",
        "extra keys ride along when dim 0 is B",
    ),
    Seam(
        RLOO,
        "_prepare_inputs",
        ("self", "generation_batch"),
        "f824e7fb07147956",
        "extra keys ride along when dim 0 is B",
    ),
    Seam(
        DPO,
        "_compute_loss",
        ("self", "model", "inputs", "return_outputs"),
        "5e58a1699e0d76cd",
        "one policy forward, through `model`, before the reference; with `precompute_ref_logps` the reference is read "
        "from the batch after it; sums over `loss_types` and `loss_weights`; the Trainer divides by accumulation",
    ),
    Seam(
        DPO,
        "compute_ref_log_probs",
        ("self", "model", "inputs"),
        "90611af9cbadb8ec",
        "(chosen, rejected) of the frozen reference: the model given, the `ref` adapter, or the adapter switched off",
    ),
    Seam(
        DPO,
        "_prepare_dataset",
        ("self", "dataset", "processing_class", "args", "dataset_name"),
        "35e349e8e8266df4",
        "keeps columns it does not know; drops rows whose prompt fills `max_length`, no others",
    ),
    Seam(
        DPO,
        "_save_checkpoint",
        ("self", "model", "trial"),
        "b6ee0a370c266b6f",
        "writes into `checkpoint-<global_step>`",
    ),
    Seam(DPO, "_load_optimizer_and_scheduler", ("self", "checkpoint"), "741032f57d6fb802", "called once on resume"),
    Seam(
        REWARD,
        "_prepare_dataset",
        ("self", "dataset", "processing_class", "args", "dataset_name"),
        "d753a196b9cfefe9",
        "adds `chosen_ids` and `rejected_ids`; drops rows longer than `max_length`",
    ),
)


@functools.lru_cache(maxsize=1)
def changed_seams() -> tuple[str, ...]:
    """Descriptions of the seams that differ in the installed TRL; empty when it is the checked release."""
    changes = []
    for seam in TRL_SEAMS:
        function = seam.current()
        if tuple(inspect.signature(function).parameters) != seam.parameters:
            changes.append(f"{seam.owner}.{seam.method}: arguments {tuple(inspect.signature(function).parameters)}")
        elif body_hash(function) != seam.body_hash:
            changes.append(f"{seam.owner}.{seam.method}: body (relied on: {seam.relies_on})")
    return tuple(changes)

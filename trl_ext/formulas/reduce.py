"""From per-token terms to a scalar with the normaliser of each GRPO loss type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trl_ext.formulas.checks import check_mask

# The loss types of GRPO by the way they sum over tokens.
MEAN_OF_SEQUENCE_MEANS = ("grpo", "sapo")
MEAN_OVER_TOKENS = ("bnpo",)
CONSTANT_LENGTH = ("dr_grpo",)
TOKENS_OF_THE_WINDOW = ("cispo", "dapo", "vespo")
MEAN_OF_SEQUENCE_SUMS = ("luspo",)
LOSS_TYPES = (
    *MEAN_OF_SEQUENCE_MEANS,
    *MEAN_OVER_TOKENS,
    *CONSTANT_LENGTH,
    *TOKENS_OF_THE_WINDOW,
    *MEAN_OF_SEQUENCE_SUMS,
)


@dataclass(frozen=True)
class Window:
    """What the normalisers need to know about the micro-batch and its accumulation window.

    Attributes:
        max_completion_length: tokens, the constant of Dr. GRPO.
        accumulation: micro-batches of the current window; 1 in evaluation.
        steps_per_generation: micro-batches of one generation batch; equal to `accumulation` in evaluation.
        num_processes: number of ranks.
        num_items_in_batch: scalar, real tokens of the generation batch over all ranks.
    """

    max_completion_length: int
    accumulation: float
    steps_per_generation: float
    num_processes: int
    num_items_in_batch: torch.Tensor | None = None


def reduce_per_token(per_token: torch.Tensor, mask: torch.Tensor, loss_type: str, window: Window) -> torch.Tensor:
    r"""Sum a per-token term exactly as GRPO's `loss_type` sums its policy term, gradient accumulation included.

    grpo, sapo: mean over sequences of token means; bnpo: mean over the tokens of the micro-batch; dr_grpo: sum over
    B * max_completion_length; dapo, cispo, vespo: sum over the tokens of the accumulation window; luspo: mean over
    sequences of token sums. (Shao et al. 2024; Liu et al. 2025, Dr. GRPO; Yu et al. 2025, DAPO.)

    Args:
        per_token: (B, T), nats. mask: (B, T), 1 = real token. loss_type: a GRPO loss type. window: see `Window`.

    Returns:
        Scalar, ready to be added to the micro-batch loss. Entries under mask 0 change neither value nor gradient.

    Raises:
        ValueError: unknown loss type, or shapes that differ.
    """
    check_mask(mask, per_token)
    masked = torch.where(mask.bool(), per_token, torch.zeros_like(per_token))
    if loss_type in MEAN_OF_SEQUENCE_MEANS:
        return (masked.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / window.accumulation
    if loss_type in MEAN_OVER_TOKENS:
        return masked.sum() / mask.sum().clamp(min=1.0) / window.accumulation
    if loss_type in CONSTANT_LENGTH:
        return masked.sum() / (masked.shape[0] * window.max_completion_length) / window.accumulation
    if loss_type in MEAN_OF_SEQUENCE_SUMS:
        return masked.sum(-1).mean() / window.accumulation
    if loss_type in TOKENS_OF_THE_WINDOW:
        if window.num_items_in_batch is None:
            raise ValueError(f"`loss_type={loss_type!r}` needs `num_items_in_batch`.")
        tokens = window.num_items_in_batch.clamp(min=1.0) / window.num_processes
        return masked.sum() / (tokens * window.accumulation / window.steps_per_generation)
    raise ValueError(f"Unknown loss type {loss_type!r}. Known: {', '.join(LOSS_TYPES)}.")


def sequence_sums(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) sums over the real tokens; entries under mask 0 change neither value nor gradient."""
    check_mask(mask, per_token)
    return torch.where(mask.bool(), per_token, torch.zeros_like(per_token)).sum(-1)

"""Scores of many token sequences from one sequence-classification model, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def token_budget_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Indices of sequences, sorted by length, in batches of at most `tokens_per_batch` tokens *with* padding.

    Sequences of like length share a batch, so almost nothing is padded; a sequence longer than the budget is alone.
    The longest come first: if memory does not suffice, it fails at once.

    Raises:
        ValueError: `tokens_per_batch` is not positive.
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch={tokens_per_batch} must be at least 1, e.g. 16384.")
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = max(longest, lengths[index])
        if batch and longest * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def score_sequences(
    model: Any, sequences: Sequence[Sequence[int]], pad_token_id: int, tokens_per_batch: int = 16384
) -> torch.Tensor:
    """Scores of token sequences, in their order; equal sequences are scored once.

    The attention mask comes from the lengths, never from token values. Which position is scored is the model's own
    rule, the same as in its training: transformers takes the last token that is not `pad_token_id`.

    Args:
        model: sequence classification, in evaluation mode. sequences: N lists of token ids, none empty.
        pad_token_id: the one the model was trained with. tokens_per_batch: bounds the memory of one forward.

    Returns:
        (N, L) float32 on the CPU, L = number of labels (members of an ensemble with several heads).

    Raises:
        ValueError: a sequence is empty.
    """
    unique = {tuple(sequence): index for index, sequence in enumerate(dict.fromkeys(map(tuple, sequences)))}
    if () in unique:
        raise ValueError("A sequence without a token cannot be scored.")
    keys = list(unique)
    scores: torch.Tensor | None = None
    for indices in token_budget_batches([len(key) for key in keys], tokens_per_batch):
        logits = _forward(model, [keys[index] for index in indices], pad_token_id).float().cpu()
        if scores is None:
            scores = torch.empty(len(keys), logits.shape[1])
        scores[indices] = logits
    if scores is None:
        return torch.empty(0, getattr(model.config, "num_labels", 1))
    return scores[[unique[tuple(sequence)] for sequence in sequences]]


def _forward(model: Any, rows: Sequence[Sequence[int]], pad_token_id: int) -> torch.Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    input_ids = torch.full((len(rows), width), pad_token_id)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
    attention_mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    device = model.device
    logits: torch.Tensor = model(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False
    ).logits
    return logits

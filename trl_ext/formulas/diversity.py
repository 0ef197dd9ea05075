"""How different the completions of a group are from each other."""

from __future__ import annotations

import torch

from trl_ext.formulas.checks import check_groups, check_mask, check_rank


def group_ngram_diversity(
    token_ids: torch.Tensor, mask: torch.Tensor, num_generations: int, n: int = 3
) -> torch.Tensor:
    r"""Diversity of each completion: 1 - mean Jaccard similarity of its n-gram set with those of its siblings.

    J(A, B) = |A and B| / |A or B| on sets of token n-grams, so it works in any language. A completion shorter than n
    tokens counts as one n-gram (itself), so that two different one-token answers are different.

    Args:
        token_ids: (N, T) integers, right-padded. mask: (N, T), 1 = real token (a prefix of the row).
        num_generations: G; a group of one has diversity 0.
        n: length of the n-grams, at least 1.

    Returns:
        (N,), float32, in [0, 1]: 0 = all siblings equal, 1 = no n-gram shared.

    When it is wrong: it rewards *surface* variety. Random text maximises it, so keep its weight small and pay it only
    to completions that earn their other rewards.

    Raises:
        ValueError: shapes, group size, or n < 1.
    """
    check_rank("token_ids", token_ids, 2)
    check_mask(mask, token_ids)
    check_groups("token_ids", token_ids.shape[0], num_generations)
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}.")
    if num_generations == 1:
        return torch.zeros(token_ids.shape[0], device=token_ids.device)
    padding = token_ids.new_full((token_ids.shape[0], max(n - token_ids.shape[1], 0)), -1)
    tokens = torch.cat([token_ids.masked_fill(mask == 0, -1), padding], dim=1)
    lengths = mask.sum(1)
    groups = zip(tokens.split(num_generations), lengths.split(num_generations), strict=True)
    return torch.cat([_diversity_of_group(group, length, n) for group, length in groups])


def _diversity_of_group(tokens: torch.Tensor, lengths: torch.Tensor, n: int) -> torch.Tensor:
    """(G,) diversity of one group; memory is (G, number of different n-grams of the group)."""
    size = tokens.shape[0]
    ngrams = tokens.unfold(1, n, 1)  # (G, W, n)
    windows = ngrams.shape[1]
    positions = torch.arange(windows, device=tokens.device)
    real = positions < (lengths - n + 1).clamp(min=1).unsqueeze(1)  # (G, W), at least the first window
    vocabulary, index = torch.unique(ngrams.reshape(-1, n), dim=0, return_inverse=True)
    present = torch.zeros(size, len(vocabulary) + 1, device=tokens.device)
    # Windows that reach into padding go to a spare column, which is then dropped.
    index = torch.where(real, index.view(size, windows), torch.full_like(real, len(vocabulary), dtype=torch.long))
    present.scatter_(1, index, 1.0)
    present = present[:, :-1]
    intersection = present @ present.T
    counts = present.sum(1)
    union = counts.unsqueeze(0) + counts.unsqueeze(1) - intersection
    similarity = intersection / union
    return 1 - (similarity.sum(1) - similarity.diagonal()) / (size - 1)

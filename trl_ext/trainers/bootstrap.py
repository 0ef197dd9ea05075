"""Which pairs each member of an ensemble is trained on: a bootstrap sample that needs no state."""

from __future__ import annotations

import numpy as np
import torch

from trl_ext.formulas.reward_model import poisson_counts

_PRIME = 6364136223846793005  # odd, so that no power of it vanishes modulo 2^64


def row_keys(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> np.ndarray:
    """(R,) 64-bit numbers that depend on the real tokens of each row and on nothing else."""
    ids = torch.where(attention_mask.bool(), input_ids + 1, torch.zeros_like(input_ids)).cpu().numpy().astype(np.uint64)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(ids.shape[1], _PRIME, dtype=np.uint64))
        return (ids * powers).sum(1, dtype=np.uint64)


def bootstrap_weights(input_ids: torch.Tensor, attention_mask: torch.Tensor, members: int, seed: int) -> torch.Tensor:
    """How often each pair is in the bootstrap sample of each member.

    The counts follow from the tokens of the pair, the member and the seed: the same in every epoch, on every rank, in
    every order and after a resume.

    Args:
        input_ids, attention_mask: (2B, T), the chosen answers, then the rejected ones; padded on the right.
        members: M. seed: of the run.

    Returns:
        (B, M) float32 on the device of `input_ids`; mean about 1.
    """
    chosen, rejected = np.split(row_keys(input_ids, attention_mask), 2)
    with np.errstate(over="ignore"):
        pair = _mix(chosen) + _mix(rejected + np.uint64(1))
        member = np.arange(members, dtype=np.uint64) + np.uint64(seed % 2**32) * np.uint64(2**20)
        mixed = _mix(pair[:, None] ^ _mix(member)[None, :])
    uniform = torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    return poisson_counts(uniform).to(input_ids.device, torch.float32)


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014): nearby inputs give unrelated outputs."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed

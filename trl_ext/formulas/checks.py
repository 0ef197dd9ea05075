"""Shape checks, made once at the door of a formula, with the argument's name in the error."""

from __future__ import annotations

import torch


def check_rank(name: str, tensor: torch.Tensor, rank: int) -> None:
    """Raise `ValueError` unless `tensor` has `rank` dimensions."""
    if tensor.dim() != rank:
        raise ValueError(f"`{name}` must have {rank} dimension(s), got shape {tuple(tensor.shape)}.")


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Raise `ValueError` naming the arguments unless all tensors have one shape (no silent broadcasting)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(f"These arguments must have the same shape: {listed}.")


def check_mask(mask: torch.Tensor, like: torch.Tensor, name: str = "mask") -> None:
    """Raise `ValueError` unless `mask` has the shape of `like`."""
    if mask.shape != like.shape:
        raise ValueError(f"`{name}` has shape {tuple(mask.shape)}, expected {tuple(like.shape)}.")


def check_groups(name: str, size: int, num_generations: int) -> None:
    """Raise `ValueError` unless `size` rows split into whole groups of `num_generations`."""
    if num_generations < 1:
        raise ValueError(f"`num_generations` must be at least 1, got {num_generations}.")
    if size % num_generations:
        raise ValueError(f"`{name}` has {size} rows, which is not a multiple of num_generations={num_generations}.")


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit tensors in float32, others unchanged: the difference of two bfloat16 log-probabilities is mostly noise."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

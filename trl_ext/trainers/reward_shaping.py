"""Changes of the gathered reward matrix before any normalisation: the diversity column, then the gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trl_ext.formulas.diversity import group_ngram_diversity
from trl_ext.formulas.rewards import gate_rewards
from trl_ext.trainers.reward_gate import RewardGate

DIVERSITY_NAME = "group_diversity"


@dataclass(frozen=True)
class ResolvedGate:
    """A gate by column index."""

    name: str
    gate: int
    threshold: float
    gated: tuple[int, ...]
    floor: Any


def resolve_gates(gates: Sequence[RewardGate] | None, names: Sequence[str]) -> list[ResolvedGate]:
    """Turn reward names into columns.

    Raises:
        ValueError: a name that no reward function has, a name that two have, or a gate without anything to gate.
    """
    return [_resolve(gate, list(names)) for gate in gates or ()]


def _resolve(gate: RewardGate, names: list[str]) -> ResolvedGate:
    column = _column(gate["gate"], names)
    if gate["gated"] is None:
        gated = tuple(index for index in range(len(names)) if index != column)
    else:
        gated = tuple(_column(name, names) for name in gate["gated"])
    if not gated:
        raise ValueError(f"reward_gates: nothing to gate by {gate['gate']!r}; it is the only reward. Add another one.")
    if column in gated:
        raise ValueError(f"reward_gates: {gate['gate']!r} cannot gate itself. Remove it from `gated`.")
    return ResolvedGate(gate["gate"], column, gate["threshold"], gated, gate["floor"])


def _column(name: str, names: list[str]) -> int:
    if name not in names:
        raise ValueError(f"reward_gates: no reward function is named {name!r}. The names are {names}.")
    if names.count(name) > 1:
        raise ValueError(f"reward_gates: {names.count(name)} reward functions are named {name!r}. Rename all but one.")
    return names.index(name)


def check_finite(rewards: torch.Tensor, names: Sequence[str]) -> None:
    """Refuse infinite rewards, whose advantages would be NaN.

    Raises:
        ValueError: naming the reward functions.
    """
    infinite = rewards.isinf().any(0).tolist()
    if any(infinite):
        guilty = [name for name, is_infinite in zip(names, infinite, strict=True) if is_infinite]
        raise ValueError(f"Reward function(s) {guilty} returned an infinite reward. Return None where none applies.")


@dataclass(frozen=True)
class DiversityReward:
    """Fills the column `group_diversity`, which needs whole groups and so the completions of every rank."""

    column: int
    ngram: int
    cap: float
    min_reward: float | None

    def fill(
        self, rewards: torch.Tensor, completion_ids: list[list[int]], accelerator: Any, num_generations: int
    ) -> torch.Tensor:
        """The (N, F) matrix with the column filled; NaN stays where no other reward applies to the row."""
        ids, mask = _gathered_ids(completion_ids, accelerator)
        diversity = group_ngram_diversity(ids, mask, num_generations, self.ngram).clamp(max=self.cap)
        others = torch.cat([rewards[:, : self.column], rewards[:, self.column + 1 :]], dim=1)
        unscorable = others.isnan().all(1)
        result = rewards.clone()
        result[:, self.column] = diversity.to(rewards.dtype).masked_fill(unscorable, torch.nan)
        return result

    def withhold(self, rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Pay nothing where the weighted sum of the other (gated) rewards is not above `min_reward`."""
        if self.min_reward is None:
            return rewards
        weighted = (rewards * weights).nan_to_num(nan=0.0)
        earned = weighted.sum(1) - weighted[:, self.column]
        column = rewards[:, self.column]
        result = rewards.clone()
        result[:, self.column] = torch.where(earned > self.min_reward, column, torch.zeros_like(column))
        return result


def _gathered_ids(completion_ids: list[list[int]], accelerator: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, T) ids and mask over all ranks, in the order of the gathered rewards."""
    rows = [torch.tensor(ids, dtype=torch.long) for ids in completion_ids]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(accelerator.device)
    if accelerator.num_processes > 1:
        ids = accelerator.gather(accelerator.pad_across_processes(ids, dim=1, pad_index=-1))
    return ids, (ids >= 0).long()


def apply_gates(
    rewards: torch.Tensor, gates: Sequence[ResolvedGate], num_generations: int, weights: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[str, float]]]:
    """Apply the gates in order; returns the new matrix and (name, pass rate) of each gate.

    A reward with a negative weight is a cost: there the *largest* value is the worst, so its sign is turned for the
    floor. Otherwise a completion that fails a gate would be paid for it.
    """
    signs = torch.where(weights < 0, -1.0, 1.0).to(rewards.dtype)
    pass_rates = []
    for gate in gates:
        passed = rewards[:, gate.gate] >= gate.threshold
        pass_rates.append((gate.name, passed.float().mean().item()))
        turned = signs.clone()
        turned[gate.gate] = 1.0  # the threshold is in the units of the gate's own reward
        gated = gate_rewards(rewards * turned, num_generations, gate.gate, gate.threshold, gate.gated, gate.floor)
        rewards = gated * turned
    return rewards, pass_rates

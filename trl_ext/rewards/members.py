"""The three ways in which an ensemble of reward models is held in memory, behind one method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from trl_ext.rewards.loading import check_adapter_has_head, load_classifier, load_trunk
from trl_ext.rewards.reward_card import RewardCard
from trl_ext.rewards.sequence_scoring import score_sequences


class Members(Protocol):
    """M reward models that share a tokenizer."""

    size: int
    config: Any
    model: Any  # one of them, for its config and its adapter

    def score_rows(self, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        """(M, N) float32 scores of N token sequences."""
        ...


class Heads:
    """M score heads on one trunk: one forward for all."""

    def __init__(self, model: Any, size: int) -> None:
        self.model, self.size, self.config = model, size, model.config

    def score_rows(self, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        return score_sequences(self.model, rows, _pad(self.model), tokens_per_batch).T


class Adapters:
    """M adapters with a head each on one base: M passes, one base in memory."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        self.model, self.names, self.size, self.config = model, list(names), len(names), model.config

    def score_rows(self, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        active = self.model.active_adapter
        try:
            return torch.stack([self._score_with(name, rows, tokens_per_batch) for name in self.names])
        finally:
            self.model.set_adapter(active)

    def _score_with(self, name: str, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        self.model.set_adapter(name)
        return score_sequences(self.model, rows, _pad(self.model), tokens_per_batch)[:, 0]


class Models:
    """M full models."""

    def __init__(self, models: Sequence[Any]) -> None:
        self.models, self.size, self.config, self.model = list(models), len(models), models[0].config, models[0]

    def score_rows(self, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        return torch.stack([score_sequences(model, rows, _pad(model), tokens_per_batch)[:, 0] for model in self.models])


class StoredModels:
    """M full models on disk, of which one is in memory at a time; for scoring once, after training."""

    def __init__(self, folders: Sequence[str], model: Any) -> None:
        self.folders, self.size, self.config, self.model = list(folders), len(folders), model.config, model

    def score_rows(self, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        return torch.stack([self._score_with(folder, rows, tokens_per_batch) for folder in self.folders])

    def _score_with(self, folder: str, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> torch.Tensor:
        model = load_classifier(folder).to(self.model.device)
        return score_sequences(model, rows, _pad(model), tokens_per_batch)[:, 0]


def positions_of(config: Any) -> int | None:
    """The longest text that a model has positions for; None when it does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def score_fitting(
    members: Members, rows: Sequence[Sequence[int]], tokens_per_batch: int, max_length: int | None
) -> torch.Tensor:
    """(M, N) scores; NaN for rows of more than `max_length` tokens."""
    scores = torch.full((members.size, len(rows)), torch.nan)
    fitting = [index for index, row in enumerate(rows) if max_length is None or len(row) <= max_length]
    if fitting:
        scores[:, fitting] = members.score_rows([rows[index] for index in fitting], tokens_per_batch)
    return scores


def load_members(folder: str | Path, card: RewardCard, **model_kwargs: Any) -> Members:
    """The members stored in `folder`.

    Raises:
        ValueError: a member is missing, or has no trained head.
    """
    folder = Path(folder)
    if card.kind in ("single", "heads"):
        return Heads(load_classifier(str(folder), num_labels=card.size, **model_kwargs), card.size)
    parts = [folder / member_name(index) for index in range(card.size)]
    missing = [part.name for part in parts if not part.is_dir()]
    if missing:
        raise ValueError(f"{folder} says it has {card.size} members, but {missing} are not there.")
    if card.kind == "models":
        return Models([load_classifier(str(part), **model_kwargs) for part in parts])
    return _load_adapters(parts, model_kwargs)


def member_name(index: int) -> str:
    """Folder, and adapter, of a member."""
    return f"member-{index}"


def tokenizer_folder(folder: Path) -> Path:
    """Beside the card, else with the first member."""
    return folder if (folder / "tokenizer_config.json").is_file() else folder / member_name(0)


def _load_adapters(parts: Sequence[Path], model_kwargs: dict[str, Any]) -> Adapters:
    from peft import PeftConfig, PeftModel

    for part in parts:
        check_adapter_has_head(part)
    model_kwargs.setdefault("dtype", torch.float32)
    base = load_trunk(str(PeftConfig.from_pretrained(str(parts[0])).base_model_name_or_path), 1, **model_kwargs)
    model = PeftModel.from_pretrained(base, str(parts[0]), adapter_name=parts[0].name)
    for part in parts[1:]:
        model.load_adapter(str(part), adapter_name=part.name)
    return Adapters(model.eval(), [part.name for part in parts])


def _pad(model: Any) -> int:
    return int(model.config.get_text_config().pad_token_id)

"""One reward model out of an ensemble, by averaging weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trl_ext.rewards.loading import agree_on_pad, load_classifier, load_tokenizer
from trl_ext.rewards.members import member_name, tokenizer_folder
from trl_ext.rewards.reward_card import RewardCard


def average_weights(source: str | Path, target: str | Path) -> Path:
    """WARM: average the weights of the members stored in `source` into one reward model in `target`.

    Rame et al. 2024, "WARM: On the Benefits of Weight Averaged Reward Models" (arXiv 2401.12187). One model's cost, and
    more robust than one member where all of them started from the same weights. For "heads" it is exactly the mean of
    the members. Adapters are merged into the base first: the average of two low-rank updates is not the update of the
    averaged factors. The card of the result has no calibration: its scores have a scale of their own.

    Returns:
        `target`, loadable by `RewardModelScorer` and `RewardEnsemble.load`.

    Raises:
        ValueError: `source` holds no ensemble.

    When it is wrong: members that did not share an initialisation; their average is no better than noise.
    """
    source, target = Path(source), Path(target)
    card = RewardCard.load(source)
    if card is None or card.kind == "single":
        raise ValueError(f"{source} holds no ensemble: nothing to average.")
    model = _average_heads(source, card) if card.kind == "heads" else _average_members(source, card)
    tokenizer = load_tokenizer(str(tokenizer_folder(source)), model)
    # A merged adapter has the config of its base; the tokenizer is the one of the training.
    agree_on_pad(model, tokenizer, tokenizer_decides=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    RewardCard("single", 1, card.text_format).save(target)
    return target


@torch.no_grad()
def _average_heads(source: Path, card: RewardCard) -> Any:
    model = _merged(load_classifier(str(source), num_labels=card.size))
    name = next(name for name in ("score", "classifier") if hasattr(model, name))
    old = getattr(model, name)
    new = torch.nn.Linear(old.in_features, 1, bias=old.bias is not None, dtype=old.weight.dtype)
    new.weight.copy_(old.weight.mean(0, keepdim=True))
    if old.bias is not None:
        new.bias.copy_(old.bias.mean(0, keepdim=True))
    setattr(model, name, new)
    model.config.num_labels = 1
    return model


@torch.no_grad()
def _average_members(source: Path, card: RewardCard) -> Any:
    """Two models are in memory at a time; the sum is kept in float64 so that the order does not matter."""
    total: dict[str, torch.Tensor] = {}
    model = None
    for index in range(card.size):
        model = _merged(load_classifier(str(source / member_name(index))))
        for name, value in model.state_dict().items():
            value = value.double() if value.is_floating_point() else value
            total[name] = total[name] + value if name in total and value.is_floating_point() else value
    assert model is not None
    state = {
        name: (value / card.size if value.is_floating_point() else value).to(model.state_dict()[name].dtype)
        for name, value in total.items()
    }
    model.load_state_dict(state)
    return model


def _merged(model: Any) -> Any:
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model

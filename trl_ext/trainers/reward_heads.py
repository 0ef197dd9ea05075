"""M score heads in place of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, set_seed
from trl.trainer.reward_trainer import suppress_seqcls_warning
from trl.trainer.utils import create_model_from_path

from trl_ext.rewards.loading import load_classifier
from trl_ext.rewards.reward_card import RewardCard

HEAD_NAMES = ("score", "classifier")


class Replay:
    """Stands in for the model in TRL's loss and answers with scores that were computed before."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._output = SimpleNamespace(logits=logits)

    def __call__(self, **_: Any) -> Any:
        return self._output


def load_for_heads(arguments: dict[str, Any], config: Any, size: int) -> Any:
    """The model of these arguments, loaded as TRL loads it, with `size` fresh heads.

    A folder that holds an ensemble of `size` heads goes on with those.

    Raises:
        ValueError: it is a PEFT model already, its head is not one linear layer, or it has another number of members.
    """
    model = arguments["model"]
    if isinstance(model, str) and (card := RewardCard.load(model)) is not None and card.kind != "single":
        model = load_stored_heads(model, card, size)
        model.config.num_labels = 1  # what TRL takes; set to `size` again once TRL has checked it
        return model
    if isinstance(model, str):
        set_seed(config.seed)
        loading = dict(config.model_init_kwargs or {})
        if arguments.get("quantization_config") is not None:
            loading["quantization_config"] = arguments["quantization_config"]
        if config.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
            loading["device_map"] = None
        loading |= {"num_labels": 1, "trust_remote_code": loading.get("trust_remote_code", config.trust_remote_code)}
        with suppress_seqcls_warning():
            model = create_model_from_path(model, AutoModelForSequenceClassification, **loading)
    give_heads(model, size, config.seed)
    return model


def load_stored_heads(folder: str, card: RewardCard, size: int) -> Any:
    """The trained heads in `folder`, to be trained further.

    Raises:
        ValueError: another kind or number of members.
    """
    if (card.kind, card.size) != ("heads", size):
        raise ValueError(
            f"{folder} holds an ensemble of {card.size} {card.kind}, but ensemble_size={size} and "
            "ensemble_kind='heads' are set. Set them to what is there, or start from another model."
        )
    model = load_classifier(folder, num_labels=size)
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"{folder} holds heads on an adapter, which cannot be trained further here. Train without an adapter, or "
            "use ensemble_kind='adapters'."
        )
    return model


def give_heads(model: Any, size: int, seed: int) -> None:
    """Replace the head by `size` fresh ones, each drawn from a seed of its own.

    Raises:
        ValueError: the model has a PEFT adapter, or no linear layer called `score` or `classifier`.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(
            "ensemble_kind='heads' must make its heads before the adapter: give the base and a peft_config."
        )
    name = next((name for name in HEAD_NAMES if isinstance(getattr(model, name, None), torch.nn.Linear)), None)
    if name is None:
        raise ValueError(
            f"{type(model).__name__} has no linear layer called {' or '.join(HEAD_NAMES)}, so it cannot have several "
            "heads. Use ensemble_kind='adapters' or 'models'."
        )
    old = getattr(model, name)
    new = torch.nn.Linear(old.in_features, size, bias=old.bias is not None, device=old.weight.device)
    spread = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    with torch.no_grad():
        for member, row in enumerate(new.weight):
            generator = torch.Generator().manual_seed(seed + member)
            row.copy_(torch.randn(old.in_features, generator=generator) * spread)
        if new.bias is not None:
            new.bias.zero_()
    setattr(model, name, new.to(old.weight.dtype))

"""What a member of an ensemble of adapters or models starts from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from trl_ext.rewards.loading import load_trunk
from trl_ext.rewards.members import member_name
from trl_ext.rewards.reward_card import RewardCard


def start_of_member(given: dict[str, Any], config: Any, member: int) -> dict[str, Any]:
    """Arguments of the member's trainer: `model`, `peft_config` and `quantization_config`.

    A fresh member starts from the base model and, for adapters, a copy of the `peft_config`. Where `model` is a folder
    with a trained ensemble of the same kind and size, each member goes on from its own weights.

    Raises:
        ValueError: the folder holds another kind or number of members.
    """
    folder = given["model"]
    card = RewardCard.load(folder)
    if card is None or card.kind == "single":
        return {"model": folder, "peft_config": copy.deepcopy(given.get("peft_config"))}
    if (card.kind, card.size) != (config.ensemble_kind, config.ensemble_size):
        raise ValueError(
            f"{folder} holds an ensemble of {card.size} {card.kind}, but ensemble_size={config.ensemble_size} and "
            f"ensemble_kind={config.ensemble_kind!r} are set. Set them to what is there, or start from another model."
        )
    part = str(Path(folder) / member_name(member))
    if card.kind == "models":
        return {"model": part}
    return {"model": _adapter(part, given, config), "peft_config": None, "quantization_config": None}


def _adapter(part: str, given: dict[str, Any], config: Any) -> Any:
    from peft import PeftConfig, PeftModel

    loading = dict(config.model_init_kwargs or {})
    if given.get("quantization_config") is not None:
        loading["quantization_config"] = given["quantization_config"]
    loading.setdefault("dtype", "float32")
    base = load_trunk(str(PeftConfig.from_pretrained(part).base_model_name_or_path), 1, **loading)
    return PeftModel.from_pretrained(base, part, is_trainable=True)

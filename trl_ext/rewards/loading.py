"""Loading a reward model with the head it was trained with, never with a random one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


def load_tokenizer(name_or_path: str, model: Any) -> Any:
    """The reward model's tokenizer; its pad token and the model's agree.

    Raises:
        ValueError: there is neither a pad nor an EOS token.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    # An adapter's folder holds the tokenizer of its training, but the config is the one of its base.
    agree_on_pad(model, tokenizer, tokenizer_decides=hasattr(model, "peft_config"))
    tokenizer.padding_side = "right"
    return tokenizer


def agree_on_pad(model: Any, tokenizer: Any, tokenizer_decides: bool = False) -> None:
    """Give model and tokenizer one pad token: the last token that is not pad is the one that is scored.

    Raises:
        ValueError: there is neither a pad nor an EOS token.
    """
    config = model.config.get_text_config()
    if tokenizer_decides and tokenizer.pad_token_id is not None:
        config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        raise ValueError("The reward model has neither a pad token nor an EOS token. Set tokenizer.pad_token.")


def load_classifier(name_or_path: str, num_labels: int = 1, **model_kwargs: Any) -> Any:
    """A sequence-classification model with `num_labels` trained scores; a folder with a PEFT adapter works too.

    Args:
        model_kwargs: for `from_pretrained`; `dtype` defaults to float32, `device_map` to the accelerator, if any.

    Raises:
        ValueError: not a reward model: another number of labels, or the score head is not among the weights.
    """
    model_kwargs.setdefault("dtype", torch.float32)
    if torch.accelerator.is_available():
        model_kwargs.setdefault("device_map", torch.accelerator.current_accelerator())
    if (Path(name_or_path) / "adapter_config.json").is_file():
        return _load_adapter(name_or_path, num_labels, model_kwargs)
    config = AutoConfig.from_pretrained(name_or_path)
    architecture = (config.architectures or ["unknown"])[0]
    if not architecture.endswith("ForSequenceClassification"):
        raise ValueError(
            f"{name_or_path} is a {architecture}, which has no score head: its scores would be random. Train it "
            "with RewardTrainer first."
        )
    if config.num_labels != num_labels:
        raise ValueError(
            f"{name_or_path} has num_labels={config.num_labels}, expected {num_labels}: one score per text. Models "
            "with several classes are no reward models; wrap one in a function that returns one number."
        )
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name_or_path, output_loading_info=True, **model_kwargs
    )
    _refuse_missing(info["missing_keys"], name_or_path)
    return model.eval()


def _load_adapter(folder: str, num_labels: int, model_kwargs: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel

    check_adapter_has_head(Path(folder))
    base = load_trunk(str(PeftConfig.from_pretrained(folder).base_model_name_or_path), num_labels, **model_kwargs)
    return PeftModel.from_pretrained(base, folder).eval()


def load_trunk(name_or_path: str, num_labels: int, **model_kwargs: Any) -> Any:
    """A sequence-classification model whose head is still to come: from an adapter, or from training."""
    from trl.trainer.reward_trainer import suppress_seqcls_warning

    with suppress_seqcls_warning():
        return AutoModelForSequenceClassification.from_pretrained(name_or_path, num_labels=num_labels, **model_kwargs)


def check_adapter_has_head(folder: Path) -> None:
    """Raise `ValueError` unless the adapter's safetensors hold the score head."""
    from safetensors import safe_open

    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{folder} holds no adapter_model.safetensors.")
    with safe_open(weights, framework="pt") as file:
        names = list(file.keys())
    # A low-rank update of a head is no head: what it updates was never trained or saved.
    heads = [name for name in names if {"score", "classifier"} & set(name.split(".")) and "lora_" not in name]
    if not heads:
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("modules_to_save")
        raise ValueError(
            f"The adapter in {folder} holds no score head (modules_to_save={saved}): its scores would be random. Train "
            "it with modules_to_save=['score'] (task_type SEQ_CLS does that)."
        )


def _refuse_missing(missing: Any, name_or_path: str) -> None:
    if missing:
        raise ValueError(
            f"{name_or_path} lacks trained weights for {sorted(missing)[:5]}: its scores would be random. Train it "
            "with RewardTrainer, or give the folder that it saved."
        )

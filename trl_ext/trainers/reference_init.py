"""`ref_init: sft_on_chosen`: a reference by maximum likelihood on the chosen answers of the same data."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import trl
from accelerate import PartialState
from transformers import AutoProcessor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.logging import get_logger
from trl.trainer.utils import create_model_from_path, hash_module

logger = get_logger(__name__)

# What the supervised run takes over from the DPO config; everything else is SFTConfig's default.
SHARED_FIELDS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "bf16", "fp16", "use_cpu",
    "ddp_backend", "activation_checkpointing", "activation_checkpointing_kwargs", "dataloader_num_workers",
    "max_grad_norm", "optim", "logging_steps", "disable_tqdm", "trust_remote_code", "max_length", "dataset_num_proc",
    "save_strategy", "save_steps",
)  # fmt: skip


def train_reference(arguments: dict[str, Any], config: Any) -> None:
    """Train `arguments["model"]` on the chosen answers and put the result in its place, as policy and reference.

    The result is kept in `output_dir/ref_init-<hash>/model`; the hash is over the rows, the weights of the model, the
    adapter and the settings. A run that was killed goes on from its last checkpoint.

    Args:
        arguments: of the DPO trainer; `model`, `peft_config` and `quantization_config` are replaced.
        config: a `DPOConfig`.

    Raises:
        ValueError: the arguments leave nothing to train, or nothing to load the reference from.
    """
    _check(arguments)
    rows = _chosen_rows(arguments["train_dataset"])
    loading = _model_init_kwargs(arguments, config)
    base = create_model_from_path(arguments["model"], **loading)
    tokenizer = arguments.get("processing_class")
    if tokenizer is None:
        tokenizer = AutoProcessor.from_pretrained(arguments["model"], trust_remote_code=config.trust_remote_code)
        arguments["processing_class"] = tokenizer
    key = _key(rows, base, tokenizer, arguments.get("peft_config"), config)
    folder = Path(config.output_dir) / f"ref_init-{key}"
    if (folder / "model").is_dir():
        logger.info(f"ref_init='sft_on_chosen': {folder} was made from the same data, model and settings.")
    else:
        _train(base, rows, tokenizer, arguments.get("peft_config"), config, folder)
    del base
    gc.collect()
    _use(arguments, str(folder / "model"), loading)


def _check(arguments: dict[str, Any]) -> None:
    if arguments.get("ref_model") is not None:
        raise ValueError("ref_init='sft_on_chosen' makes the reference, but `ref_model` was given. Leave one out.")
    if not isinstance(arguments.get("model"), str):
        raise ValueError(
            "ref_init='sft_on_chosen' loads the model once for the reference and once for the policy. Give `model` as "
            f"a name or a path, not as a {type(arguments.get('model')).__name__}."
        )
    dataset = arguments.get("train_dataset")
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"ref_init='sft_on_chosen' needs the whole train_dataset, got a {type(dataset).__name__}. Use a Dataset, "
            "or ref_init='given'."
        )
    if {"image", "images"} & set(dataset.column_names):
        raise ValueError("ref_init='sft_on_chosen' is for text. Train the reference with SFTTrainer, and give it.")


def _chosen_rows(dataset: Any) -> Any:
    """(prompt, completion) rows, the completion being the chosen answer."""
    if "prompt" not in dataset.column_names:
        dataset = dataset.map(trl.extract_prompt, desc="Extracting prompt from the chosen answers")
    extra = [name for name in ("tools", "chat_template_kwargs") if name in dataset.column_names]
    return dataset.select_columns(["prompt", "chosen", *extra]).rename_column("chosen", "completion")


def _model_init_kwargs(arguments: dict[str, Any], config: Any) -> dict[str, Any]:
    loading = dict(config.model_init_kwargs or {})
    if arguments.get("quantization_config") is not None:
        loading["quantization_config"] = arguments["quantization_config"]
    if PartialState().num_processes > 1:
        loading["device_map"] = None
    loading.setdefault("trust_remote_code", config.trust_remote_code)
    return loading


def _key(rows: Any, base: Any, tokenizer: Any, peft_config: Any, config: Any) -> str:
    """16 hex digits over everything that changes the result."""
    digest = hashlib.sha256(hash_module(base).encode())
    settings = {name: getattr(config, name) for name in SHARED_FIELDS if name not in ("save_strategy", "save_steps")}
    settings |= {"epochs": config.ref_init_epochs, "learning_rate": config.ref_init_learning_rate}
    settings |= {"processes": PartialState().num_processes, "template": getattr(tokenizer, "chat_template", None)}
    settings |= {"adapter": None if peft_config is None else peft_config.to_dict()}
    digest.update(json.dumps(settings, sort_keys=True, default=_sorted_text).encode())
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _sorted_text(value: Any) -> Any:
    """Sets have another order in every process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _train(base: Any, rows: Any, tokenizer: Any, peft_config: Any, config: Any, folder: Path) -> None:
    logger.info(f"ref_init='sft_on_chosen': {len(rows)} chosen answers, {config.ref_init_epochs:g} epoch(s), {folder}.")
    trainer = trl.SFTTrainer(
        model=base,
        args=trl.SFTConfig(
            output_dir=str(folder),
            num_train_epochs=config.ref_init_epochs,
            learning_rate=config.ref_init_learning_rate,
            report_to="none",
            save_total_limit=1,
            **{name: getattr(config, name) for name in SHARED_FIELDS},
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=_last_whole_checkpoint(folder))
    partial = folder / "model.partial"
    trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        os.replace(partial, folder / "model")
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()


def _last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; a kill may leave half of one."""
    for part in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2])):
        if (part / TRAINER_STATE_NAME).is_file():
            return str(part)
        shutil.rmtree(part, ignore_errors=True)
    return None


def _use(arguments: dict[str, Any], folder: str, loading: dict[str, Any]) -> None:
    if arguments.get("peft_config") is None:
        arguments["model"] = folder
        return
    from peft import PeftModel

    # TRL copies a trained adapter to a frozen "ref" adapter: policy and reference start equal, on one base.
    base = create_model_from_path(arguments["model"], **dict(loading))
    arguments["model"] = PeftModel.from_pretrained(base, folder, is_trainable=True)
    arguments["peft_config"] = arguments["quantization_config"] = None

"""`RewardTrainer`: TRL's, plus ensembles of reward models."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from transformers.utils.logging import get_logger
from trl.trainer.reward_trainer import RewardTrainer as TRL_RewardTrainer
from typing_extensions import override

from trl_ext.formulas.reward_model import bradley_terry_loss
from trl_ext.models.quantized import prepare_quantized
from trl_ext.rewards.calibration import calibrate
from trl_ext.rewards.members import Adapters, Heads, Members, StoredModels, member_name
from trl_ext.rewards.model_scorer import resolve_format
from trl_ext.rewards.reward_card import CARD_FILE, RewardCard
from trl_ext.seams.reward import RewardSeams
from trl_ext.trainers.bootstrap import bootstrap_weights
from trl_ext.trainers.preflight import check_peft_trainable, check_trainable
from trl_ext.trainers.reward_config import RewardOptions
from trl_ext.trainers.reward_heads import Replay, load_for_heads
from trl_ext.trainers.reward_start import start_of_member

logger = get_logger(__name__)
_CHECKPOINTS = shutil.ignore_patterns("checkpoint-*", "README.md")


class RewardTrainer(RewardSeams, trl.RewardTrainer):
    """Drop-in for [`trl.RewardTrainer`]; the options are in [`RewardConfig`]. Trained members are scored through
    [`RewardEnsemble.load`] with the folder that `save_model` wrote.

    With `ensemble_kind` "adapters" or "models" this object is the trainer of member 0; `train` then trains the others.

    Raises:
        ValueError: when it is built, naming what cannot work and the fix.
    """

    _ext_options: RewardOptions | None = None
    _ext_heads: int = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        config = given.arguments.get("args")
        options = config if isinstance(config, RewardOptions) else None
        if isinstance(given.arguments.get("model"), torch.nn.Module):
            check_peft_trainable(given.arguments["model"], given.arguments.get("peft_config"))
        prepare_quantized(given.arguments)
        self._ext_options = options
        self._ext_text_format = _text_format(given.arguments.get("train_dataset"))
        self._ext_card: RewardCard | None = None
        self._ext_given = dict(given.arguments)
        if options is not None and options.ensemble_size > 1:
            if options.ensemble_kind == "heads":
                self._ext_heads = options.ensemble_size
                given.arguments["model"] = load_for_heads(given.arguments, config, options.ensemble_size)
                given.arguments["quantization_config"] = None
            else:
                _check_sequential(given.arguments, options)
                given.arguments |= self._ext_arguments_of(0)
        super().__init__(*given.args, **given.kwargs)
        check_trainable(self.model)
        if self._ext_heads > 1:
            # TRL takes models with one label; the scores of all heads are its columns from here on.
            self.model.config.num_labels = self._ext_heads

    @property
    def _ext_sequential(self) -> bool:
        options = self._ext_options
        return options is not None and options.ensemble_size > 1 and options.ensemble_kind != "heads"

    @property
    def _ext_folder(self) -> Path:
        """The folder of the whole ensemble; `args.output_dir` is the one of member 0 for the last two kinds."""
        folder = Path(self.args.output_dir)
        return folder.parent if self._ext_sequential else folder

    # ---- loss of the heads -------------------------------------------------------------------------------------

    @override
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._ext_heads == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**{name: value for name, value in inputs.items() if name != "margin"}, use_cache=False)
        # TRL logs its metrics for the mean of the members.
        with torch.no_grad():
            mean = outputs.logits.mean(-1, keepdim=True)
            super().compute_loss(Replay(mean), dict(inputs), False, num_items_in_batch)
        chosen, rejected = outputs.logits.chunk(2)  # (B, M) each
        losses = bradley_terry_loss(chosen, rejected, inputs.get("margin"), self.args.center_rewards_coefficient)
        if self.ext_mode == "train" and self.args.ensemble_bootstrap:
            losses = losses * bootstrap_weights(
                inputs["input_ids"], inputs["attention_mask"], self._ext_heads, self.args.seed
            )
        self._ext_log_heads(chosen.detach(), rejected.detach())
        loss = losses.mean(0).sum()
        return (loss, outputs) if return_outputs else loss

    def _ext_log_heads(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        margins: Any = self.accelerator.gather_for_metrics((chosen - rejected).float())
        accuracies = (margins > 0).float().mean(0)
        self.ext_log("ensemble/accuracy_min", accuracies.min().item())
        self.ext_log("ensemble/accuracy_max", accuracies.max().item())
        self.ext_log("ensemble/disagreement", margins.std(1, correction=0).mean().item())

    # ---- members one after another -----------------------------------------------------------------------------

    def _ext_arguments_of(self, member: int) -> dict[str, Any]:
        """What differs for a member: its folder, seed and bootstrap sample."""
        config = copy.copy(self._ext_given["args"])
        config.output_dir = str(Path(config.output_dir) / member_name(member))
        config.seed = config.seed + member
        rows = self._ext_given["train_dataset"]
        if config.ensemble_bootstrap:
            draw = np.random.default_rng([self._ext_given["args"].seed, member])
            rows = rows.select(draw.integers(len(rows), size=len(rows)))
        changed = {"args": config, "train_dataset": rows}
        return changed | start_of_member(self._ext_given, config, member)

    @override
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._ext_sequential:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        else:
            output = self._ext_train_members(resume_from_checkpoint, args, kwargs)
        self._ext_calibrate()
        return output

    def _ext_train_members(self, resume: Any, args: Any, kwargs: Any) -> Any:
        size = self._ext_options.ensemble_size if self._ext_options is not None else 1
        output = None
        if not self._ext_is_done(0):
            output = super().train(_last_checkpoint(self.args.output_dir) if resume else None, *args, **kwargs)
            self._ext_finish(self, 0)
        for member in range(1, size):
            if self._ext_is_done(member):
                continue
            arguments = self._ext_given | self._ext_arguments_of(member)
            trainer = TRL_RewardTrainer(**arguments)
            logger.info(f"Reward ensemble: member {member} of {size}")
            trainer.train(_last_checkpoint(arguments["args"].output_dir) if resume else None)
            self._ext_finish(trainer, member)
            del trainer
        return output

    def _ext_is_done(self, member: int) -> bool:
        return (self._ext_folder / member_name(member) / CARD_FILE).is_file()

    def _ext_finish(self, trainer: Any, member: int) -> None:
        folder = self._ext_folder / member_name(member)
        TRL_RewardTrainer.save_model(trainer, str(folder))
        if self.args.should_save:
            self._ext_new_card(kind="single", size=1).save(folder)  # last: it says that the member is done
        self.accelerator.wait_for_everyone()

    # ---- calibration and saving --------------------------------------------------------------------------------

    def _ext_new_card(self, kind: str, size: int) -> RewardCard:
        return RewardCard(kind, size, resolve_format(self._ext_text_format, self.processing_class))

    def _ext_members(self) -> Members:
        """The trained members, to be scored."""
        options = self._ext_options
        if options is None or not self._ext_sequential:
            return Heads(self.model, self._ext_heads)
        folders = [str(self._ext_folder / member_name(member)) for member in range(options.ensemble_size)]
        if options.ensemble_kind == "models":
            return StoredModels(folders, self.model)
        for folder in folders:
            self.model.load_adapter(folder, adapter_name=Path(folder).name)
        return Adapters(self.model, [Path(folder).name for folder in folders])

    def _ext_all_rows(self) -> Any:
        """The training pairs as tokens; those of member 0 are its bootstrap sample."""
        if not self._ext_sequential:
            return self.train_dataset
        return self.ext_tokenised(self._ext_given["train_dataset"])

    def _ext_calibrate(self) -> None:
        options = self._ext_options
        if options is None:
            return
        kind = options.ensemble_kind if options.ensemble_size > 1 else "single"
        self._ext_card = self._ext_new_card(kind, options.ensemble_size)
        if options.calibration_rows:
            held_out = self.eval_dataset is not None and not isinstance(self.eval_dataset, dict)
            rows = self.eval_dataset if held_out else self._ext_all_rows()
            was_training = self.model.training
            self.model.eval()
            self._ext_card = calibrate(self._ext_card, self._ext_members(), rows, options.calibration_rows, held_out)
            self.model.train(was_training)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call or not self._ext_sequential:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            self._ext_copy_members(Path(output_dir or self._ext_folder))
        if self._ext_card is not None and not _internal_call and self.args.should_save:
            self._ext_card.save(output_dir or self._ext_folder)

    def _ext_copy_members(self, target: Path) -> None:
        names: Sequence[str] = [member_name(member) for member in range(self.args.ensemble_size)]
        for name in names:
            source = self._ext_folder / name
            if source.resolve() != (target / name).resolve():
                shutil.copytree(source, target / name, ignore=_CHECKPOINTS, dirs_exist_ok=True)
        self.processing_class.save_pretrained(target)


def _text_format(dataset: Any) -> str | None:
    """How TRL renders these rows; None when they are tokens already."""
    if dataset is None or isinstance(dataset, dict):
        return None
    first = next(iter(dataset), None)
    if first is None or "chosen" not in first:
        return None
    return "chat" if trl.is_conversational(first) else "text"


def _check_sequential(arguments: dict[str, Any], options: RewardOptions) -> None:
    if not isinstance(arguments.get("model"), str):
        raise ValueError(
            f"ensemble_kind={options.ensemble_kind!r} loads the base for each member. Give `model` as a name or a "
            f"path, not as a {type(arguments.get('model')).__name__}."
        )
    stored = RewardCard.load(arguments["model"])
    if options.ensemble_kind == "adapters" and arguments.get("peft_config") is None and stored is None:
        raise ValueError(
            "ensemble_kind='adapters' needs a peft_config (use_peft on the command line). Or use ensemble_kind='heads'."
        )
    if not hasattr(arguments.get("train_dataset"), "select"):
        raise ValueError(
            "An ensemble of adapters or models needs the whole train_dataset, for its bootstrap samples. Use a "
            "Dataset, or ensemble_kind='heads'."
        )


def _last_checkpoint(folder: str) -> str | None:
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(folder) if Path(folder).is_dir() else None

"""`RewardEnsemble`: several reward models as one reward function that is careful where they disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from transformers.utils.logging import get_logger

from trl_ext.formulas.ensemble import EnsembleReduction, reduce_ensemble
from trl_ext.rewards.calibration import moments, standardise
from trl_ext.rewards.loading import load_tokenizer
from trl_ext.rewards.members import Members, load_members, positions_of, score_fitting, tokenizer_folder
from trl_ext.rewards.model_scorer import RewardModelScorer, resolve_format
from trl_ext.rewards.rendering import render
from trl_ext.rewards.reward_card import RewardCard

logger = get_logger(__name__)

# Called with prompts, completions and the row's columns; answers (m, N) scores.
Scorer = Callable[..., torch.Tensor]


class RewardEnsemble:
    """M reward models reduced to one score, for `reward_funcs` of every TRL trainer, builders and evaluation.

    Make one with `RewardEnsemble.load(folder)` (trained by `RewardTrainer`) or `RewardEnsemble.of([...])`.

    A member that fails for a row (NaN, None, an exception) is left out for that row and counted; with fewer than
    `min_members` scores the row is NaN, which TRL takes as "not applicable", never 0. Leaving a member out changes the
    jury: watch `<name>/failed`.

    Args:
        scorers: each answers one or more members' scores.
        sizes: members of each. reduce: "mean", "min", "median", "lcb" or "uwo", see `reduce_ensemble`. coef: weight of
            the disagreement in the last two.
        min_members: scores that a row needs; unset = more than half.
        mean, std: of each member on a fixed calibration set; empty = scores are used as they are.
        temperature: of the margin of standardised scores, for `preference_probability`.
        name: for logs.

    Metrics (TRL's `log_metric`): `<name>/member_<m>/mean`, `<name>/std` (over members, mean over rows), `<name>/failed`
    (fraction of scores). Columns of the completions table (`log_extra`): `<name>/std`.

    Raises:
        ValueError: an unknown reduction, a bad coefficient or number of members; at a call, a member that returns
            another number of scores than there are completions, with its name.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        sizes: Sequence[int],
        *,
        reduce: EnsembleReduction = "mean",
        coef: float = 1.0,
        min_members: int | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        temperature: float = 1.0,
        name: str = "reward_ensemble",
    ) -> None:
        self.size = sum(sizes)
        if reduce not in get_args(EnsembleReduction):
            raise ValueError(f"reduce={reduce!r} is unknown. Use one of {list(get_args(EnsembleReduction))}.")
        if not (math.isfinite(coef) and coef >= 0):
            raise ValueError(f"coef={coef} must be at least 0: a negative weight would pay for disagreement.")
        if self.size == 0:
            raise ValueError("An ensemble needs at least one member.")
        self.min_members = self.size // 2 + 1 if min_members is None else min_members
        if not 1 <= self.min_members <= self.size:
            raise ValueError(f"min_members={min_members} must be between 1 and the number of members, {self.size}.")
        if len(mean) != len(std) or len(mean) not in (0, self.size):
            raise ValueError(f"{len(mean)} means and {len(std)} standard deviations for {self.size} members.")
        self._scorers, self._sizes = list(scorers), list(sizes)
        self.reduce, self.coef = reduce, coef
        self.mean, self.std, self.temperature = list(mean), list(std), temperature
        self.__name__ = name

    @classmethod
    def load(cls, folder: str | Path, *, tokens_per_batch: int = 16384, **options: Any) -> RewardEnsemble:
        """The reward model or ensemble that `RewardTrainer.save_model` wrote, with its calibration.

        Args:
            options: `reduce`, `coef`, `min_members`, `name`; others go to `from_pretrained` (`dtype`,
                `quantization_config`, `device_map`).

        Raises:
            ValueError: the folder has no `trl_ext_reward.json`, or lacks a trained head.
        """
        card = RewardCard.load(folder)
        if card is None:
            raise ValueError(
                f"{folder} holds no trl_ext_reward.json, which RewardTrainer.save_model writes. For any other reward "
                "model use RewardEnsemble.of([RewardModelScorer(path), ...])."
            )
        ours = {key: options.pop(key) for key in ("reduce", "coef", "min_members", "name") if key in options}
        members = load_members(folder, card, **options)
        tokenizer = load_tokenizer(str(tokenizer_folder(Path(folder))), members.model)
        text_format = resolve_format(card.text_format, tokenizer)

        def scorer(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> torch.Tensor:
            rows = render(prompts, completions, tokenizer, text_format)
            return score_fitting(members, rows, tokens_per_batch, positions_of(members.config))

        calibration: dict[str, Any] = {"mean": card.mean, "std": card.std, "temperature": card.temperature}
        ensemble = cls([scorer], [card.size], name=ours.pop("name", Path(folder).name), **calibration, **ours)
        ensemble.members, ensemble.folder = members, Path(folder)
        return ensemble

    members: Members | None = None
    folder: Path | None = None

    @classmethod
    def of(cls, members: Sequence[Any], **options: Any) -> RewardEnsemble:
        """An ensemble of any reward functions, scorers, or names of reward models; they may differ in every way.

        They are on scales of their own: call `calibrate` with texts of the kind that will be scored, unless `reduce` is
        "mean" and the scales are meant.
        """
        functions = [RewardModelScorer(member) if isinstance(member, (str, Path)) else member for member in members]
        return cls([_guarded(function) for function in functions], [1] * len(functions), **options)

    def member_scores(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> torch.Tensor:
        """(M, N) float32, standardised where a calibration is known; NaN = this member failed for this row."""
        parts = []
        for scorer, size in zip(self._scorers, self._sizes, strict=True):
            part = scorer(prompts=prompts, completions=completions, **columns)
            if tuple(part.shape) != (size, len(completions)):
                raise ValueError(f"{self.__name__}: {tuple(part.shape)} scores, expected ({size}, {len(completions)}).")
            parts.append(part.float())
        scores = torch.cat(parts)
        return standardise(scores.masked_fill(~scores.isfinite(), torch.nan), self.mean, self.std)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """One reduced score per completion; NaN where too few members have one."""
        scores = self.member_scores(prompts, completions, **columns)
        if log_metric is not None:
            self._log(scores, log_metric)
        if log_extra is not None:
            log_extra(f"{self.__name__}/std", _nan_std(scores).tolist())
        return self.combine(scores).tolist()

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        """(N,) from (M, N): rows with the same members present are reduced together."""
        present = scores.isfinite()
        combined = torch.full((scores.shape[1],), torch.nan)
        for pattern in present.unique(dim=1).T:
            if int(pattern.sum()) < self.min_members:
                continue
            columns = (present == pattern.unsqueeze(1)).all(0)
            combined[columns] = reduce_ensemble(scores[pattern][:, columns], self.reduce, self.coef)
        return combined

    def calibrate(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> None:
        """Standardise every member on these texts: mean 0 and standard deviation 1 from here on."""
        self.mean, self.std = [], []
        self.mean, self.std = moments(self.member_scores(prompts, completions, **columns))

    def average_weights(self, target: str | Path) -> Path:
        """WARM: the members' weights averaged into one reward model in `target`; see `averaging.average_weights`.

        Raises:
            ValueError: the ensemble was not loaded from one folder.
        """
        from trl_ext.rewards.averaging import average_weights

        if self.folder is None:
            raise ValueError("Only an ensemble from RewardEnsemble.load(folder) has weights that can be averaged.")
        return average_weights(self.folder, target)

    def preference_probability(self, margins: torch.Tensor) -> torch.Tensor:
        """Calibrated probability that the first of two answers is better, from margins of the mean of the members."""
        return torch.sigmoid(margins / self.temperature)

    def _log(self, scores: torch.Tensor, log_metric: Callable[[str, float], None]) -> None:
        means = {f"member_{member}/mean": row.nanmean().item() for member, row in enumerate(scores)}
        values = means | {"std": _nan_std(scores).nanmean().item(), "failed": scores.isnan().float().mean().item()}
        for name, value in values.items():
            if math.isfinite(value):  # TRL averages over a logging step, where one NaN hides all the rest
                log_metric(f"{self.__name__}/{name}", value)


def _guarded(function: Any) -> Scorer:
    """A reward function whose exception makes NaN of its row of scores, with a warning, once per kind."""
    name = getattr(function, "__name__", type(function).__name__)

    def scorer(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> torch.Tensor:
        try:
            values = function(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            logger.warning_once(f"Reward member {name} failed ({type(error).__name__}: {error}); NaN for its scores.")
            return torch.full((1, len(completions)), torch.nan)
        if len(values) != len(completions):
            raise ValueError(
                f"Reward member {name} returned {len(values)} scores for {len(completions)} completions. It must "
                "return one score (or None) per completion."
            )
        return torch.tensor([[math.nan if value is None else float(value) for value in values]])

    return scorer


def _nan_std(scores: torch.Tensor) -> torch.Tensor:
    """(N,) standard deviation (ddof 0) over the members that have a score."""
    deviations = scores - scores.nanmean(0)
    return deviations.square().nanmean(0).sqrt()

"""`RewardModelScorer`: one reward model as a reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import get_logger

from trl_ext.rewards.loading import agree_on_pad, load_classifier, load_tokenizer
from trl_ext.rewards.members import Heads, positions_of, score_fitting
from trl_ext.rewards.rendering import FORMATS, render
from trl_ext.rewards.reward_card import RewardCard

logger = get_logger(__name__)


class RewardModelScorer:
    """A sequence-classification reward model, for `reward_funcs` of every TRL trainer, builders and evaluation.

    It uses the reward model's own tokenizer and chat template, scores equal texts once, and works in micro-batches of
    bounded size sorted by length; the result depends on neither padding nor batch (to 1e-5 in float32).

    Args:
        model: name or folder (an adapter folder too), or a loaded sequence-classification model with one label.
        tokenizer: needed with a loaded model; else the one beside the model.
        text_format: "chat" or "text", see `rendering.render`; unset = what the model's folder says, else "chat" when
            the tokenizer has a chat template.
        tokens_per_batch: tokens of one forward, padding included; bounds memory.
        max_length: longer texts are not scored (NaN), as TRL's RewardTrainer does not train on them; unset = the
            model's `max_position_embeddings`.
        name: for logs; the folder's name by default.
        model_kwargs: for `from_pretrained`.

    Raises:
        ValueError: no trained score head, several labels, or an unknown format.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        text_format: str | None = None,
        tokens_per_batch: int = 16384,
        max_length: int | None = None,
        name: str | None = None,
        **model_kwargs: Any,
    ) -> None:
        source = str(model) if isinstance(model, (str, Path)) else None
        card = RewardCard.load(source) if source is not None else None
        self.model = load_classifier(source, **model_kwargs) if source is not None else _checked(model)
        if tokenizer is None and source is None:
            raise ValueError("A loaded model needs its tokenizer: RewardModelScorer(model, tokenizer).")
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(str(source), self.model)
        agree_on_pad(self.model, self.tokenizer)
        self.text_format = resolve_format(text_format or (card.text_format if card else None), self.tokenizer)
        self.tokens_per_batch = tokens_per_batch
        self.max_length = max_length or positions_of(self.model.config)
        self.__name__ = name or (Path(source).name if source else "reward_model")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float]:
        """One score per completion; NaN where a text is too long to be scored."""
        scores = self.score(prompts, completions)
        missing = scores.isnan().float().mean().item() if len(scores) else 0.0
        if missing:
            logger.warning_once(f"{self.__name__}: some texts have more than {self.max_length} tokens; NaN for them.")
            if log_metric is not None:
                log_metric(f"{self.__name__}/too_long", missing)
        return scores.tolist()

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> torch.Tensor:
        """(N,) float32 scores."""
        rows = render(prompts, completions, self.tokenizer, self.text_format)
        return score_fitting(Heads(self.model, 1), rows, self.tokens_per_batch, self.max_length)[0]


def resolve_format(text_format: str | None, tokenizer: Any) -> str:
    """The format to use.

    Raises:
        ValueError: unknown, or "chat" without a chat template.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    resolved = text_format or ("chat" if has_template else "text")
    if resolved not in FORMATS:
        raise ValueError(f"text_format={resolved!r} is unknown. Use one of {list(FORMATS)}.")
    if resolved == "chat" and not has_template:
        raise ValueError("text_format='chat' needs a tokenizer with a chat template. Use text_format='text'.")
    return resolved


def _checked(model: Any) -> Any:
    if getattr(model.config, "num_labels", None) != 1:
        raise ValueError(
            f"The model has num_labels={getattr(model.config, 'num_labels', None)}, expected 1: one score per text. "
            "Load it with num_labels=1."
        )
    return model.eval()

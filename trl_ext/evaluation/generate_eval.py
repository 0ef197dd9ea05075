"""Before/after evaluation: sample completions on held-out prompts, score them, compare prompt by prompt."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from trl_ext.rewards.text import completion_text


@dataclass(frozen=True)
class Scored:
    """Completions of one policy on held-out prompts.

    `completions[p][s]` is sample s on prompt p, `rewards[name]` an array (prompts, samples), NaN = not applicable.
    """

    prompts: list[Any]
    completions: list[list[str]]
    rewards: dict[str, np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """One reward before and after training, in the reward's own unit.

    Means are over prompts (of each prompt's mean over samples); `*_spread` is the standard deviation over prompts;
    `low`..`high` is the 95 % bootstrap interval of the paired difference `after - before`.
    """

    name: str
    prompts: int
    before: float
    before_spread: float
    after: float
    after_spread: float
    difference: float
    low: float
    high: float


def sample_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    samples: int = 4,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[str]]:
    """Sample from `model` with left padding, leaving its mode and torch's random state as they were.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, with a pad token.
        prompts: strings, or lists of messages, which go through the chat template.
        samples: completions per prompt.
        max_new_tokens: limit of each completion, in tokens.
        temperature: of sampling; use the one trained with, so that the policy measured is the policy trained.
        seed: the same seed before and after makes the comparison repeatable.
        batch_size: completions generated at a time.
        chat_template_kwargs: for the chat template, as in training.

    Returns:
        Per prompt, `samples` texts.
    """
    template = chat_template_kwargs or {}
    texts = [text for text in (_prompt_text(tokenizer, p, template) for p in prompts) for _ in range(samples)]
    # A chat template writes the special tokens itself; a plain text gets the tokenizer's, as in training.
    add_special_tokens = isinstance(prompts[0], str)
    was_training, side = model.training, tokenizer.padding_side
    flat: list[str] = []
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    tokenizer.padding_side = "left"
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode():
            torch.manual_seed(seed)
            for start in range(0, len(texts), batch_size):
                batch = tokenizer(
                    texts[start : start + batch_size],
                    return_tensors="pt",
                    padding=True,
                    add_special_tokens=add_special_tokens,
                ).to(model.device)
                output = model.generate(
                    **batch,
                    max_new_tokens=max_new_tokens,
                    do_sample=True,
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=tokenizer.pad_token_id,
                    use_cache=True,
                )
                new_ids = output[:, batch["input_ids"].shape[1] :]
                flat += tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    finally:
        tokenizer.padding_side = side
        model.train(was_training)
    return [flat[i : i + samples] for i in range(0, len(flat), samples)]


def _prompt_text(tokenizer: Any, prompt: Any, template: dict[str, Any]) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **template)


def check_reward_functions(reward_funcs: Sequence[Any]) -> None:
    """Raise `TypeError` for what `score` cannot call: a reward model, or an asynchronous function."""
    for function in reward_funcs:
        if isinstance(function, torch.nn.Module) or inspect.iscoroutinefunction(function):
            raise TypeError(f"the evaluation calls reward functions; wrap {function!r} in a synchronous function")


def score(
    completions: list[list[str]],
    dataset: Any,
    reward_funcs: Sequence[Callable[..., list[float | None]]],
    names: Sequence[str] | None = None,
) -> Scored:
    """Score sampled completions with reward functions, giving them the data set's columns as TRL does.

    Args:
        completions: per row of `dataset`, its samples (the same number for each).
        dataset: has a column `prompt`; the others go to the reward functions by name.
        reward_funcs: TRL reward functions that need texts and columns only (not token ids or the trainer's state).
        names: of the rewards; by default each function's `__name__`.
    """
    samples = len(completions[0])
    columns = {
        name: [value for value in dataset[name] for _ in range(samples)]
        for name in dataset.column_names
        if name not in ("prompt", "completion")
    }
    prompts = list(dataset["prompt"])
    flat_prompts = [prompt for prompt in prompts for _ in range(samples)]
    flat: list[Any] = [text for texts in completions for text in texts]
    if not isinstance(prompts[0], str):  # TRL's conversational format
        flat = [[{"role": "assistant", "content": text}] for text in flat]
    rewards = {}
    for name, function in zip(names or [function.__name__ for function in reward_funcs], reward_funcs, strict=True):
        values = function(prompts=flat_prompts, completions=flat, **columns)
        array = np.array([np.nan if value is None else float(value) for value in values])
        rewards[name] = array.reshape(len(completions), samples)
    return Scored([completion_text(prompt) for prompt in prompts], completions, rewards)


def overall(scored: Scored, ranges: dict[str, tuple[float, float]]) -> np.ndarray:
    """All rewards of a sample on one axis: each put on 0..1 by its range, then averaged; array (prompts, samples).

    Args:
        scored: the completions and rewards.
        ranges: lowest and highest value of every reward in `scored`; a reward without a range is left out.
    """
    parts = [
        (scored.rewards[name] - low) / (high - low) for name, (low, high) in ranges.items() if name in scored.rewards
    ]
    return np.nanmean(np.stack(parts), axis=0)


def compare(name: str, before: np.ndarray, after: np.ndarray, resamples: int = 10_000, seed: int = 0) -> Comparison:
    """Compare two arrays (prompts, samples) of the same prompts; prompts without a value are left out.

    The interval resamples prompts, not completions: samples of one prompt are not independent evidence.

    Raises:
        ValueError: shapes without common prompts, or no prompt has a value.
    """
    if len(before) != len(after):
        raise ValueError(f"{name}: {len(before)} prompts before, {len(after)} after; they must be the same prompts")
    applies = ~(np.isnan(before).all(axis=1) | np.isnan(after).all(axis=1))
    if not applies.any():
        raise ValueError(f"{name}: no held-out prompt has a value")
    first, second = np.nanmean(before[applies], axis=1), np.nanmean(after[applies], axis=1)
    difference = second - first
    low, high = _interval(difference, resamples, seed)
    spread = {"ddof": 1} if len(difference) > 1 else {}
    return Comparison(
        name=name,
        prompts=len(difference),
        before=float(first.mean()),
        before_spread=float(first.std(**spread)),
        after=float(second.mean()),
        after_spread=float(second.std(**spread)),
        difference=float(difference.mean()),
        low=float(low),
        high=float(high),
    )


def _interval(difference: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; the mean itself where nothing varies (SciPy would give NaN)."""
    if len(difference) < 2 or np.ptp(difference) == 0:
        return float(difference.mean()), float(difference.mean())
    result = stats.bootstrap((difference,), np.mean, n_resamples=resamples, method="percentile", rng=seed)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def compare_all(before: Scored, after: Scored, ranges: dict[str, tuple[float, float]]) -> list[Comparison]:
    """One comparison per reward, then `overall` (0..1) over the rewards that have a range."""
    # A reward that needs the whole group (group_diversity) scores no completion on its own.
    scored = [name for name, values in before.rewards.items() if not np.isnan(values).all()]
    rows = [compare(name, before.rewards[name], after.rewards[name]) for name in scored]
    if any(name in before.rewards for name in ranges):
        rows.append(compare("overall", overall(before, ranges), overall(after, ranges)))
    return rows

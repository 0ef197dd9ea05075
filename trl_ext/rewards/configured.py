"""Reward models named on the command line or in a recipe: `ensemble:FOLDER?reduce=lcb&coef=0.5`, `model:FOLDER`.

TRL's scripts take reward functions by their import path, so what is loaded here becomes an attribute of this module.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

_CONVERT = {"coef": float, "min_members": int, "tokens_per_batch": int, "max_length": int}
_OPTIONS = {
    "ensemble": ("reduce", "coef", "min_members", "name", "tokens_per_batch"),
    "model": ("text_format", "max_length", "name", "tokens_per_batch"),
}


def import_path(text: str) -> str:
    """The import path of the reward function that `text` names; other texts are returned as they are.

    Raises:
        ValueError: an unknown option after `?`, or a value of the wrong type.
    """
    kind = text.partition(":")[0]
    if kind not in _OPTIONS or ":" not in text:
        return text
    name = f"reward_{sum(key.startswith('reward_') for key in globals())}"
    globals()[name] = _load(kind, text)
    return f"{__name__}.{name}"


def _load(kind: str, text: str) -> Any:
    address = urlsplit(text.partition(":")[2])
    options: dict[str, Any] = dict(parse_qsl(address.query, strict_parsing=bool(address.query)))
    unknown = sorted(set(options) - set(_OPTIONS[kind]))
    if unknown:
        raise ValueError(f"reward_funcs: {text!r} has unknown option(s) {unknown}. Known: {list(_OPTIONS[kind])}.")
    for key, value in options.items():
        try:
            options[key] = _CONVERT.get(key, str)(value)
        except ValueError:
            raise ValueError(f"reward_funcs: {key}={value!r} in {text!r} must be a number.") from None
    if kind == "ensemble":
        from trl_ext.rewards.ensemble import RewardEnsemble

        return RewardEnsemble.load(address.path, **options)
    from trl_ext.rewards.model_scorer import RewardModelScorer

    return RewardModelScorer(address.path, **options)

"""Instruction reward: the share of IFEval / IFBench instructions a completion follows, by if-verifiable's checkers."""

from functools import lru_cache
from typing import Any

from trl_ext.rewards.text import completion_text

_HINT = "the instruction reward needs if-verifiable: pip install 'trl-ext[quickstart]'"


@lru_cache(maxsize=1)
def _ifeval() -> dict[str, Any]:
    try:
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
        from langdetect import DetectorFactory
    except ImportError as error:
        raise ImportError(_HINT) from error
    # langdetect samples; without a seed the same completion can get two scores.
    DetectorFactory.seed = 0
    return dict(INSTRUCTION_DICT)


@lru_cache(maxsize=1)
def _ifbench() -> dict[str, Any]:
    try:
        import nltk
    except ImportError as error:
        raise ImportError(_HINT) from error
    download = nltk.download
    # The module fetches nltk data when imported, which hangs or prints errors without a network.
    nltk.download = lambda *args, **kwargs: False
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise ImportError(_HINT) from error
    finally:
        nltk.download = download
    return dict(INSTRUCTION_DICT)


def _checker_class(instruction_id: str) -> Any:
    for registry in (_ifeval, _ifbench):
        if instruction_id in registry():
            return registry()[instruction_id]
    known = ", ".join(sorted({**_ifeval(), **_ifbench()}))
    raise ValueError(f"unknown instruction id {instruction_id!r}; known: {known}")


def build_checker(instruction_id: str, arguments: dict[str, Any] | None) -> tuple[Any, str]:
    """A checker set up for one instruction, and the English sentence that asks for it.

    Args:
        instruction_id: id in if-verifiable's registries.
        arguments: the instruction's own arguments; None values (which Arrow adds to fill columns) are left out.

    Raises:
        ValueError: unknown id.
    """
    checker = _checker_class(instruction_id)(instruction_id)
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    return checker, checker.build_description(**given)


def _follows(text: str, instruction_id: str, arguments: dict[str, Any] | None, prompt: str) -> bool:
    checker, _ = build_checker(instruction_id, arguments)
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=prompt)
    try:
        return bool(text.strip()) and bool(checker.check_following(text))
    except LookupError as error:
        raise RuntimeError(f"instruction {instruction_id!r} needs nltk data that is not installed; drop it") from error


def instruction_reward(
    completions: list[Any],
    prompts: list[Any] | None = None,
    instruction_id_list: list[list[str] | None] | None = None,
    instruction_kwargs: list[list[dict[str, Any] | None] | None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Share of its row's instructions each completion follows, in [0, 1].

    Args:
        completions: the texts.
        prompts: the prompts, needed by the few checkers that look at them.
        instruction_id_list: dataset column, the ids of a row; None or [] when the row has none.
        instruction_kwargs: dataset column, one dict of arguments per id (None: no arguments in the whole row).

    Returns:
        One value per completion: None for a row without instructions, 0 for an empty completion.

    Raises:
        ValueError: unknown id, or ids and arguments of different number.
        RuntimeError: a checker needs nltk data that is not there.
    """
    rewards: list[float | None] = []
    for i, completion in enumerate(completions):
        ids = instruction_id_list[i] if instruction_id_list else None
        if not ids:
            rewards.append(None)
            continue
        arguments = (instruction_kwargs[i] if instruction_kwargs else None) or [None] * len(ids)
        if len(arguments) != len(ids):
            raise ValueError(f"row {i}: {len(ids)} instruction ids but {len(arguments)} instruction_kwargs")
        prompt = completion_text(prompts[i]) if prompts else ""
        text = completion_text(completion)
        followed = [_follows(text, name, args, prompt) for name, args in zip(ids, arguments, strict=True)]
        rewards.append(sum(followed) / len(followed))
    return rewards

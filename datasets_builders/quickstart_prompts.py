"""The quickstart's prompts: small sums from reasoning-gym, and writing tasks with if-verifiable instructions."""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

# The chat templates of small models put a long default system prompt here; a short one keeps CPU steps affordable.
_SYSTEM = {"role": "system", "content": "You are a cheerful assistant."}
_PLACES = "the sea,a garden,a market,a small village,the night sky,a library,a mountain path,an old bridge,a river"
_THINGS = "bread,tea,a bicycle,a kite,a letter,a clock,a violin,a map,winter,spring,rain,snow,a lamp,a song,a boat"
_BEINGS = "a cat,a dog,a teacher,a neighbour,a baker,a child,a farmer,a painter,an owl,a bee,a horse,a doctor,a fox"
TOPICS = [*_PLACES.split(","), *_THINGS.split(","), *_BEINGS.split(",")]
KEYWORDS = ["light", "friend", "smile", "day", "home", "heart", "warm", "world"]


def _sum_rows(count: int, seed: int) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("the quickstart prompts need reasoning-gym: pip install 'trl-ext[quickstart]'") from error
    items = reasoning_gym.create_dataset(
        "chain_sum", size=40 * count, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    # Each sum once, or a held-out prompt could equal a training one. The model of the quickstart knows no negatives.
    answers = {item["metadata"]["expression"]: item["answer"] for item in items if int(item["answer"]) >= 0}
    if len(answers) < count:
        raise ValueError(f"only {len(answers)} different one-digit sums, {count} asked: ask for fewer prompts")
    return [
        _row(f"What is {expression}? Say the result and something nice.", answer=result)
        for expression, result in list(answers.items())[:count]
    ]


def _writing_rows(count: int, seed: int) -> list[dict[str, Any]]:
    from trl_ext.rewards.instructions import build_checker

    pairs = [(topic, keyword) for topic in TOPICS for keyword in KEYWORDS]
    if len(pairs) < count:
        raise ValueError(f"{len(pairs)} different writing tasks exist, {count} asked: ask for fewer prompts")
    rows = []
    for topic, keyword in random.Random(seed).sample(pairs, count):
        ids = ["keywords:existence", "punctuation:no_comma"]
        arguments: list[dict[str, Any]] = [{"keywords": [keyword]}, {"keywords": None}]
        asked = " ".join(build_checker(*pair)[1] for pair in zip(ids, arguments, strict=True))
        rows.append(_row(f"Write one sentence about {topic}. {asked}", ids=ids, arguments=arguments))
    return rows


def _row(
    text: str,
    answer: str | None = None,
    ids: list[str] | None = None,
    arguments: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "prompt": [_SYSTEM, {"role": "user", "content": text}],
        "answer": answer,
        "instruction_id_list": ids,
        "instruction_kwargs": arguments,
    }


def build_quickstart_prompts(train: int = 80, heldout: int = 24, seed: int = 0) -> tuple["Dataset", "Dataset"]:
    """Training and held-out prompts, half sums and half writing tasks in each, no prompt in both.

    Args:
        train: number of training prompts.
        heldout: number of held-out prompts.
        seed: the same seed gives the same rows in the same order.

    Returns:
        Two data sets with the columns `prompt` (messages), `answer`, `instruction_id_list` and `instruction_kwargs`;
        the last three are None where a row has no such thing, and the reward then does not apply.

    Raises:
        ImportError: reasoning-gym or if-verifiable is not installed.
        ValueError: more prompts asked than exist.
    """
    from datasets import Dataset

    sums = _sum_rows(train // 2 + heldout // 2, seed)
    writing = _writing_rows(train - train // 2 + heldout - heldout // 2, seed)
    heldout_rows = sums[: heldout // 2] + writing[: heldout - heldout // 2]
    train_rows = sums[heldout // 2 :] + writing[heldout - heldout // 2 :]
    random.Random(seed).shuffle(train_rows)
    common = {str(row["prompt"]) for row in train_rows} & {str(row["prompt"]) for row in heldout_rows}
    if common:
        raise RuntimeError(f"{len(common)} held-out prompts are also training prompts")
    return Dataset.from_list(train_rows), Dataset.from_list(heldout_rows)

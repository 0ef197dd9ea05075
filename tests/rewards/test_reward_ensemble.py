"""RewardEnsemble: saved and loaded the same scores; missing scores are never 0; what is logged is what was scored."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import PartialState
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_ext
from tests.trainers.harness import base_config, prompts, spaces, text_of
from tests.trainers.harness import train as train_rollouts
from tests.trainers.reward_worker import (
    CHOSEN,
    QUESTIONS,
    lora,
    make_reward_model,
    message,
    one_by_one,
    pairs,
    settings,
)
from trl_ext import RewardEnsemble, RewardModelScorer
from trl_ext.models.tiny import build_tiny_model
from trl_ext.rewards.calibration import moments, standardise
from trl_ext.rewards.rendering import render
from trl_ext.rewards.reward_card import CARD_FILE, RewardCard

NAN = math.nan

# ---- trained, saved, loaded ------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "single": {},
    "single_lora": {"peft": True},
    "heads": {"ensemble_size": 3},
    "heads_lora": {"ensemble_size": 3, "peft": True},
    "adapters": {"ensemble_size": 3, "ensemble_kind": "adapters", "peft": True},
    "models": {"ensemble_size": 2, "ensemble_kind": "models"},
}


def train_reward_model(base: Path, folder: Path, text_format: str = "chat", **options: Any) -> Any:
    """A trainer that has trained a few steps and saved in `folder`."""
    given = {"peft_config": lora()} if options.pop("peft", False) else {}
    given |= {"processing_class": options.pop("processing_class", None)}
    trainer = trl_ext.RewardTrainer(
        model=str(base),
        args=trl_ext.RewardConfig(**settings(folder, max_steps=3) | options),
        train_dataset=pairs(text_format),
        eval_dataset=pairs(text_format, 4),
        **given,
    )
    trainer.train()
    trainer.save_model()
    return trainer


def members_by_hand(trainer: Any, base: Path, folder: Path) -> list[Any]:
    """The trained models: the one in memory, or each member as transformers and PEFT load it."""
    parts = sorted(folder.glob("member-*"))
    if not parts:
        return [trainer.model]
    models = []
    for part in parts:
        if (part / "adapter_config.json").is_file():
            trunk = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
            trunk.config.pad_token_id = trainer.processing_class.pad_token_id
            models.append(PeftModel.from_pretrained(trunk, part))
        else:
            models.append(AutoModelForSequenceClassification.from_pretrained(part, dtype=torch.float32))
    return models


def raw_scores(models: list[Any], tokenizer: Any, questions: list[Any], answers: list[Any], form: str) -> torch.Tensor:
    """(M, N), each text alone and without padding."""
    rows = render(questions, answers, tokenizer, form)
    return torch.cat([one_by_one(model, rows) for model in models])


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Trainer and folder of a kind, trained when it is first asked for."""
    known: dict[str, tuple[Any, Path]] = {}

    def get(kind: str) -> tuple[Any, Path]:
        if kind not in known:
            folder = tmp_path_factory.mktemp("trained") / kind
            known[kind] = train_reward_model(tiny_model, folder, **KINDS[kind]), folder
        return known[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_scores_are_those_in_memory(
    kind: str, trained: Callable[[str], tuple[Any, Path]], tiny_model: Path
) -> None:
    """Standardised with the numbers of the card. Catches: a fresh head, members in another order, one adapter twice."""
    trainer, folder = trained(kind)
    raw = raw_scores(members_by_hand(trainer, tiny_model, folder), trainer.processing_class, QUESTIONS, CHOSEN, "chat")
    card = RewardCard.load(folder)
    assert card is not None and card.size == len(raw) == KINDS[kind].get("ensemble_size", 1)
    ensemble = RewardEnsemble.load(folder)
    found = ensemble.member_scores(QUESTIONS, CHOSEN)
    expected = (raw - torch.tensor(card.mean)[:, None]) / torch.tensor(card.std)[:, None]
    # 1e-5 of a score, in the units of the standardised ones.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 / min(1.0, *card.std))
    assert len({tuple(row) for row in found.tolist()}) == len(found)
    assert found.std(1).min() > 0.02
    assert (ensemble.mean, ensemble.std, ensemble.temperature) == (card.mean, card.std, card.temperature)
    assert ensemble.__name__ == kind
    messages = [message("user", text) for text in QUESTIONS], [message("assistant", text) for text in CHOSEN]
    assert torch.equal(ensemble.member_scores(*messages), found)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_and_order_do_not_matter(kind: str, trained: Callable[[str], tuple[Any, Path]]) -> None:
    """One text at a time, the smallest budget, reversed. Catches: padding that is read, columns in another order."""
    _, folder = trained(kind)
    ensemble = RewardEnsemble.load(folder)
    found = ensemble.member_scores(QUESTIONS, CHOSEN)
    # 1e-5 of a score, in the units of the standardised ones.
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-5 / min(1.0, *ensemble.std)}
    alone = [ensemble.member_scores([q], [c]) for q, c in zip(QUESTIONS, CHOSEN, strict=True)]
    torch.testing.assert_close(torch.cat(alone, dim=1), found, **close)
    torch.testing.assert_close(ensemble.member_scores(QUESTIONS[::-1], CHOSEN[::-1]).flip(1), found, **close)
    small = RewardEnsemble.load(folder, tokens_per_batch=1)
    torch.testing.assert_close(small.member_scores(QUESTIONS, CHOSEN), found, **close)


@pytest.mark.parametrize("kind", ["heads", "adapters", "models"])
def test_forwards_of_an_ensemble(kind: str, trained: Callable[[str], tuple[Any, Path]]) -> None:
    """Equal texts once for each model; M heads are one forward. Catches: M passes through one trunk."""
    _, folder = trained(kind)
    ensemble = RewardEnsemble.load(folder, tokens_per_batch=60)
    members: Any = ensemble.members
    forwards: list[tuple[int, int]] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        forwards.append(tuple(kwargs["input_ids"].shape))

    for model in getattr(members, "models", None) or [members.model]:
        model.register_forward_pre_hook(record, with_kwargs=True)
    ensemble(QUESTIONS + QUESTIONS[:4], CHOSEN + CHOSEN[:4])
    assert sum(rows for rows, _ in forwards) == 8 * {"heads": 1, "adapters": 3, "models": 2}[kind]
    assert all(rows * width <= 60 or rows == 1 for rows, width in forwards)


def test_the_active_adapter_is_put_back(trained: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    """Also in the trainer, which goes on with its own. Catches: training that continues on the last member."""
    trainer, folder = trained("adapters")
    assert trainer.model.active_adapter == "default"
    assert all("default" in name for name, p in trainer.model.named_parameters() if p.requires_grad)
    members: Any = RewardEnsemble.load(folder).members
    members.model.set_adapter("member-1")
    with pytest.raises(ValueError, match="without a token"):
        members.score_rows([[]], 10)
    assert members.model.active_adapter == "member-1"


@pytest.mark.parametrize("kind", KINDS)
def test_the_pad_token_of_the_training_is_used(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Trained with pad = eos, unlike the base. The last token that is not pad is scored, so the pad token counts.

    Catches: the pad token of the base's config, which the folder of an adapter does not hold.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = tokenizer.eos_token
    options = KINDS[kind] | {"processing_class": tokenizer, "calibration_rows": 0}
    trainer = train_reward_model(tiny_model, tmp_path / "out", "text", **options)
    models = members_by_hand(trainer, tiny_model, tmp_path / "out")
    assert {model.config.get_text_config().pad_token_id for model in models} == {trainer.processing_class.eos_token_id}
    expected = raw_scores(models, trainer.processing_class, QUESTIONS, CHOSEN, "text")
    found = RewardEnsemble.load(tmp_path / "out").member_scores(QUESTIONS, CHOSEN)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_text_ensemble(tiny_model: Path, tmp_path: Path) -> None:
    """Trained on plain texts: scored as joined texts, and messages are refused. Catches: a template around them."""
    trainer = train_reward_model(tiny_model, tmp_path / "out", "text", ensemble_size=2, calibration_rows=0)
    ensemble = RewardEnsemble.load(tmp_path / "out")
    expected = raw_scores([trainer.model], trainer.processing_class, QUESTIONS, CHOSEN, "text")
    torch.testing.assert_close(ensemble.member_scores(QUESTIONS, CHOSEN), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="trained on plain texts"):
        ensemble([message("user", "a")], [message("assistant", "b")])


def test_load_passes_its_options(trained: Callable[[str], tuple[Any, Path]]) -> None:
    """Ours to the ensemble, the others to the model. Catches: an option that is swallowed."""
    _, folder = trained("heads")
    ensemble = RewardEnsemble.load(folder, reduce="uwo", coef=0.5, min_members=3, name="judges", dtype=torch.bfloat16)
    assert (ensemble.reduce, ensemble.coef, ensemble.min_members, ensemble.__name__) == ("uwo", 0.5, 3, "judges")
    assert ensemble.members is not None
    assert ensemble.members.model.dtype == torch.bfloat16  # type: ignore[attr-defined]
    default: Any = RewardEnsemble.load(folder)
    assert (default.reduce, default.min_members) == ("mean", 2)
    assert default.members.model.dtype == torch.float32
    assert RewardEnsemble.load(str(folder)).size == 3
    with pytest.raises(ValueError, match="reduce='worst'"):
        RewardEnsemble.load(folder, reduce="worst")


@pytest.mark.parametrize("kind", ["adapters", "models"])
def test_load_passes_options_to_every_member(kind: str, trained: Callable[[str], tuple[Any, Path]]) -> None:
    """Catches: the first member alone."""
    members: Any = RewardEnsemble.load(trained(kind)[1], dtype=torch.bfloat16).members
    models = getattr(members, "models", None) or [members.model]
    assert {model.get_base_model().dtype if kind == "adapters" else model.dtype for model in models} == {torch.bfloat16}


@pytest.mark.parametrize("reduce", ["mean", "min", "median", "lcb", "uwo"])
def test_a_loaded_ensemble_reduces_its_members(reduce: str, trained: Callable[[str], tuple[Any, Path]]) -> None:
    """By hand from the members' scores. Catches: raw scores reduced, coef that is lost."""
    ensemble = RewardEnsemble.load(trained("heads")[1], reduce=reduce, coef=0.7)
    scores = ensemble.member_scores(QUESTIONS, CHOSEN)
    mean, variance = scores.mean(0), scores.var(0, correction=0)
    expected = {
        "mean": mean,
        "min": scores.min(0).values,
        "median": scores.sort(0).values[1],
        "lcb": mean - 0.7 * variance.sqrt(),
        "uwo": mean - 0.7 * variance,
    }[reduce]
    torch.testing.assert_close(torch.tensor(ensemble(QUESTIONS, CHOSEN)), expected, rtol=0, atol=1e-5)


def test_too_long_a_text_is_nan(tiny_model: Path, tmp_path: Path) -> None:
    """Longer than the model has positions, as in RewardModelScorer. Catches: a score of positions it never saw."""
    make_reward_model(tiny_model, tmp_path, labels=2, max_position_embeddings=20)
    RewardCard("heads", 2, "chat").save(tmp_path)
    found = RewardEnsemble.load(tmp_path)(["Hi", "Hi"], ["Yes", "Yes, and " * 20])
    assert [math.isnan(score) for score in found] == [False, True]


# ---- folders that are not complete -----------------------------------------------------------------------------------


def copied(trained: Callable[[str], tuple[Any, Path]], kind: str, folder: Path) -> Path:
    shutil.copytree(trained(kind)[1], folder)
    return folder


def without_head(file: Path) -> None:
    weights = load_file(file)
    for name in [name for name in weights if "score" in name]:
        del weights[name]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_head_is_refused(kind: str, trained: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    """Its tensor is deleted, of the last member only. Catches: random scores, a check of the first member alone."""
    folder = copied(trained, kind, tmp_path / "copy")
    part = max(folder.glob("member-*"), default=folder)
    name = "adapter_model.safetensors" if "adapter_config.json" in {file.name for file in part.iterdir()} else None
    without_head(part / (name or "model.safetensors"))
    with pytest.raises(ValueError, match="would be random"):
        RewardEnsemble.load(folder)


@pytest.mark.parametrize("kind", ["adapters", "models"])
def test_a_missing_member_is_refused(kind: str, trained: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    """Catches: a smaller jury than the card says."""
    folder = copied(trained, kind, tmp_path / "copy")
    shutil.rmtree(folder / "member-1")
    with pytest.raises(ValueError, match=r"\['member-1'\] are not there"):
        RewardEnsemble.load(folder)


def test_another_number_of_heads_is_refused(trained: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    """The card and the model disagree. Catches: heads that are ignored."""
    folder = copied(trained, "heads", tmp_path / "copy")
    card = json.loads((folder / CARD_FILE).read_text()) | {"size": 2, "mean": [], "std": []}
    (folder / CARD_FILE).write_text(json.dumps(card))
    with pytest.raises(ValueError, match="num_labels=3, expected 2"):
        RewardEnsemble.load(folder)
    with pytest.raises(ValueError, match="num_labels=3, expected 1"):
        RewardModelScorer(folder)


def test_a_folder_without_a_card_is_refused(tiny_model: Path) -> None:
    """Catches: a causal model loaded as an ensemble of one random head."""
    with pytest.raises(ValueError, match=r"holds no trl_ext_reward\.json"):
        RewardEnsemble.load(tiny_model)


# ---- members of any kind: failures -----------------------------------------------------------------------------------

TEXTS = ["a", "b", "c", "d"]


def fixed(name: str, values: list[Any]) -> Callable[..., list[Any]]:
    """A reward function that answers these."""

    def function(completions: list[Any], **_: Any) -> list[Any]:
        return values[: len(completions)]

    function.__name__ = name
    return function


def failing(**_: Any) -> list[float]:
    raise RuntimeError("out of order")


@pytest.fixture(autouse=True)
def accelerate_state() -> None:
    """What a trainer makes; the test of the opposite takes it away."""
    PartialState()


def test_reductions_by_hand() -> None:
    """Members 1, 2, 9: mean 4, min 1, median 2, variance 38/3. Catches: another axis, options that are not passed."""
    members = [fixed("one", [1.0, 0.0]), fixed("two", [2.0, 0.0]), fixed("nine", [9.0, 0.0])]
    expected = {"mean": 4.0, "min": 1.0, "median": 2.0, "lcb": 4 - 0.5 * math.sqrt(38 / 3), "uwo": 4 - 0.5 * 38 / 3}
    for reduce, value in expected.items():
        ensemble = RewardEnsemble.of(members, reduce=reduce, coef=0.5)
        assert ensemble(["p", "p"], ["x", "y"]) == pytest.approx([value, 0.0], abs=1e-5), reduce


@pytest.mark.parametrize("missing", [None, NAN, math.inf, -math.inf])
def test_a_missing_score_of_one_member(missing: Any) -> None:
    """The other two decide this row, all three the others. Catches: NaN for all rows, 0 in the mean, inf in it."""
    members = [fixed("a", [1.0, 1.0, 1.0, 1.0]), fixed("b", [3.0, missing, 3.0, 3.0]), fixed("c", [8.0, 6.0, 8.0, 8.0])]
    found = RewardEnsemble.of(members)(["p"] * 4, TEXTS)
    assert found == pytest.approx([4.0, 3.5, 4.0, 4.0])
    assert RewardEnsemble.of(members, reduce="min")(["p"] * 4, TEXTS) == pytest.approx([1.0] * 4)


def test_different_members_fail_for_different_rows() -> None:
    """Each row is reduced over those it has. Catches: rows that are reduced with another row's members."""
    members = [
        fixed("a", [1.0, None, 1.0, None]),
        fixed("b", [2.0, 20.0, None, None]),
        fixed("c", [6.0, 40.0, 5.0, 7.0]),
    ]
    found = RewardEnsemble.of(members, min_members=1)(["p"] * 4, TEXTS)
    assert found == pytest.approx([3.0, 30.0, 3.0, 7.0])
    strict = RewardEnsemble.of(members)(["p"] * 4, TEXTS)
    assert strict[:3] == pytest.approx([3.0, 30.0, 3.0])
    assert math.isnan(strict[3])


@pytest.mark.parametrize(("min_members", "nan"), [(1, False), (2, False), (3, True), (None, False)])
def test_an_exception_in_one_member(min_members: int | None, nan: bool) -> None:
    """Catches: a run that ends at hour ten; a threshold that is off by one."""
    ensemble = RewardEnsemble.of([fixed("a", [1.0] * 4), failing, fixed("c", [3.0] * 4)], min_members=min_members)
    found = ensemble(["p"] * 4, TEXTS)
    assert [math.isnan(score) for score in found] == [nan] * 4
    assert nan or found == pytest.approx([2.0] * 4)


def test_too_few_members_are_nan_never_zero() -> None:
    """One of three is less than half. Catches: 0, which rewards a policy that breaks the judges."""
    found = RewardEnsemble.of([fixed("a", [1.0] * 4), failing, failing])(["p"] * 4, TEXTS)
    assert all(math.isnan(score) for score in found)
    assert all(math.isnan(score) for score in RewardEnsemble.of([failing], reduce="lcb")(["p"] * 4, TEXTS))


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_more_than_half_by_default(size: int, expected: int) -> None:
    """Catches: exactly half, with which two juries without a common member could decide."""
    assert RewardEnsemble.of([spaces] * size).min_members == expected


@pytest.mark.parametrize("count", [3, 5])
def test_a_wrong_number_of_scores_names_the_member(count: int) -> None:
    """Catches: scores that are shifted to other completions; a failure that is taken for a missing score."""
    members = [fixed("a", [1.0] * 4), lambda completions, **_: [1.0] * count]
    members[1].__name__ = "short_sighted"
    with pytest.raises(ValueError, match=f"short_sighted returned {count} scores for 4 completions"):
        RewardEnsemble.of(members)(["p"] * 4, TEXTS)


def test_a_scorer_of_another_shape_is_refused() -> None:
    """Catches: members and completions swapped."""
    ensemble = RewardEnsemble([lambda completions, **_: torch.zeros(len(completions), 2)], [2], name="judges")
    with pytest.raises(ValueError, match=r"judges: \(3, 2\) scores, expected \(2, 3\)"):
        ensemble(["p"] * 3, ["a", "b", "c"])


def test_members_see_the_columns_of_the_row() -> None:
    """Catches: an answer column that does not reach a rule-based member."""
    seen: dict[str, Any] = {}

    def rule(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts)
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    found = RewardEnsemble.of([rule])(["p", "q"], ["4", "5"], answer=["4", "6"], completion_ids=[[1], [2]])
    assert found == [1.0, 0.0]
    assert seen == {"completion_ids": [[1], [2]], "prompts": ["p", "q"]}


def test_it_works_outside_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a builder or an evaluation nothing has made accelerate's state. Catches: its logger, which then raises."""
    monkeypatch.setattr(PartialState, "_shared_state", {})

    def fails_outside(**_: Any) -> list[float]:
        raise RuntimeError("once")

    assert RewardEnsemble.of([fails_outside, spaces], min_members=1)(["p"], ["tree"]) == [2.0]


def test_no_completion() -> None:
    """Catches: the mean, or the unique patterns, of nothing."""
    ensemble = RewardEnsemble.of([spaces, spaces])
    assert ensemble([], [], log_metric=lambda *_: None, log_extra=lambda *_: None) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce": "worst"}, "reduce='worst'"),
        ({"coef": -0.1}, "coef=-0.1"),
        ({"coef": NAN}, "coef=nan"),
        ({"coef": math.inf}, "coef=inf"),
        ({"min_members": 0}, "min_members=0"),
        ({"min_members": 3}, "min_members=3"),
        ({"mean": [0.0], "std": [1.0]}, "1 means and 1 standard deviations for 2 members"),
        ({"mean": [0.0, 0.0]}, "2 means and 0 standard deviations"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Catches: an error at the first step instead of at the start, or none."""
    with pytest.raises(ValueError, match=message):
        RewardEnsemble.of([spaces, spaces], **options)


def test_an_ensemble_of_nobody_is_refused() -> None:
    """Catches: min_members of 1 with no member, NaN for ever."""
    with pytest.raises(ValueError, match="at least one member"):
        RewardEnsemble.of([])


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_calibrate_by_hand() -> None:
    """(1, 3) and (100, 500) become (-1, 1) both. Catches: one scale for all, ddof 1, a second call on the first."""
    ensemble = RewardEnsemble.of([fixed("a", [1.0, 3.0]), fixed("b", [100.0, 500.0])], reduce="min")
    for _ in range(2):
        ensemble.calibrate(["p", "p"], ["x", "y"])
        assert (ensemble.mean, ensemble.std) == ([2.0, 300.0], [1.0, 200.0])
        assert ensemble.member_scores(["p", "p"], ["x", "y"]).tolist() == [[-1.0, 1.0], [-1.0, 1.0]]
        assert ensemble(["p", "p"], ["x", "y"]) == [-1.0, 1.0]


def test_calibrate_with_missing_and_equal_scores() -> None:
    """Catches: NaN moments, a division by 0 where a member says the same of all, columns that are not passed on."""

    def by_answer(completions: list[Any], answer: list[float], **_: Any) -> list[Any]:
        return answer

    ensemble = RewardEnsemble.of([by_answer, fixed("flat", [7.0] * 4), failing])
    ensemble.calibrate(["p"] * 4, TEXTS, answer=[1.0, None, 5.0, math.inf])
    assert (ensemble.mean, ensemble.std) == ([3.0, 7.0, 0.0], [2.0, 1.0, 1.0])


def test_moments_and_standardise() -> None:
    """Catches: the spread of a constant member, which is rounding, taken for a scale."""
    scores = torch.tensor([[1e4, 1e4 + 1e-3, 1e4], [0.0, 2e-5, 0.0]])
    mean, std = moments(scores)
    assert std[0] == 1.0
    assert std[1] == pytest.approx(2e-5 * math.sqrt(2) / 3, rel=1e-4)
    assert mean[1] == pytest.approx(2e-5 / 3, rel=1e-4)
    assert standardise(scores, [], []) is scores
    shifted = standardise(torch.tensor([[1.0, 2.0], [3.0, 9.0]]), [1.0, 3.0], [0.5, 2.0])
    assert shifted.tolist() == [[0.0, 2.0], [0.0, 3.0]]


def test_preference_probability() -> None:
    """sigmoid(2 / 4). Catches: a temperature that multiplies."""
    ensemble = RewardEnsemble.of([spaces], temperature=4.0)
    assert ensemble.preference_probability(torch.tensor([2.0])).item() == pytest.approx(0.6224593312)


# ---- logs ------------------------------------------------------------------------------------------------------------


def logged(ensemble: RewardEnsemble, count: int = 4) -> tuple[dict[str, float], dict[str, list[float]], list[float]]:
    metrics: dict[str, list[float]] = defaultdict(list)
    extras: dict[str, list[Any]] = {}
    found = ensemble(
        ["p"] * count,
        TEXTS[:count],
        log_metric=lambda name, value: metrics[name].append(value),
        log_extra=extras.__setitem__,
    )
    assert all(len(values) == 1 for values in metrics.values())
    return {name: values[0] for name, values in metrics.items()}, extras, found


def test_logs_by_hand() -> None:
    """Catches: means over the wrong axis, ddof 1, a missing score counted as 0, a fraction of rows, not of scores."""
    members = [fixed("a", [1.0, 2.0, 3.0, 6.0]), fixed("b", [1.0, 4.0, 7.0, None])]
    metrics, extras, _ = logged(RewardEnsemble.of(members, name="judges"))
    assert metrics == {
        "judges/member_0/mean": 3.0,
        "judges/member_1/mean": 4.0,
        # 0, 1, 2 and, of one member, 0
        "judges/std": pytest.approx(3 / 4),
        "judges/failed": 1 / 8,
    }
    assert extras == {"judges/std": pytest.approx([0.0, 1.0, 2.0, 0.0])}


def test_logs_of_standardised_scores() -> None:
    """Catches: logs on another scale than the reward."""
    members = [fixed("a", [1.0, 3.0, 1.0, 3.0]), fixed("b", [10.0, 10.0, 30.0, 30.0])]
    metrics, extras, _ = logged(RewardEnsemble.of(members, mean=[0.0, 10.0], std=[2.0, 10.0]))
    assert metrics["reward_ensemble/member_0/mean"] == 1.0
    assert metrics["reward_ensemble/member_1/mean"] == 1.0
    assert extras["reward_ensemble/std"] == pytest.approx([0.25, 0.75, 0.75, 0.25])


def test_a_failed_member_does_not_spoil_the_metrics() -> None:
    """TRL averages the values of a name over a logging step, so one NaN hides all the others of it.

    Catches: the mean of a member without any score logged as NaN.
    """
    metrics, _, found = logged(RewardEnsemble.of([fixed("a", [1.0] * 4), failing, fixed("c", [3.0] * 4)]))
    assert found == [2.0] * 4
    assert metrics["reward_ensemble/failed"] == pytest.approx(1 / 3)
    assert not [name for name, value in metrics.items() if not math.isfinite(value)]


def test_without_logging_functions(trained: Callable[[str], tuple[Any, Path]]) -> None:
    """Builders and evaluations have none. Catches: a call of None; also positional and keyword calls agree."""
    ensemble = RewardEnsemble.load(trained("heads")[1])
    assert ensemble(QUESTIONS, CHOSEN) == ensemble(prompts=QUESTIONS, completions=CHOSEN, completion_ids=None)


# ---- `of` reward models, and in trainers -----------------------------------------------------------------------------


def test_of_folders_scorers_and_rules(tiny_model: Path, tmp_path: Path) -> None:
    """Each with its own tokenizer. Catches: a name that is not loaded, one tokenizer for all."""
    small = build_tiny_model(tmp_path / "small", vocab_size=400, model_type="qwen2", seed=4)
    one = make_reward_model(tiny_model, tmp_path / "one")
    two = make_reward_model(small, tmp_path / "two", seed=1)
    ensemble = RewardEnsemble.of([str(one), RewardModelScorer(two, text_format="text"), spaces])
    expected = []
    for folder, form in ((one, "chat"), (two, "text")):
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        expected.append(raw_scores([model], AutoTokenizer.from_pretrained(folder), QUESTIONS, CHOSEN, form)[0])
    expected.append(torch.tensor(spaces(CHOSEN)))
    found = ensemble.member_scores(QUESTIONS, CHOSEN)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("package", [trl_ext, trl], ids=["trl_ext", "trl"])
def test_reward_functions_of_a_trainer(
    package: Any, trained: Callable[[str], tuple[Any, Path]], tiny_model: Path, tmp_path: Path
) -> None:
    """A step of GRPO with a loaded ensemble and a mix by `of`, on messages.

    Catches: a name, a signature or a value that a trainer of TRL does not take; metrics and columns that get lost.
    """
    judges = RewardEnsemble.load(trained("heads")[1], reduce="lcb", name="judges")
    rm = make_reward_model(tiny_model, tmp_path / "rm")
    mix = RewardEnsemble.of([rm, spaces, lambda completions, **_: [None] * len(completions)], name="mix")
    calls: list[tuple[Any, Any]] = []
    score = judges.member_scores
    judges.member_scores = lambda p, c, **k: (calls.append((p, c)), score(p, c, **k))[1]  # type: ignore
    config = package.GRPOConfig(**base_config(tmp_path / "out", max_steps=1))
    rows = prompts(conversational=True)
    trainer = train_rollouts(package.GRPOTrainer, config, tiny_model, [judges, mix], rows)
    entry = trainer.state.log_history[0]
    (questions, answers), *rest = calls
    assert not rest
    assert len(answers) == 4 and isinstance(answers[0], list)
    assert entry["rewards/judges/mean"] == pytest.approx(sum(judges(questions, answers)) / 4, abs=1e-4)
    assert entry["rewards/mix/mean"] == pytest.approx(sum(mix(questions, answers)) / 4, abs=1e-4)
    scores = score(questions, answers)
    assert entry["judges/member_2/mean"] == pytest.approx(scores[2].mean().item(), abs=1e-4)
    assert entry["judges/failed"] == 0.0
    assert entry["mix/failed"] == pytest.approx(1 / 3)
    spread = scores.std(0, correction=0)
    assert entry["judges/std"] == pytest.approx(spread.mean().item(), abs=1e-4)
    assert list(trainer._logs["extra"]["judges/std"]) == pytest.approx(spread.tolist(), abs=1e-4)
    assert Counter(map(text_of, answers))


def test_nan_reaches_trl_as_not_applicable(tiny_model: Path, tmp_path: Path) -> None:
    """Beside another reward function, an ensemble of failing members changes nothing. Catches: 0 in the sum."""
    broken = RewardEnsemble.of([failing, failing], name="broken")
    seen: list[float] = []
    variants: list[list[Any]] = [[spaces, broken], [spaces]]
    for functions in variants:
        config = trl_ext.GRPOConfig(**base_config(tmp_path, max_steps=1))
        trainer = train_rollouts(trl_ext.GRPOTrainer, config, tiny_model, functions)
        seen.append(trainer.state.log_history[0]["reward"])
        assert math.isfinite(trainer.state.log_history[0]["loss"])
    assert seen[0] == seen[1]

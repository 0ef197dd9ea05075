"""RewardModelScorer: the score of the model alone, whatever the batch; no random head is ever scored with."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.trainers.reward_worker import CHOSEN, QUESTIONS, lora, make_reward_model, message, one_by_one
from trl_ext import RewardModelScorer
from trl_ext.models.tiny import build_tiny_model
from trl_ext.rewards.loading import load_tokenizer
from trl_ext.rewards.model_scorer import resolve_format
from trl_ext.rewards.rendering import render
from trl_ext.rewards.reward_card import CARD_FILE, RewardCard

CHAT_PROMPTS = [message("user", text) for text in QUESTIONS]
CHAT_ANSWERS = [message("assistant", text) for text in CHOSEN]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tiny_model, tmp_path_factory.mktemp("scorer") / "kind-judge")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The model by transformers alone."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def expected(plain: Any, tokenizer: Any, text_format: str = "chat") -> list[float]:
    """Each text alone, without padding."""
    scores: list[float] = one_by_one(plain, render(QUESTIONS, CHOSEN, tokenizer, text_format))[0].tolist()
    return scores


def close(values: list[float], abs: float = 1e-5) -> Any:
    return pytest.approx(values, abs=abs)


# ---- the score -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 16384])
@pytest.mark.parametrize("text_format", ["chat", "text"])
def test_scores_are_those_of_the_model_alone(
    text_format: str, tokens_per_batch: int, folder: Path, plain: Any, tokenizer: Any
) -> None:
    """Catches: padding that is read, scores in another order, a second label's score, a format that is not used."""
    scorer = RewardModelScorer(folder, text_format=text_format, tokens_per_batch=tokens_per_batch)
    found = scorer(QUESTIONS, CHOSEN)
    assert found == close(expected(plain, tokenizer, text_format))
    assert scorer(QUESTIONS[::-1], CHOSEN[::-1])[::-1] == close(found)
    assert torch.tensor(found).std() > 0.1
    assert all(isinstance(score, float) for score in found)


def test_both_formats_give_one_reward(folder: Path) -> None:
    """With a chat template. Catches: a reward that depends on how the policy's data set is written."""
    scorer = RewardModelScorer(folder)
    assert scorer.text_format == "chat"
    assert scorer(QUESTIONS, CHOSEN) == scorer(CHAT_PROMPTS, CHAT_ANSWERS)


def test_equal_texts_are_scored_once(folder: Path) -> None:
    """Counted in the model. Catches: a forward for every completion of a group that collapsed."""
    scorer = RewardModelScorer(folder)
    seen: list[int] = []
    scorer.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = scorer(["Why?"] * 5 + ["How?"], ["Because."] * 4 + ["No."] * 2)
    assert sum(seen) == 3
    assert len(set(found[:4])) == 1
    assert len(set(found)) == 3


def test_other_keywords_of_trl_are_accepted(folder: Path) -> None:
    """Catches: a TypeError at the first step of a run."""
    scorer = RewardModelScorer(folder)
    found = scorer(
        prompts=["a"], completions=["b"], completion_ids=[[1]], trainer_state=None, log_extra=None, answer=[3]
    )
    assert found == scorer(["a"], ["b"])


def test_pad_is_eos_inside_the_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """As in many published models. A conversation holds the pad token then; beside a longer text it scores as alone.

    Catches: a mask from token values.
    """
    eos = AutoTokenizer.from_pretrained(tiny_model).eos_token
    folder = make_reward_model(tiny_model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = eos
    tokenizer.save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    scorer = RewardModelScorer(folder)
    assert scorer.model.config.pad_token_id == scorer.tokenizer.eos_token_id
    for text_format in ("chat", "text"):
        scorer = RewardModelScorer(folder, text_format=text_format)
        assert scorer(QUESTIONS, CHOSEN) == close(expected(model, tokenizer, text_format))


def test_the_models_pad_token_counts(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The tokenizer's is another one. Catches: rows padded with what the model takes for text."""
    other = make_reward_model(tiny_model, tmp_path, pad_token_id=5)
    scorer = RewardModelScorer(other)
    assert scorer.tokenizer.pad_token_id == 0
    model = AutoModelForSequenceClassification.from_pretrained(other, dtype=torch.float32)
    assert model.config.pad_token_id == 5
    assert scorer(QUESTIONS, CHOSEN) == close(expected(model, scorer.tokenizer))


def test_a_model_without_a_pad_token(tiny_model: Path, tmp_path: Path) -> None:
    """It gets the tokenizer's. Catches: an error for every batch of more than one text."""
    folder = make_reward_model(tiny_model, tmp_path, pad_token_id=None)
    scorer = RewardModelScorer(folder)
    assert scorer.model.config.pad_token_id == 0
    scores = scorer(QUESTIONS, CHOSEN)
    assert scores == close([scorer([q], [c])[0] for q, c in zip(QUESTIONS, CHOSEN, strict=True)])


def test_a_loaded_model_without_a_pad_token(tiny_model: Path, tmp_path: Path) -> None:
    """The same for a model object: scored, or refused when the scorer is made. Catches: an error at a call."""
    folder = make_reward_model(tiny_model, tmp_path, pad_token_id=None)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    try:
        scorer = RewardModelScorer(model, AutoTokenizer.from_pretrained(folder))
    except ValueError:
        return
    assert scorer(QUESTIONS, CHOSEN) == close(RewardModelScorer(folder)(QUESTIONS, CHOSEN))


def test_a_loaded_model_is_put_in_evaluation_mode(folder: Path, plain: Any, tokenizer: Any) -> None:
    """Catches: dropout in rewards; and a name that is lost."""
    scorer = RewardModelScorer(plain.train(), tokenizer, name="judge")
    assert not scorer.model.training
    assert scorer(QUESTIONS, CHOSEN) == close(RewardModelScorer(folder)(QUESTIONS, CHOSEN))
    assert scorer.__name__ == "judge"
    assert RewardModelScorer(folder).__name__ == "kind-judge"


def test_another_tokenizer_than_the_policys(tmp_path: Path) -> None:
    """The reward model reads texts with its own. Catches: token ids of the policy given to the reward model."""
    base = build_tiny_model(tmp_path / "base", vocab_size=400, model_type="qwen2", seed=3)
    scorer = RewardModelScorer(make_reward_model(base, tmp_path / "rm"))
    own = AutoTokenizer.from_pretrained(tmp_path / "rm")
    chats = [question + answer for question, answer in zip(CHAT_PROMPTS, CHAT_ANSWERS, strict=True)]
    rows = [own.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    assert max(map(max, rows)) < 400
    assert scorer(CHAT_PROMPTS, CHAT_ANSWERS, completion_ids=[[900]] * 8) == close(one_by_one(model, rows)[0].tolist())


def test_an_adapter_folder_is_scored_with_its_own_head(tiny_model: Path, tmp_path: Path) -> None:
    """Saved and loaded: the scores of the model in memory. Catches: a random head, an adapter that is not active."""
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    model = get_peft_model(base, lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "score" in name else 0.05))
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path)
    found = RewardModelScorer(tmp_path)(QUESTIONS, CHOSEN)
    assert found == close(expected(model, tokenizer))
    with model.disable_adapter():
        assert torch.tensor(found).sub(torch.tensor(expected(model, tokenizer))).abs().max() > 1e-2


def test_model_kwargs_reach_the_model(folder: Path) -> None:
    """Catches: a dtype that is not read; the default is float32, whatever the file holds."""
    assert RewardModelScorer(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert RewardModelScorer(folder).model.dtype == torch.float32


# ---- too long, nothing -----------------------------------------------------------------------------------------------


def test_too_long_a_text_is_nan(folder: Path, tokenizer: Any, plain: Any) -> None:
    """Exactly max_length tokens are scored, one more is not, and the others are. Catches: 0, truncation, off by one."""
    rows = render(QUESTIONS, CHOSEN, tokenizer, "chat")
    limit = sorted(len(row) for row in rows)[4]
    logged: dict[str, float] = {}
    scorer = RewardModelScorer(folder, max_length=limit)
    found = scorer(QUESTIONS, CHOSEN, log_metric=logged.__setitem__)
    fits = [len(row) <= limit for row in rows]
    assert [not math.isnan(score) for score in found] == fits
    assert 0 < sum(fits) < 8
    for score, value, fit in zip(found, expected(plain, tokenizer), fits, strict=True):
        assert not fit or score == pytest.approx(value, abs=1e-5)
    assert logged == {"kind-judge/too_long": pytest.approx(1 - sum(fits) / 8)}


def test_the_limit_of_the_model_is_the_default(tiny_model: Path, tmp_path: Path) -> None:
    """Catches: positions beyond what the model knows."""
    scorer = RewardModelScorer(make_reward_model(tiny_model, tmp_path, max_position_embeddings=20))
    assert scorer.max_length == 20
    found = scorer(["Hi", "Hi"], ["Yes", "Yes, and " * 20])
    assert [math.isnan(score) for score in found] == [False, True]
    assert all(map(math.isnan, scorer(["Hi"], ["Yes, and " * 20])))


def test_nothing_is_logged_when_all_fit(folder: Path) -> None:
    """Catches: a metric of zeros in every run."""
    logged: dict[str, float] = {}
    RewardModelScorer(folder)(QUESTIONS, CHOSEN, log_metric=logged.__setitem__)
    assert logged == {}


@pytest.mark.parametrize("text_format", ["chat", "text"])
def test_nothing_to_score(text_format: str, folder: Path) -> None:
    """Catches: an error, or the mean of nothing."""
    assert RewardModelScorer(folder, text_format=text_format)([], []) == []


def test_it_works_outside_of_a_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a builder or an evaluation nothing has made accelerate's state. Catches: its logger, which then raises."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    scorer = RewardModelScorer(folder, max_length=3, name="outside_of_a_trainer")
    assert all(map(math.isnan, scorer(["Hi"], ["Yes"])))


# ---- format ----------------------------------------------------------------------------------------------------------


def test_the_folder_says_the_format(folder: Path, tmp_path: Path) -> None:
    """Catches: a model of plain texts that is given a template, because its tokenizer happens to have one."""
    shutil.copytree(folder, tmp_path / "rm")
    RewardCard("single", 1, "text").save(tmp_path / "rm")
    by_card = RewardModelScorer(tmp_path / "rm")
    assert by_card.text_format == "text"
    assert by_card(QUESTIONS, CHOSEN) == RewardModelScorer(folder, text_format="text")(QUESTIONS, CHOSEN)
    assert RewardModelScorer(tmp_path / "rm", text_format="chat").text_format == "chat"


def test_formats(tokenizer: Any, tiny_model: Path) -> None:
    """Catches: an unknown format taken for text, a chat without a template that fails at the first call."""
    without = AutoTokenizer.from_pretrained(tiny_model)
    without.chat_template = None
    assert resolve_format(None, tokenizer) == "chat"
    assert resolve_format(None, without) == "text"
    assert resolve_format("text", tokenizer) == "text"
    with pytest.raises(ValueError, match="text_format='xml'"):
        resolve_format("xml", tokenizer)
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        resolve_format("chat", without)


def test_a_damaged_card_is_refused(folder: Path, tmp_path: Path) -> None:
    """Catches: a half-read card, an unknown kind or field taken for a single model."""
    shutil.copytree(folder, tmp_path / "rm")
    for content in ("{", "[]", '{"kind": "forest"}', '{"kind": "single", "color": 1}', "{}"):
        (tmp_path / "rm" / CARD_FILE).write_text(content)
        with pytest.raises(ValueError, match=r"trl_ext_reward\.json is damaged"):
            RewardModelScorer(tmp_path / "rm")


def test_a_card_is_what_was_saved(tmp_path: Path) -> None:
    """Catches: a field that is not written, rounded numbers."""
    card = RewardCard("heads", 2, "text", [0.1, -1 / 3], [1.0, 2.5], 1.75, "9 held-out pairs")
    card.save(tmp_path)
    assert RewardCard.load(tmp_path) == card
    assert json.loads((tmp_path / CARD_FILE).read_text())["mean"] == [0.1, -1 / 3]
    assert RewardCard.load(tmp_path / "nowhere") is None


# ---- refusals: never a random head -----------------------------------------------------------------------------------


def test_a_causal_model_is_refused(tiny_model: Path) -> None:
    """Catches: the head that transformers draws at random for it; the message is a sentence."""
    with pytest.raises(
        ValueError, match=r"is a LlamaForCausalLM, which has no score head.*Train it with RewardTrainer"
    ):
        RewardModelScorer(tiny_model)


def test_two_labels_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """As a folder and as an object. Catches: the first of two classes taken for a reward."""
    folder = make_reward_model(tiny_model, tmp_path, labels=2)
    with pytest.raises(ValueError, match="num_labels=2, expected 1"):
        RewardModelScorer(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(ValueError, match="num_labels=2, expected 1"):
        RewardModelScorer(model, AutoTokenizer.from_pretrained(folder))


def test_a_loaded_model_needs_its_tokenizer(plain: Any) -> None:
    """Catches: a tokenizer that is guessed."""
    with pytest.raises(ValueError, match="needs its tokenizer"):
        RewardModelScorer(plain)


def test_missing_head_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    """The head's tensor is not in the file. Catches: the one that transformers draws instead, with a warning."""
    shutil.copytree(folder, tmp_path / "rm")
    weights = load_file(tmp_path / "rm" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "rm" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks trained weights for \['score.weight'\]"):
        RewardModelScorer(tmp_path / "rm")


def test_other_missing_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    """A layer that is not in the file. Catches: a check of the head alone."""
    shutil.copytree(folder, tmp_path / "rm")
    weights = load_file(tmp_path / "rm" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "rm" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks trained weights"):
        RewardModelScorer(tmp_path / "rm")


def adapter_folder(tiny_model: Path, folder: Path, **options: Any) -> Path:
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    get_peft_model(base, LoraConfig(r=2, **options)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_an_adapter_without_a_head_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Trained without modules_to_save. Catches: the head of the base, which is random."""
    folder = adapter_folder(tiny_model, tmp_path, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"no score head \(modules_to_save=None\)"):
        RewardModelScorer(folder)


def test_an_adapter_of_the_head_is_no_head(tiny_model: Path, tmp_path: Path) -> None:
    """LoRA on the head, whose base is random and not saved. Catches: names that merely contain the head's."""
    folder = adapter_folder(tiny_model, tmp_path, target_modules=["q_proj", "score"])
    with pytest.raises(ValueError, match="score head"):
        RewardModelScorer(folder)


def test_an_adapter_without_safetensors_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Catches: an adapter whose head cannot be checked."""
    folder = adapter_folder(tiny_model, tmp_path, target_modules=["q_proj"], task_type="SEQ_CLS")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        RewardModelScorer(folder)


def test_a_tokenizer_without_pad_and_eos_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """And one without a pad token pads with EOS, on the right. Catches: a pad token of None."""
    folder = make_reward_model(tiny_model, tmp_path, pad_token_id=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.update(pad_token=None, padding_side="left")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    scorer = RewardModelScorer(folder)
    assert scorer.model.config.pad_token_id == scorer.tokenizer.eos_token_id
    assert scorer.tokenizer.padding_side == "right"
    alone = [scorer([question], [answer])[0] for question, answer in zip(QUESTIONS, CHOSEN, strict=True)]
    assert scorer(QUESTIONS, CHOSEN) == close(alone)
    settings.update(eos_token=None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(ValueError, match="neither a pad token nor an EOS token"):
        load_tokenizer(str(folder), model)

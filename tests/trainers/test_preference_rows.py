"""`bad_rows`: pairs that cannot be trained on are found, named, and raised or dropped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import trl
import trl.trainer.dpo_trainer
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainers.dpo_worker import near_pairs, settings
from tests.trainers.harness import history
from tests.trainers.losses import perturb
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.trainers.preference_rows import (
    EMPTY_CHOSEN,
    EMPTY_REJECTED,
    EQUAL,
    EQUAL_CUT,
    NOTHING_LEFT,
    ROW,
    RowCheck,
    fault_of,
)

GOOD = {"prompt": "Why?", "chosen": " Because.", "rejected": " No idea."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
}


def says(content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": content}


def user(text: str = "Why?") -> dict[str, Any]:
    return says(text, "user")


def pairs(*rows: dict[str, Any]) -> Dataset:
    """Rows with the columns of the first."""
    return Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})


def answers(chosen: Any, rejected: Any) -> dict[str, Any]:
    return GOOD | {"chosen": chosen, "rejected": rejected}


def build(model: Path, folder: Path, dataset: Any, eval_dataset: Any = None, **overrides: Any) -> DPOTrainer:
    return DPOTrainer(
        str(model), args=DPOConfig(**settings(folder, **overrides)), train_dataset=dataset, eval_dataset=eval_dataset
    )


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails: whatever is raised instead was raised before."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded before the rows were checked")

    monkeypatch.setattr(trl.trainer.dpo_trainer, "create_model_from_path", load)


# ---- one row -------------------------------------------------------------------------------------------------------

STANDARD: list[tuple[Any, Any, str | None]] = [
    (" yes", " no", None),
    ("你好。", "再见。", None),
    ("", " no", EMPTY_CHOSEN),
    (" yes", "", EMPTY_REJECTED),
    (None, " no", EMPTY_CHOSEN),
    (" yes", None, EMPTY_REJECTED),
    (" \n\t", " no", EMPTY_CHOSEN),
    (" yes", "\u3000", EMPTY_REJECTED),  # the Chinese space
    ("", "", EMPTY_CHOSEN),
    (" yes", " yes", EQUAL),
    ("你好。", "你好。", EQUAL),
    (" yes", "yes\n", EQUAL),
    ("a b", "a  b", None),
    ("Yes", "yes", None),
]


@pytest.mark.parametrize(("chosen", "rejected", "expected"), STANDARD)
def test_a_standard_row(chosen: Any, rejected: Any, expected: str | None) -> None:
    """Each kind of fault by name, and what looks like one and is none. White space at the ends does not count."""
    assert fault_of(answers(chosen, rejected)) == expected


CONVERSATIONAL: list[tuple[Any, Any, str | None]] = [
    ([says("Yes.")], [says("No.")], None),
    ([says("可以。")], [says("不行。")], None),
    ([says("")], [says("No.")], EMPTY_CHOSEN),
    ([says(" \n")], [says("No.")], EMPTY_CHOSEN),
    ([says("Yes.")], [says(None)], EMPTY_REJECTED),
    ([], [says("No.")], EMPTY_CHOSEN),
    (None, [says("No.")], EMPTY_CHOSEN),
    ([says("Yes.")], None, EMPTY_REJECTED),
    ([says("Yes.")], [None], EMPTY_REJECTED),
    ([says(""), says("")], [says("No.")], EMPTY_CHOSEN),
    ([says(""), says("Yes.")], [says("No.")], None),
    ([says("Yes.")], [says("Yes.")], EQUAL),
    # A tool call says something without any text; two of them can be equal.
    ([CALL], [says("No.")], None),
    ([says("Yes.")], [CALL], None),
    ([CALL], [CALL], EQUAL),
    ([{"role": "assistant", "content": "", "tool_calls": []}], [says("No.")], EMPTY_CHOSEN),
    # Parts of a vision message.
    ([says([{"type": "text", "text": "Yes."}])], [says([{"type": "text", "text": "No."}])], None),
    ([says([{"type": "text", "text": " "}])], [says([{"type": "text", "text": "No."}])], EMPTY_CHOSEN),
    ([says([{"type": "text", "text": None}])], [says([{"type": "text", "text": "No."}])], EMPTY_CHOSEN),
    ([says([])], [says([{"type": "text", "text": "No."}])], EMPTY_CHOSEN),
    ([says([{"type": "image"}])], [says([{"type": "text", "text": "No."}])], None),
    ([says([{"type": "text", "text": ""}, {"type": "text", "text": "Yes."}])], [says("No.")], None),
]


@pytest.mark.parametrize(("chosen", "rejected", "expected"), CONVERSATIONAL)
def test_a_conversational_row(chosen: Any, rejected: Any, expected: str | None) -> None:
    """The same for messages. Catches a tool call or an image that counts as silence, and a list that is never empty."""
    assert fault_of({"prompt": [user()], "chosen": chosen, "rejected": rejected}) == expected


IMPLICIT: list[tuple[Any, Any, str | None]] = [
    ("Why? Because.", "Why? No idea.", None),
    ("为什么？因为。", "为什么？不知道。", None),
    ("Why? Yes", "Why? Yes", EQUAL),
    ("", "Why? No", EMPTY_CHOSEN),
    # What follows the common beginning is all that is trained on.
    ("Why? \n", "Why? No", EMPTY_CHOSEN),
    ("Why? No", "Why? \n", EMPTY_REJECTED),
    ([user(), says("Yes.")], [user(), says("No.")], None),
    ([user(), says("")], [user(), says("No.")], EMPTY_CHOSEN),
    ([user(), says("Yes.")], [user(), says(" ")], EMPTY_REJECTED),
    ([user(), says("Yes.")], [user(), says("Yes.")], EQUAL),
]


@pytest.mark.parametrize(("chosen", "rejected", "expected"), IMPLICIT)
def test_an_implicit_prompt(chosen: Any, rejected: Any, expected: str | None) -> None:
    """The prompt is what both answers begin with. Catches an answer that is empty once the prompt is taken off it."""
    assert fault_of({"chosen": chosen, "rejected": rejected}) == expected


# ---- a data set ----------------------------------------------------------------------------------------------------

MIXED = [
    GOOD,
    answers("", " no"),
    answers(" yes", " yes"),
    answers(" yes", None),
    answers("你好", "再见"),
    answers(" a", " a "),
    answers(None, " no"),
    answers(" b", " c"),
]


def test_raise_reports_counts_and_rows_before_a_model_is_loaded(
    no_model: None, tiny_model: Path, tmp_path: Path
) -> None:
    """One message for all faults. Catches a message for the first bad row only, wrong numbers, and a late check."""
    with pytest.raises(ValueError, match=r"^5 of 8 rows of train_dataset cannot be trained on") as caught:
        build(tiny_model, tmp_path, pairs(*MIXED))
    text = str(caught.value)
    assert f"2 with {EMPTY_CHOSEN} (rows 1, 6)" in text
    assert f"2 with {EQUAL} (rows 2, 5)" in text
    assert f"1 with {EMPTY_REJECTED} (row 3)" in text
    assert text.endswith("Repair them, or set bad_rows='drop'.")


def test_a_long_list_of_rows_is_cut(no_model: None, tiny_model: Path, tmp_path: Path) -> None:
    """Ten row numbers and then dots, with the count of all of them. Rows beyond the first thousand keep their number.

    Catches a count of what is shown, and row numbers that start over in every block of a thousand.
    """
    rows = [answers(f" {number}", " x") for number in range(2500)]
    for number in (3, 999, 1000, *range(2001, 2013)):
        rows[number] = answers(" x", " x")
    with pytest.raises(ValueError, match=r"^15 of 2500 rows") as caught:
        build(tiny_model, tmp_path, pairs(*rows))
    assert "(rows 3, 999, 1000, 2001, 2002, 2003, 2004, 2005, 2006, 2007, ...)" in str(caught.value)


def test_drop_keeps_exactly_the_good_rows_and_trains(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a good row lost, a bad one kept, and a silent drop."""
    trainer = build(tiny_model, tmp_path, pairs(*MIXED), bad_rows="drop")
    assert [row["chosen"].removesuffix("<|im_end|>") for row in trainer.train_dataset] == [" Because.", "你好", " b"]
    assert ROW not in trainer.train_dataset.column_names
    assert "of 8 rows train_dataset lost" in caplog.text
    assert f"2 with {EQUAL} (rows 2, 5)" in caplog.text
    trainer.train()
    assert len(history(trainer, "loss")) == 2 and all(map(math.isfinite, history(trainer, "loss")))


def test_good_rows_pass_untouched(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a copy, a reordering and a warning about nothing; columns that we do not know stay."""
    dataset = near_pairs(8).add_column("source", list("abcdefgh"))
    trainer = build(tiny_model, tmp_path, dataset)
    assert trainer.train_dataset["source"][:] == list("abcdefgh")
    theirs = trl.DPOTrainer(str(tiny_model), args=trl.DPOConfig(**settings(tmp_path)), train_dataset=dataset)
    assert set(trainer.train_dataset.column_names) == set(theirs.train_dataset.column_names)
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert trainer.train_dataset[name][:] == theirs.train_dataset[name][:]
    assert "bad_rows" not in caplog.text


@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
def test_no_good_row_at_all(bad_rows: str, no_model: None, tiny_model: Path, tmp_path: Path) -> None:
    """Dropping everything is an error. Catches an empty data set that fails deep in the Trainer."""
    match = "No pair of train_dataset is left: 2 with" if bad_rows == "drop" else "^2 of 2 rows"
    with pytest.raises(ValueError, match=match):
        build(tiny_model, tmp_path, pairs(answers(" a", " a"), answers(" b", " b")), bad_rows=bad_rows)


def test_an_empty_data_set(no_model: None, tiny_model: Path, tmp_path: Path) -> None:
    """Catches `StopIteration` from TRL's look at the first row."""
    with pytest.raises(ValueError, match="No pair of train_dataset is left: it is empty"):
        build(tiny_model, tmp_path, Dataset.from_dict({"prompt": [], "chosen": [], "rejected": []}))


def test_columns_that_are_none_throughout(no_model: None, tiny_model: Path, tmp_path: Path) -> None:
    """A column of nothing has another type. Catches a check that reads lengths of None."""
    rows = pairs(answers(None, " a"), answers(None, " b"))
    with pytest.raises(ValueError, match=rf"2 with {EMPTY_CHOSEN} \(rows 0, 1\)"):
        build(tiny_model, tmp_path, rows)


@pytest.mark.parametrize(
    "columns", [["prompt", "completion"], ["prompt", "chosen"], ["prompt", "completion", "label"], ["rejected"]]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_missing_column_is_named(columns: list[str], stream: bool, tiny_model: Path, tmp_path: Path) -> None:
    """What is missing, what is there, what to do. Catches a KeyError."""
    dataset: Any = Dataset.from_dict({name: ["text"] for name in columns})
    missing = [name for name in ("chosen", "rejected") if name not in columns]
    dataset = dataset.to_iterable_dataset() if stream else dataset
    with pytest.raises(ValueError, match="has no column") as caught:
        build(tiny_model, tmp_path, dataset)
    assert f"{missing}; it has {sorted(columns)}" in str(caught.value)
    assert "rename_column" in str(caught.value) and "KTOTrainer" in str(caught.value)


# ---- what max_length leaves ----------------------------------------------------------------------------------------

LONG = "Water boils at one hundred degrees and freezes at zero; ice floats because it is less dense. " * 4


@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
def test_a_prompt_that_fills_max_length(
    bad_rows: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL drops such rows without a word. Catches a row number that is off once a row before it has gone."""
    rows = [GOOD, GOOD | {"prompt": LONG}, GOOD, GOOD | {"prompt": LONG}, GOOD]
    if bad_rows == "raise":
        with pytest.raises(ValueError, match=r"^2 of 5 rows of the train dataset") as caught:
            build(tiny_model, tmp_path, pairs(*rows), max_length=20)
        assert f"2 with {NOTHING_LEFT} (rows 1, 3)" in str(caught.value)
        assert str(caught.value).endswith("or set bad_rows='drop' (or raise max_length).")
        return
    trainer = build(tiny_model, tmp_path, pairs(*rows), max_length=20, bad_rows="drop")
    assert trainer.train_dataset["prompt"][:] == ["Why?"] * 3
    assert f"of 5 rows the train dataset lost 2 with {NOTHING_LEFT}." in caplog.text
    trainer.train()
    assert all(map(math.isfinite, history(trainer, "loss")))


CUT: dict[str, list[dict[str, Any]]] = {
    # The answers differ beyond the first 20 tokens.
    "keep_start": [
        GOOD,
        answers(" the" * 20 + " garden", " the" * 20 + " world"),
        answers(" the garden" + " the" * 20, " the world" + " the" * 20),
    ],
    # They differ before the last 20 tokens.
    "keep_end": [
        GOOD,
        answers(" the garden" + " the" * 20, " the world" + " the" * 20),
        answers(" the" * 20 + " garden", " the" * 20 + " world"),
    ],
}


@pytest.mark.parametrize("bad_rows", ["raise", "drop"])
@pytest.mark.parametrize("mode", CUT)
def test_equal_once_cut(
    mode: str, bad_rows: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both answers become the same tokens, so the pair has no gradient and its loss stays ln 2. Each way of cutting.

    Catches the other end being compared.
    """
    options: dict[str, Any] = {"max_length": 20, "truncation_mode": mode}
    if bad_rows == "raise":
        with pytest.raises(ValueError, match=r"^1 of 3 rows") as caught:
            build(tiny_model, tmp_path, pairs(*CUT[mode]), **options)
        assert f"1 with {EQUAL_CUT} (row 1)" in str(caught.value) and "raise max_length" in str(caught.value)
        return
    trainer = build(tiny_model, tmp_path, pairs(*CUT[mode]), bad_rows="drop", **options)
    kept = [row["chosen"].removesuffix("<|im_end|>") for row in trainer.train_dataset]
    assert kept == [CUT[mode][0]["chosen"], CUT[mode][2]["chosen"]]
    assert f"lost 1 with {EQUAL_CUT}." in caplog.text


def test_the_same_pairs_are_fine_without_a_limit(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a slice that is wrong for max_length=None."""
    for rows in CUT.values():
        assert len(build(tiny_model, tmp_path, pairs(*rows), max_length=None).train_dataset) == 3


def test_keep_end_keeps_the_answer_of_a_long_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """There the beginning of the prompt goes. Catches keep_start's rule for both."""
    trainer = build(
        tiny_model, tmp_path, pairs(GOOD, GOOD | {"prompt": LONG}), max_length=20, truncation_mode="keep_end"
    )
    assert len(trainer.train_dataset) == 2


def test_messages_that_the_template_makes_equal(tiny_model: Path, tmp_path: Path) -> None:
    """Many templates strip white space. Catches a comparison of the texts alone."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    rows = pairs(
        {"prompt": [user()], "chosen": [says("Yes.")], "rejected": [says("No.")]},
        {"prompt": [user()], "chosen": [says("Yes.")], "rejected": [says("Yes.\n")]},
    )
    with pytest.raises(ValueError, match=r"^1 of 2 rows .* 1 with chosen equal to rejected.* \(row 1\)"):
        DPOTrainer(
            str(tiny_model), args=DPOConfig(**settings(tmp_path)), train_dataset=rows, processing_class=tokenizer
        )


def test_both_faults_of_length_keep_their_row_numbers(tiny_model: Path, tmp_path: Path) -> None:
    """Catches numbers counted after TRL's own filter."""
    rows = [GOOD | {"prompt": LONG}, CUT["keep_start"][1], GOOD, CUT["keep_start"][1]]
    with pytest.raises(ValueError, match=r"^3 of 4 rows") as caught:
        build(tiny_model, tmp_path, pairs(*rows), max_length=20)
    assert f"1 with {NOTHING_LEFT} (row 0); 2 with {EQUAL_CUT} (rows 1, 3)" in str(caught.value)


@pytest.mark.parametrize("kind", ["prompt", "cut"])
def test_nothing_left_after_cutting(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Dropping everything is an error here too."""
    row = GOOD | {"prompt": LONG} if kind == "prompt" else CUT["keep_start"][1]
    with pytest.raises(ValueError, match="No pair of the train dataset is left"):
        build(tiny_model, tmp_path, pairs(row, row), max_length=20, bad_rows="drop")


# ---- other data sets -----------------------------------------------------------------------------------------------


def test_the_evaluation_set_is_checked_before_a_model_is_loaded(
    no_model: None, tiny_model: Path, tmp_path: Path
) -> None:
    """Catches a check of the training rows alone."""
    with pytest.raises(ValueError, match=r"^1 of 2 rows of eval_dataset"):
        build(tiny_model, tmp_path, pairs(GOOD), pairs(GOOD, answers(" a", " a")))


@pytest.mark.parametrize("kind", [dict, DatasetDict])
def test_each_of_several_evaluation_sets(kind: type, tiny_model: Path, tmp_path: Path, no_model: None) -> None:
    """Named in the message. Catches the first or last one alone."""
    for bad in ("first", "second"):
        sets = kind({name: pairs(GOOD, answers(" a", " a") if name == bad else GOOD) for name in ("first", "second")})
        with pytest.raises(ValueError, match=rf"rows of eval_dataset\['{bad}'\]"):
            build(tiny_model, tmp_path, pairs(GOOD), sets)


def test_several_evaluation_sets_are_cleaned(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a dict that is checked and then used as it was."""
    sets = {"first": pairs(*MIXED), "second": pairs(GOOD, answers("", " x"))}
    trainer = build(tiny_model, tmp_path, pairs(GOOD), sets, bad_rows="drop")
    assert {name: len(part) for name, part in trainer.eval_dataset.items()} == {"first": 3, "second": 1}
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_first_loss"]) and math.isfinite(metrics["eval_second_loss"])


def test_a_data_set_given_to_evaluate_is_checked(tiny_model: Path, tmp_path: Path) -> None:
    """Alone and in a dict. Catches rows that meet no check because the trainer was built without them."""
    trainer = build(tiny_model, tmp_path, pairs(GOOD))
    bad = pairs(GOOD, answers(" a", " a"))
    with pytest.raises(ValueError, match=r"^1 of 2 rows of the eval dataset"):
        trainer.evaluate(bad)
    with pytest.raises(ValueError, match=r"^1 of 2 rows of the held_out dataset"):
        trainer.evaluate({"held_out": bad})
    assert math.isfinite(trainer.evaluate(pairs(GOOD, GOOD))["eval_loss"])
    dropping = build(tiny_model, tmp_path, pairs(GOOD), bad_rows="drop")
    assert math.isfinite(dropping.evaluate(bad)["eval_loss"])
    with pytest.raises(ValueError, match="No pair of the eval dataset is left"):
        dropping.evaluate(pairs(answers(" a", " a")))


def test_a_stream_is_checked_while_it_is_read(tiny_model: Path, tmp_path: Path) -> None:
    """The bad row comes in the second step, so the first one is trained. Catches a stream that is never checked."""
    rows = [answers(f" {letter}", " x") for letter in "abcdefg"] + [answers(" x", "x ")]
    stream = pairs(*rows).to_iterable_dataset()
    trainer = build(tiny_model, tmp_path, stream, max_steps=2)
    with pytest.raises(ValueError, match=rf"^1 of the streamed rows of train_dataset .*{EQUAL} \(row 7\)"):
        trainer.train()


def test_a_stream_drops_its_bad_rows(tiny_model: Path, tmp_path: Path) -> None:
    """Catches a filter with its condition the wrong way round."""
    trainer = build(tiny_model, tmp_path, pairs(*MIXED).to_iterable_dataset(), bad_rows="drop", max_steps=2)
    kept = [row["chosen"].removesuffix("<|im_end|>") for row in trainer.train_dataset]
    assert kept == [" Because.", "你好", " b"]
    trainer.train()
    assert all(map(math.isfinite, history(trainer, "loss")))


@pytest.mark.parametrize("stream", [False, True])
def test_implicit_prompts_and_messages_train(stream: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Catches a check that reads a `prompt` column which is not there."""
    rows = pairs(
        {"chosen": [user(), says("Yes.")], "rejected": [user(), says("No.")]},
        {"chosen": [user("Who?"), says("")], "rejected": [user("Who?"), says("Me.")]},
        {"chosen": [user("谁？"), says("我。")], "rejected": [user("谁？"), says("你。")]},
    )
    dataset: Any = rows.to_iterable_dataset() if stream else rows
    trainer = build(tiny_model, tmp_path, dataset, bad_rows="drop", per_device_train_batch_size=2)
    assert [row["prompt"][0]["content"] for row in trainer.train_dataset] == ["Why?", "谁？"]
    trainer.train()
    assert all(map(math.isfinite, history(trainer, "loss")))


def test_a_prompt_of_none_is_a_bad_row(tiny_model: Path, tmp_path: Path) -> None:
    """TRL takes a `prompt` column as it is. Catches a row that passes and then fails in TRL's tokenisation."""
    rows = pairs(GOOD, GOOD | {"prompt": None})
    with pytest.raises(ValueError, match=r"^1 of 2 rows"):
        build(tiny_model, tmp_path, rows)


def test_a_stream_reports_what_max_length_cuts(tiny_model: Path, tmp_path: Path) -> None:
    """Rows that are lost to max_length count as bad rows in a stream too. Catches TRL's silent filter."""
    stream = pairs(GOOD, GOOD | {"prompt": LONG}).to_iterable_dataset()
    with pytest.raises(ValueError, match=NOTHING_LEFT):
        list(build(tiny_model, tmp_path, stream, max_length=20).train_dataset)


def test_a_plain_trl_config_checks_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Ours with TRL's config is TRL's trainer. Catches a check that the user did not ask for."""
    trainer = DPOTrainer(
        str(tiny_model),
        args=trl.DPOConfig(**settings(tmp_path)),
        train_dataset=pairs(GOOD, answers(" a", " a")),
        eval_dataset=pairs(answers("", "")),
    )
    assert len(trainer.train_dataset) == 2 and len(trainer.eval_dataset) == 1
    assert ROW not in trainer.train_dataset.column_names


def test_what_is_no_data_set_is_left_to_trl(tiny_model: Path, tmp_path: Path) -> None:
    """A list of rows gets TRL's own error. Catches one about columns, from a check that expects a data set."""
    errors = []
    for trainer_class, config_class in ((DPOTrainer, DPOConfig), (trl.DPOTrainer, trl.DPOConfig)):
        with pytest.raises(Exception) as caught:
            trainer_class(str(tiny_model), args=config_class(**settings(tmp_path)), train_dataset=[GOOD])
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_rows_that_trl_does_not_tokenise_pass() -> None:
    """Vision rows are tokenised on the fly, so nothing can be said about cuts. Catches a KeyError."""
    vision = Dataset.from_dict({"images": [[1]], "chosen": [[says("a")]], "rejected": [[says("b")]]})
    assert RowCheck("raise", "train", 20).tokenised(vision, vision) is vision


# ---- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversational", [False, True])
def test_each_answer_ends_with_one_eos(conversational: bool, tiny_model: Path, tmp_path: Path) -> None:
    """Messages get theirs from the template, texts from TRL. Catches two of them, and none."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = [
        {"prompt": [user()], "chosen": [says("Because.")], "rejected": [says("No idea.")]},
        {"prompt": [user("为什么？")], "chosen": [says("因为。")], "rejected": [says("不知道。")]},
    ]
    if not conversational:
        rows = [{name: messages[0]["content"] for name, messages in row.items()} for row in rows]
    trainer = build(tiny_model, tmp_path, pairs(*rows))
    for row in trainer.train_dataset:
        for name in ("chosen_ids", "rejected_ids"):
            assert row[name].count(tokenizer.eos_token_id) == 1
            # The template puts a line break after it.
            assert tokenizer.decode(row[name]).rstrip("\n").endswith("<|im_end|>")
        assert row["prompt_ids"].count(tokenizer.eos_token_id) == int(conversational)


def test_precomputed_reference_values_belong_to_one_model(tiny_model: Path, tmp_path: Path) -> None:
    """The same rows from one file, two models: each run has its own values; the same model meets its cache again.

    Catches a cache keyed by the data alone, and rows whose identity changes from run to run.
    """
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    perturb(model, 0.02, seed=3)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(other)
    near_pairs(8).save_to_disk(str(tmp_path / "rows"))
    values, caches = [], []
    for folder in (tiny_model, other, tiny_model):
        dataset = Dataset.load_from_disk(str(tmp_path / "rows"))
        trainer = build(folder, tmp_path / "run", dataset, precompute_ref_log_probs=True)
        trainer.train()
        assert history(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
        values.append(trainer.train_dataset["ref_chosen_logps"][:])
        caches.append(set((tmp_path / "rows").glob("cache-*")))
    assert values[0] != values[1]
    assert values[2] == values[0]
    assert caches[0] < caches[1] == caches[2]

"""Each shipped recipe trains: real command-line path, tiny model, one step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from datasets_builders.embedded_prompts import prepare_embedded_prompts
from trl_ext.scripts import TRAINING_SCRIPTS, run_training_script

RECIPES = Path(__file__).resolve().parents[1] / "launch" / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))

pytest.importorskip("vaderSentiment")
pytest.importorskip("reasoning_gym")

COLOURS = ("red", "green", "blue", "yellow")


@pytest.fixture(scope="module")
def pair_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as DPO's recipes take it; the repeated pair of the second row is what `bad_rows: drop` is for."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {"prompt": f"Name colour {i}.", "chosen": f" {COLOURS[i % 4]}, gladly", "rejected": f" {COLOURS[i % 4]}, no"}
        for i in range(12)
    ]
    rows[1]["rejected"] = rows[1]["chosen"]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def judged_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as KTO's recipe takes it."""
    folder = tmp_path_factory.mktemp("judged")
    rows = [{"prompt": f"Name colour {i}.", "completion": f" {COLOURS[i % 4]}", "label": i % 2 == 0} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def flags_for(method: str, pair_data: Path, judged_data: Path) -> list[str]:
    """What a test changes in the recipes of a method."""
    if method in ("dpo", "reward"):
        return ["--dataset_name", str(pair_data)]
    if method == "kto":
        return ["--dataset_name", str(judged_data)]
    return ["--max_completion_length", "8"]


def trained_ensemble(tiny_model: Path, tmp_path: Path) -> Path:
    """What the recipe's own first command makes, from pairs of messages, as its prompts are."""
    folder, pair_data = tmp_path / "ensemble", tmp_path / "pairs"
    pair_data.mkdir()
    row = {
        "prompt": [{"role": "user", "content": "Name a colour."}],
        "chosen": [{"role": "assistant", "content": "Red, gladly"}],
        "rejected": [{"role": "assistant", "content": "No"}],
    }
    (pair_data / "train.jsonl").write_text(4 * (json.dumps(row) + "\n"), encoding="utf-8")
    flags = ["--config", str(RECIPES / "reward_ensemble_heads.yaml"), "--model_name_or_path", str(tiny_model)]
    flags += ["--output_dir", str(folder), "--dataset_name", str(pair_data), "--max_steps", "1", "--use_cpu"]
    run_training_script("reward", [*flags, "--bf16", "false", "--disable_tqdm", "true"])
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_trains(name: str, tiny_model: Path, tmp_path: Path, pair_data: Path, judged_data: Path) -> None:
    """Catches an unknown field, a refused combination, a reward that does not load."""
    flags = ["--config", str(RECIPES / name), "--model_name_or_path", str(tiny_model), "--output_dir", str(tmp_path)]
    method = next((method for method in TRAINING_SCRIPTS if name.startswith(method)), "grpo")
    if name == "grpo_ensemble_lcb.yaml":
        flags += ["--reward_funcs", f"ensemble:{trained_ensemble(tiny_model, tmp_path)}?reduce=lcb&coef=1.0"]
    if "load_in_4bit" in (RECIPES / name).read_text(encoding="utf-8"):
        pytest.importorskip("bitsandbytes")
    else:
        flags += ["--bf16", "false"]
    flags += ["--max_steps", "1", "--use_cpu", "--save_steps", "1"]
    flags += ["--save_strategy", "steps", "--disable_tqdm", "true", *flags_for(method, pair_data, judged_data)]
    if name == "quickstart.yaml":  # its own script chooses the data; here it runs through the general one
        flags += ["--dataset_name", "embedded", "--reward_funcs", "trl_ext.rewards.tone_reward"]
        flags += ["trl_ext.rewards.length_reward"]
    run_training_script(method, flags, datasets={"embedded": lambda: prepare_embedded_prompts(tmp_path / "cache")})
    run = tmp_path / "member-0" if name == "reward_ensemble_adapters.yaml" else tmp_path
    log = json.loads((run / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert "loss" in log[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_opens_with_its_paper_and_what_to_watch(name: str) -> None:
    text = (RECIPES / name).read_text(encoding="utf-8")
    head = text.split("\n\n", 1)[0]
    assert re.search(r"^# Papers? ", head, re.M) and re.search(r"^# Watch ", head, re.M)
    assert isinstance(yaml.safe_load(text), dict)

"""Each shipped recipe trains: real command-line path, tiny model, one step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from datasets_builders.embedded_prompts import prepare_embedded_prompts
from trl_ext.scripts import run_training_script

RECIPES = Path(__file__).resolve().parents[1] / "launch" / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))

pytest.importorskip("vaderSentiment")
pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_trains(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches an unknown field, a refused combination, a reward that does not load."""
    flags = ["--config", str(RECIPES / name), "--model_name_or_path", str(tiny_model), "--output_dir", str(tmp_path)]
    flags += ["--max_steps", "1", "--max_completion_length", "8", "--use_cpu", "--bf16", "false", "--save_steps", "1"]
    flags += ["--save_strategy", "steps", "--disable_tqdm", "true"]
    if name == "quickstart.yaml":  # its own script chooses the data; here it runs through the general one
        flags += ["--dataset_name", "embedded", "--reward_funcs", "trl_ext.rewards.tone_reward"]
        flags += ["trl_ext.rewards.length_reward"]
    method = "rloo" if name.startswith("rloo") else "grpo"
    run_training_script(method, flags, datasets={"embedded": lambda: prepare_embedded_prompts(tmp_path / "cache")})
    log = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert "loss" in log[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_opens_with_its_paper_and_what_to_watch(name: str) -> None:
    text = (RECIPES / name).read_text(encoding="utf-8")
    head = text.split("\n\n", 1)[0]
    assert re.search(r"^# Papers? ", head, re.M) and re.search(r"^# Watch ", head, re.M)
    assert isinstance(yaml.safe_load(text), dict)

"""The quickstart's command line, and one short run of it on a tiny model."""

import importlib.util
import json
from pathlib import Path

import pytest

for package in ("matplotlib", "reasoning_gym", "if_verifiable", "vaderSentiment"):
    pytest.importorskip(package)

SCRIPT = Path(__file__).parents[2] / "launch" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", [["--model", "some/model"], ["--model=some/model"]])
def test_model_and_any_field_pass_through(quickstart, model, tmp_path):
    args, model_args = quickstart.parse([*model, "--max_steps", "3", "--lora_r", "4", "--output_dir", str(tmp_path)])
    assert (model_args.model_name_or_path, model_args.lora_r, args.max_steps) == ("some/model", 4, 3)
    assert (args.multi_objective_aggregation, args.kl_estimator) == ("gdpo", "k3")  # the recipe's
    assert args.use_bias_correction_kl and args.entropy_coef > 0 and args.beta > 0


def test_an_own_config_file_replaces_the_recipe(quickstart, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"model_name_or_path: some/model\nmax_steps: 2\noutput_dir: {tmp_path}\n")
    args, _ = quickstart.parse(["--config", str(path)])
    assert (args.max_steps, args.multi_objective_aggregation) == (2, "sum_then_normalize")


def test_a_run_leaves_a_complete_folder_and_the_next_one_its_own(quickstart, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "build_quickstart_prompts", _few_prompts)
    command = ["--model", str(tiny_model), "--max_steps", "1", "--max_completion_length", "4"]
    quickstart.main(command)
    folder = tmp_path / "runs" / "quickstart"
    for name in ("metrics.jsonl", "curves.png", "report.html", "results.json", "adapter_model.safetensors"):
        assert (folder / name).is_file(), name
    assert list((folder / "completions").glob("*.parquet"))
    assert set(json.loads((folder / "results.json").read_text())) == {
        "answer_reward", "instruction_reward", "length_reward", "tone_reward", "overall"
    }  # fmt: skip
    quickstart.main(command)
    assert (tmp_path / "runs" / "quickstart-2" / "report.html").is_file()
    shown = capsys.readouterr()
    assert "is kept" in shown.out and "overall" in shown.out and "1/1" in shown.err


def _few_prompts(seed):
    from datasets_builders.quickstart_prompts import build_quickstart_prompts

    return build_quickstart_prompts(train=4, heldout=4, seed=seed)

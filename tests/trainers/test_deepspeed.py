"""A real ZeRO-2 engine on two CPU processes: the early stop holds the weights there too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ZERO2 = ROOT / "launch" / "accelerate" / "zero2_cpu2.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.xdist_group("distributed")]


def launch(offload: str, tiny_model: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the worker on two processes with a ZeRO-2 engine."""
    config = yaml.safe_load(ZERO2.read_text())
    config["deepspeed_config"]["offload_optimizer_device"] = offload
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
    command += ["-m", "tests.trainers.deepspeed_worker", str(tiny_model), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=500, capture_output=True, text=True)


def test_early_stop_is_refused_with_an_offloaded_optimizer(tiny_model: Path, tmp_path: Path) -> None:
    """There DeepSpeed steps an Adam of its own. Catches a stop that is logged while the weights move on."""
    pytest.importorskip("deepspeed")
    result = launch("cpu", tiny_model, tmp_path)
    assert result.returncode != 0
    assert "with an offloaded optimizer DeepSpeed steps an optimiser of its own" in result.stderr.replace("\n", " ")


def test_early_stop_under_zero2(tiny_model: Path, tmp_path: Path) -> None:
    """DeepSpeed steps inside backward, on its own flat copies of the parameters; AdamW with weight decay.

    Catches a stop that only zeroes gradients, and one that reaches the unwrapped optimiser alone.
    """
    pytest.importorskip("deepspeed")
    result = launch("none", tiny_model, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["engine"] == "DeepSpeedEngine" and first["processes"] == 2
    assert first["skipped"] == second["skipped"] == [0, 1, 1, 0, 1, 1]
    assert first["checksums"] == second["checksums"]
    steps = first["checksums"]
    for stopped in (1, 2, 4, 5):
        assert steps[stopped] == steps[stopped - 1]
    assert steps[0] != steps[3]

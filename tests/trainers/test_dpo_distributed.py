"""DPO on two gloo processes, and under DeepSpeed engines, against one process on the same batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.trainers.dpo_worker import CASES, MIXED

ROOT = Path(__file__).resolve().parents[2]
ZERO2 = ROOT / "launch" / "accelerate" / "zero2_cpu2.yaml"

# One group with the other tests that start processes: they never run at the same time.
pytestmark = pytest.mark.xdist_group("distributed")

WORKER = ["-m", "tests.trainers.dpo_worker"]


def start(launcher: list[str], *arguments: Any, timeout: int = 300) -> None:
    command = [sys.executable, *launcher, *WORKER, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=timeout)


def saw(folder: Path, world: int, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / f"world{world}_rank{rank}.json").read_text())
    return results


def difference(first: Path, second: Path) -> float:
    """The largest absolute difference between two weights files."""
    one, two = torch.load(first), torch.load(second)
    assert one.keys() == two.keys()
    return float(max((one[key].double() - two[key].double()).abs().max() for key in one))


def values(history: list[dict[str, float]], key: str) -> list[float]:
    return [entry[key] for entry in history if key in entry]


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where the weights are, and what one process and each of two ranks saw."""
    folder = tmp_path_factory.mktemp("dpo_distributed")
    start(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], tiny_model, folder, 2)
    start([], tiny_model, folder, 1)
    return folder, {f"{world}.{rank}": saw(folder, world, rank) for world, rank in ((1, 0), (2, 0), (2, 1))}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(case: str, results: tuple[Path, dict[str, Any]]) -> None:
    """2 ranks x 2 pairs are 1 process x 4 pairs: weights, and every logged number of training.

    Catches a projection on local gradients, a chosen gradient that is not summed over ranks, a local mean in a metric,
    evaluation rows counted twice where they do not divide into the ranks' batches.
    """
    folder, seen = results
    one, two = seen["1.0"][case], seen["2.0"][case]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["engine"] == "DistributedDataParallel"
    assert difference(folder / f"{case}_world1_rank0.pt", folder / f"{case}_world2_rank0.pt") < 1e-6
    assert len(one["history"]) == len(two["history"])
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine.keys() == theirs.keys()
        # The logs of an evaluation are means over batches, of 2 and of 4 pairs here; the guard's number is not.
        for key in () if "eval_loss" in mine else mine.keys():
            assert theirs[key] == pytest.approx(mine[key], rel=1e-4, abs=1e-5), key
    if one["guard"] is not None:
        assert two["guard"] == pytest.approx(one["guard"], abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_do_the_same(case: str, results: tuple[Path, dict[str, Any]]) -> None:
    """Bit for bit. Catches a decision, of the projection or of the guard, on what one rank sees."""
    folder, seen = results
    first, second = seen["2.0"][case], seen["2.1"][case]
    assert difference(folder / f"{case}_world2_rank0.pt", folder / f"{case}_world2_rank1.pt") == 0.0
    assert first["guard"] == second["guard"]


def test_the_cases_exercise_what_they_name(results: tuple[Path, dict[str, Any]]) -> None:
    """Real projections and a raised lambda: agreement of things that never happen would prove nothing."""
    one = results[1]["1.0"]
    for case in ("projected", "accumulated"):
        assert 1.0 in values(one[case]["history"], "projection/active"), case
        assert all(values(one[case]["history"], "entropy_chosen")), case
    for case in ("guard_on_eval", "guard_on_batches"):
        assert one[case]["guard"]["factor"] > 1, case
        assert len(set(values(one[case]["history"], "dpop/lambda"))) > 1, case


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------

# Plain SGD keeps the comparison exact; DeepSpeed would force its own Adam on an offloaded optimiser otherwise.
ENGINE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


ENGINE_CASES = {
    "projected": MIXED | {"gradient_accumulation_steps": 2, "max_grad_norm": 10.0},
    "off": {"loss_type": ["dpop"]},
}


@pytest.fixture(scope="module")
def without_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process without DeepSpeed left what it saw."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("without_engine")
    start([], tiny_model, folder, 1, json.dumps(ENGINE_CASES))
    return folder


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero2_offload"])
def test_projection_under_deepspeed(engine: str, without_engine: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Two processes with a real engine, which steps inside backward, against one without: weights to 1e-5.

    Two accumulated micro-batches. Catches a second gradient that the engine takes for its backward pass, a projection
    of a rank's own partition or of the last micro-batch alone, one after the step, and a clipping by the norm of the
    gradient before its projection. With an offloaded optimiser DeepSpeed takes the norm while gradients arrive, so
    there the norm is the one before; nothing is clipped here.
    """
    config = yaml.safe_load(ZERO2.read_text())
    zero: dict[str, Any] = {"stage": 1 if engine == "zero1" else 2}
    if engine == "zero2_offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE | {"zero_optimization": zero}))
    config["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "engine.json"), "zero3_init_flag": False}
    del config["mixed_precision"]
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml")]
    start(launcher, tiny_model, tmp_path, 2, json.dumps(ENGINE_CASES), timeout=500)
    for case in ("off", "projected"):
        one = saw(without_engine, 1, 0)[case]
        first, second = (saw(tmp_path, 2, rank)[case] for rank in (0, 1))
        assert (first["engine"], first["processes"]) == ("DeepSpeedEngine", 2)
        assert first["zero_stage"] == zero["stage"]
        keys = ["logps/chosen_vs_ref", "projection/active", "projection/cosine", "grad_norm"]
        for key in keys[:-1] if engine == "zero2_offload" else keys:
            assert values(first["history"], key) == pytest.approx(values(one["history"], key), rel=1e-3, abs=1e-4), key
            assert values(second["history"], key) in ([], values(first["history"], key)), key
        single, *ranks = (without_engine / f"{case}_world1_rank0.pt", *sorted(tmp_path.glob(f"{case}_world2_rank?.pt")))
        assert len(ranks) == 2
        assert difference(single, ranks[0]) < 1e-5
        assert difference(*ranks) == 0.0
    assert 1.0 in values(first["history"], "projection/active")

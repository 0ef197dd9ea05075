"""Reward models on two gloo processes, against one process on the same batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.reward_worker import CASES

ROOT = Path(__file__).resolve().parents[2]

# One group with the other tests that start processes: they never run at the same time.
pytestmark = pytest.mark.xdist_group("distributed")

HEADS = [case for case in CASES if case.startswith("heads")]
TIMES = ("_runtime", "_per_second", "total_flos")


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where the weights are, and what one process and each of two ranks saw."""
    folder = tmp_path_factory.mktemp("reward_distributed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = ["-m", "tests.trainers.reward_worker", str(tiny_model), str(folder)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*torchrun, *worker, "2"], check=True, cwd=ROOT, env=environment, timeout=300)
    subprocess.run([sys.executable, *worker, "1"], check=True, cwd=ROOT, env=environment, timeout=300)
    names = ("world1_rank0", "world2_rank0", "world2_rank1")
    return folder, {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def difference(folder: Path, case: str, first: str, second: str) -> float:
    """The largest absolute difference between two weights files."""
    one, two = (torch.load(folder / f"{case}_{name}.pt") for name in (first, second))
    assert one.keys() == two.keys()
    return max((one[key].double() - two[key].double()).abs().max().item() for key in one)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(case: str, results: tuple[Path, dict[str, Any]]) -> None:
    """2 ranks x 2 pairs are 1 process x 4 pairs: weights, every logged number, the calibration.

    Catches bootstrap weights that depend on the rank or its part of the batch, a local mean in a metric, members that
    ranks train in another order, a calibration on a rank's own rows.
    """
    folder, seen = results
    one, two = seen["world1_rank0"][case], seen["world2_rank0"][case]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["engine"] == "DistributedDataParallel"
    assert difference(folder, case, "world1_rank0", "world2_rank0") < 1e-6
    assert len(one["history"]) == len(two["history"])
    for mine, theirs in zip(one["history"], two["history"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if not key.endswith(TIMES):
                assert theirs[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert two["mean"] == pytest.approx(one["mean"], abs=1e-5)
    assert two["std"] == pytest.approx(one["std"], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_do_the_same(case: str, results: tuple[Path, dict[str, Any]]) -> None:
    """Bit for bit. Catches heads that each rank draws for itself."""
    folder, seen = results
    assert difference(folder, case, "world2_rank0", "world2_rank1") == 0.0
    first, second = seen["world2_rank0"][case], seen["world2_rank1"][case]
    assert (first["mean"], first["std"]) == (second["mean"], second["std"])


@pytest.mark.parametrize("case", HEADS)
def test_the_cases_exercise_what_they_name(case: str, results: tuple[Path, dict[str, Any]]) -> None:
    """Members that disagree and weights that move: agreement of things that never happen would prove nothing."""
    _, seen = results
    history = seen["world1_rank0"][case]["history"]
    assert all(entry["ensemble/disagreement"] > 1e-3 for entry in history if "ensemble/disagreement" in entry)
    assert len({entry["loss"] for entry in history if "loss" in entry}) > 1

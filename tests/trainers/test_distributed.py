"""Two gloo processes: every rank agrees with the other and with one process on the same completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.distributed_worker import CASES

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process and each of two ranks saw."""
    folder = tmp_path_factory.mktemp("distributed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = ["-m", "tests.trainers.distributed_worker", str(tiny_model), str(folder)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*torchrun, *worker, "2"], check=True, cwd=ROOT, env=environment, timeout=300)
    subprocess.run([sys.executable, *worker, "1"], check=True, cwd=ROOT, env=environment, timeout=300)
    names = ("world1_rank0", "world2_rank0", "world2_rank1")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_do_the_same(case: str, results: dict[str, dict[str, Any]]) -> None:
    """Coefficients, stop decisions and weights. Catches a decision on local values."""
    first, second = results["world2_rank0"][case], results["world2_rank1"][case]
    assert first["processes"] == second["processes"] == 2
    assert first["beta"] == second["beta"]
    assert first["weights"] == second["weights"]
    for key in ("kl_coef", "policy_kl_coef", "kl_early_stop/skipped"):
        assert first["history"][key] == second["history"][key]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(case: str, results: dict[str, dict[str, Any]]) -> None:
    """The same eight completions, a group split over the ranks: same advantages, same update.

    Catches local statistics, a missing world size in a normaliser, diversity of half a group.
    """
    one, two = results["world1_rank0"][case], results["world2_rank0"][case]
    assert one["processes"] == 1
    assert two["advantages"] == pytest.approx(one["advantages"], abs=1e-4)
    assert two["diversity"] == pytest.approx(one["diversity"])
    for key, values in one["history"].items():
        assert two["history"][key] == pytest.approx(values, rel=1e-3, abs=1e-7), key
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-5, abs=1e-4)


def test_the_cases_exercise_what_they_name(results: dict[str, dict[str, Any]]) -> None:
    """Moved coefficients, real stops: agreement of things that never happen would prove nothing."""
    one = results["world1_rank0"]
    assert len(set(one["grpo_dapo"]["history"]["kl_coef"])) > 1
    assert len(set(one["grpo_dapo"]["history"]["policy_kl_coef"])) > 1
    assert len(set(one["rloo"]["history"]["kl_coef"])) > 1
    assert one["grpo_k1_reward"]["history"]["kl_early_stop/skipped"] == [0, 1, 1, 1, 0, 1, 1, 1]

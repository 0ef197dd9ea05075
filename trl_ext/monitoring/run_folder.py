"""What a run leaves behind: a folder of its own, and metrics that survive an interrupt."""

import json
import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from transformers import ProgressCallback, TrainerCallback

from trl_ext.files import write_atomic

METRICS = "metrics.jsonl"


def new_run_folder(wanted: str | os.PathLike[str]) -> Path:
    """Makes and returns `wanted`, or `wanted-2`, `wanted-3`, ... where that is taken.

    A run that was interrupted keeps its folder and the next one starts clean beside it, so no run ever mixes with
    another; the folder taken is printed. An empty folder counts as free.
    """
    wanted = Path(wanted)
    folder = _first_free(wanted)
    if folder == wanted:
        print(f"Run folder: {folder}")
    else:
        print(f"Run folder: {folder} ({wanted} holds an earlier run, finished or not, and is kept)")
    return folder


def _first_free(wanted: Path) -> Path:
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            if folder.is_dir() and not any(folder.iterdir()):
                return folder
            number += 1


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically; what JSON cannot hold becomes its string."""
    write_atomic(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str) + "\n")


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the folder's metrics file; a last line cut off by a kill is left out, a missing file is empty."""
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def environment() -> dict[str, str]:
    """Versions of Python, the system and the packages that decide a run's result."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in ("trl-ext", "trl", "transformers", "torch", "peft", "accelerate", "datasets"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class MetricsFile(TrainerCallback):
    """Appends every log of a trainer to `metrics.jsonl`: one JSON object per line, with `step` and `epoch`.

    Values that JSON lacks (NaN, infinities) are written as null. Each line is flushed at once, and a line that an
    earlier run left unfinished is removed before the first is added.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / METRICS

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Writes one line, on the first process only."""
        if not state.is_world_process_zero or not logs:
            return
        line = {"step": state.global_step, "epoch": state.epoch, **{k: v for k, v in logs.items() if k != "epoch"}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            _drop_unfinished_line(file)
            file.write((json.dumps(_finite(line), ensure_ascii=False, default=str) + "\n").encode())


class RewardProgress(ProgressCallback):
    """The trainer's progress bar with each reward's mean beside it, instead of every metric on a line of its own."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Shows the reward means of the last step."""
        if self.training_bar is None or not logs:
            return
        means = {
            key.split("/")[1].removesuffix("_reward"): value
            for key, value in logs.items()
            if _is_reward_mean(key) and value is not None
        }
        if means:
            self.training_bar.set_postfix({name: f"{float(value):.2f}" for name, value in means.items()})


def show_rewards(trainer: Any) -> None:
    """Replaces the trainer's progress bar, if it has one, by `RewardProgress`."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(RewardProgress())


def _is_reward_mean(key: str) -> bool:
    return key.startswith("rewards/") and key.endswith("/mean")


def _drop_unfinished_line(file: IO[bytes]) -> None:
    file.seek(0)
    whole = file.read()
    if whole and not whole.endswith(b"\n"):
        file.truncate(whole.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _finite(value.item())
    return value

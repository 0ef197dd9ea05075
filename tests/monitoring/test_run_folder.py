"""Run folders and the metrics file, above all after something went wrong."""

import json
import types

import numpy as np
import pytest

from trl_ext.monitoring import run_folder
from trl_ext.monitoring.run_folder import (
    MetricsFile,
    RewardProgress,
    new_run_folder,
    read_metrics,
    show_rewards,
    write_json,
)


def log(folder, step, main=True, **logs):
    state = types.SimpleNamespace(is_world_process_zero=main, global_step=step, epoch=step / 10)
    MetricsFile(folder).on_log(None, state, None, logs=logs)


def test_each_run_gets_its_own_folder(tmp_path):
    first = new_run_folder(tmp_path / "runs" / "q")
    assert new_run_folder(first) == first  # still empty
    (first / "metrics.jsonl").write_text("{}\n")
    second = new_run_folder(first)
    assert second.name == "q-2" and second.is_dir()
    (second / "x").touch()
    assert new_run_folder(first).name == "q-3"


def test_lines_are_json_whatever_was_logged(tmp_path):
    log(tmp_path, 1, loss=float("nan"), kl=np.float32(0.5), name="é 你好\u2028", nested=[float("inf"), 1])
    log(tmp_path, 2, loss=1.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = read_metrics(tmp_path)
    assert first == {"step": 1, "epoch": 0.1, "loss": None, "kl": 0.5, "name": "é 你好\u2028", "nested": [None, 1]}
    assert second["step"] == 2


def test_lines_survive_an_exception_in_training(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        for step in range(3):
            log(tmp_path, step, loss=0.1)
            if step == 1:
                raise KeyboardInterrupt
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    log(tmp_path, 1, loss=0.1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 2, "lo你'.encode()[:-1])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    log(tmp_path, 3, loss=0.1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_only_the_first_process_writes(tmp_path):
    log(tmp_path, 1, main=False, loss=0.1)
    assert read_metrics(tmp_path) == []


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", {"x": 1})

    def fail(*args):
        raise OSError("disk")

    monkeypatch.setattr(run_folder.os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}


def test_a_real_trainer_writes_a_line_per_log_and_shows_a_bar(tmp_path, capsys):
    import torch
    from transformers import Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x, labels=None):
            return {"loss": ((self.weight * x - 1.0) ** 2).mean()}

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=3, logging_steps=1, save_strategy="no")
    data = [{"x": torch.ones(()), "labels": torch.ones(())}] * 8
    trainer = Trainer(Line(), args, train_dataset=data, callbacks=[MetricsFile(tmp_path)])
    show_rewards(trainer)
    trainer.train()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 3]
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert "grad_norm" not in shown.out + shown.err  # the metrics do not tear the bar


def test_the_bar_shows_the_reward_means():
    bar = types.SimpleNamespace(shown=None)
    bar.set_postfix = lambda values: setattr(bar, "shown", values)
    callback = RewardProgress()
    callback.training_bar = bar
    callback.on_log(
        None, None, None, logs={"rewards/tone_reward/mean": 0.256, "rewards/tone/std": 1.0, "rewards/a/mean": None}
    )
    assert bar.shown == {"tone": "0.26"}

"""Step time and peak memory of our trainers against TRL's own class, in alternating turns.

    python -m tests.benchmarks.step_cost [--method grpo rloo dpo] [--turns 16] [--steps 6] [--model FOLDER]

One process per arm stays alive and they train in turn, a few steps each, so that a machine that slows down slows both.
The figure is the ratio ours / TRL of the times of neighbouring turns: median, and the quartiles over the turns; and the
ratio of the fastest turns, which a noisy machine disturbs least. A time is the process's CPU time (one thread), which
does not count the other programs of the machine.
Completions are fixed (sampling would give each arm other lengths), so generation is left out of the step, which makes
the ratio stricter than in real training.

Options: "off" compares our class with every option at its default. For GRPO and RLOO "on" switches on every option of
ours, against TRL with the same beta (the same reference forward) and entropy bonus. For DPO "dpop" and "projection" are
compared with TRL's plain DPO on the same pairs, all parameters trained, activation checkpointing as TRL has it by
default; "projection, no checkpointing" is against TRL without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 32

EVERYTHING: dict[str, Any] = {
    "kl_estimator": "k3",
    "kl_controller": "proportional",
    "kl_target": 0.05,
    "policy_kl_coef": 0.1,
    "policy_kl_controller": "doubling",
    "policy_kl_target": 0.01,
    "kl_early_stop": 1e9,
    "multi_objective_aggregation": "gdpo",
    "reward_gates": [{"gate": "even_tokens", "threshold": 0.1}],
    "diversity_coef": 0.1,
    "skip_zero_signal_groups": True,
    "entropy_coef": 0.01,
    "entropy_coef_final": 0.0,
}


@dataclass(frozen=True)
class Variant:
    """Settings of both arms, and what ours has on top."""

    shared: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


VARIANTS: dict[str, dict[str, Variant]] = {
    "grpo": {
        "off": Variant({"num_iterations": 1}),
        "on": Variant({"beta": 0.05, "num_iterations": 2, "entropy_coef": 0.01}, EVERYTHING),
    },
    "rloo": {
        "off": Variant({"num_iterations": 1}),
        "on": Variant({"beta": 0.05, "num_iterations": 2}, EVERYTHING),
    },
    "dpo": {
        "off": Variant(),
        "dpop": Variant({}, {"loss_type": ["dpop"]}),
        "projection": Variant({}, {"project_chosen_gradient": True}),
        "projection, no checkpointing": Variant({"activation_checkpointing": False}, {"project_chosen_gradient": True}),
    },
}


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward of another scale."""
    return [float(ids[0] % 100) for ids in completion_ids]


def build_trainer(arm: str, method: str, model: str, folder: str, variant: Variant, steps: int) -> Any:
    """The trainer of one arm, on data that are the same in every arm."""
    settings = variant.shared | (variant.ours if arm == "ours" else {})
    settings |= {"max_steps": steps, "learning_rate": 1e-6, "logging_steps": 1}
    build = build_dpo if method == "dpo" else build_rollout
    return build(importlib.import_module("trl" if arm == "trl" else "trl_ext"), method, model, Path(folder), settings)


def build_dpo(package: Any, method: str, model: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Four pairs a step; answers of 48 tokens or so that differ in one word."""
    from datasets import Dataset

    from tests.trainers.harness import base_config

    text = " ".join(f"Step {number}: add {number} to the sum and write it down." for number in range(1, 5))
    rows = {
        "prompt": [f"Count from {number} on, slowly." for number in range(8)],
        "chosen": [f" {text} Done {number}." for number in range(8)],
        "rejected": [f" {text} Lost {number}." for number in range(8)],
    }
    config = base_config(folder, per_device_train_batch_size=4, **settings)
    for name in ("num_generations", "max_completion_length"):
        del config[name]
    return package.DPOTrainer(model, args=package.DPOConfig(**config), train_dataset=Dataset.from_dict(rows))


def build_rollout(package: Any, method: str, model: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Eight completions a step, fixed."""
    from tests.trainers.harness import base_config, prompts

    config = base_config(
        folder, per_device_train_batch_size=8, num_generations=8, max_completion_length=TOKENS, **settings
    )
    name = method.upper()
    trainer = getattr(package, f"{name}Trainer")(
        model, [even_tokens, first_token], args=getattr(package, f"{name}Config")(**config), train_dataset=prompts()
    )
    vocabulary = trainer.model.config.vocab_size

    def fixed(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        rows = [
            [40 + (row * 131 + k * k * 7) % (vocabulary - 50) for k in range(TOKENS)] for row in range(len(prompt_ids))
        ]
        return (rows, None) if method == "grpo" else rows

    trainer._generate_single_turn = fixed
    return trainer


def worker(arm: str, method: str, model: str, variant: str, steps: int) -> None:
    """Train `steps` steps for every line read, and answer with the seconds."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(arm, method, model, folder, VARIANTS[method][variant], steps)
        for _ in sys.stdin:
            start = time.process_time()
            trainer.train()
            seconds = time.process_time() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print("RESULT " + json.dumps({"seconds": seconds, "peak_mib": peak}), flush=True)


class Arm:
    """A worker process that trains when asked."""

    def __init__(self, arm: str, method: str, model: str, variant: str, steps: int) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.step_cost", "--worker", arm, "--method", method]
        command += ["--model", model, "--steps", str(steps), "--variant", variant]
        self.errors = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def turn(self) -> dict[str, float]:
        """One turn; raises RuntimeError when the worker died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self.errors.seek(0)
        raise RuntimeError(f"the worker ended with code {self.process.wait()}:\n{self.errors.read()[-2000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def compare(method: str, model: str, variant: str, turns: int, steps: int) -> dict[str, Any]:
    """Alternate the two arms; the order within a pair is swapped every turn."""
    arms = {name: Arm(name, method, model, variant, steps) for name in ("trl", "ours")}
    for arm in arms.values():
        arm.turn()  # warm-up, not counted
    pairs = []
    for turn in range(turns):
        order = ("trl", "ours") if turn % 2 == 0 else ("ours", "trl")
        pairs.append({name: arms[name].turn() for name in order})
    for arm in arms.values():
        arm.close()
    ratios = [pair["ours"]["seconds"] / pair["trl"]["seconds"] for pair in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "method": method,
        "options": variant,
        "turns": turns,
        "steps_per_turn": steps,
        "trl_seconds_per_step": statistics.median(pair["trl"]["seconds"] for pair in pairs) / steps,
        "time_ratio": median,
        "time_ratio_quartiles": [low, high],
        "time_ratio_of_fastest": min(p["ours"]["seconds"] for p in pairs) / min(p["trl"]["seconds"] for p in pairs),
        "memory_ratio": pairs[-1]["ours"]["peak_mib"] / pairs[-1]["trl"]["peak_mib"],
        "trl_peak_mib": pairs[-1]["trl"]["peak_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=list(VARIANTS), nargs="+", default=list(VARIANTS))
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", choices=["trl", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.method[0], options.model, options.variant, options.steps)
        return
    from tests.benchmarks.machine import describe, print_header
    from trl_ext.files import write_atomic
    from trl_ext.models.embedded import resolve_model

    print_header(" ".join(["python -m tests.benchmarks.step_cost", *sys.argv[1:]]))
    model = resolve_model(options.model)
    print(
        "| trainer | options | TRL s/step | time ours / TRL (quartiles) | of the fastest turns "
        "| peak memory ours / TRL |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for method, variant in [(name, variant) for name in options.method for variant in VARIANTS[name]]:
        rows.append(row := compare(method, model, variant, options.turns, options.steps))
        low, high = row["time_ratio_quartiles"]
        print(
            f"| {row['method']} | {row['options']} | {row['trl_seconds_per_step']:.2f} | {row['time_ratio']:.3f} "
            f"({low:.3f} - {high:.3f}) | {row['time_ratio_of_fastest']:.3f} | {row['memory_ratio']:.3f} |",
            flush=True,
        )
        # After every row: the whole run takes long, and a part of it is worth keeping.
        name = "_".join(["step_cost", *(options.method if options.method != list(VARIANTS) else [])])
        write_atomic(options.out / f"{name}.json", json.dumps({"machine": describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

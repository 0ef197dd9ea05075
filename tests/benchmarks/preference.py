"""What each cure for falling chosen answers does, on pairs that differ in one token, over several seeds.

    python -m tests.benchmarks.preference [--seeds 5] [--steps 24] [--arms dpo dpop ...] [--model FOLDER]

The policy is SmolLM2-135M-Instruct with LoRA, first trained for 30 steps on worked-out sums (the usual SFT before DPO),
once for all runs. A pair is a sum of three numbers, worked out; the rejected answer has one wrong digit, one token, in
the middle: the setting in which Pal et al. 2024 (DPOP) show that DPO lowers the probability of the chosen answer. Every
arm has the same pairs, learning rate and beta. Held-out numbers are over 16 pairs not trained on, against the policy
before DPO: log-probability of the chosen and of the rejected answer (nats per answer), accuracy (the margin is
positive), perplexity per token of the chosen answers, and perplexity of neutral English text (the descriptions of
installed packages), whose rise would be the price. Cells: mean over seeds ± standard deviation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import metadata
from io import BytesIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tests.benchmarks.machine import describe, print_header
from trl_ext.files import write_atomic

ARMS: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": ["sigmoid"]},
    "dpo + sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]},
    "dpop": {"loss_type": ["dpop"]},
    "projection": {"loss_type": ["sigmoid"], "project_chosen_gradient": True},
    "dpo_shift": {"loss_type": ["dpo_shift"], "dpo_shift_lambda": 0.75},
    "cal_dpo": {"loss_type": ["cal_dpo"]},
}
BETA = 0.1
LEARNING_RATE = 1e-4
BATCH = 4
HELD_OUT = 16
SFT_STEPS, SFT_BATCH = 30, 8
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
NEUTRAL_PACKAGES = ("transformers", "datasets", "accelerate", "peft", "trl")


@dataclass(frozen=True)
class Result:
    """One run: numbers on held-out pairs, and the log-probability of the chosen answers at each evaluation."""

    arm: str
    seed: int
    seconds: float
    chosen: float
    rejected: float
    accuracy: float
    chosen_perplexity: float
    chosen_perplexity_start: float
    neutral_perplexity: float
    neutral_perplexity_start: float
    steps: list[int]
    curve_chosen: list[float]
    curve_margin: list[float]


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Sums of three two-digit numbers, and the same with one wrong digit in the first partial sum."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b, c = (draw.randint(10, 49) for _ in range(3))
        digits = list(str(a + b))
        place = draw.randrange(len(digits))
        digits[place] = draw.choice([digit for digit in "123456789" if digit != digits[place]])
        text = f" {a} + {b} = {{}}. {a + b} + {c} = {a + b + c}. The answer is {a + b + c}."
        chosen, rejected = text.format(a + b), text.format("".join(digits))
        rows.append({"prompt": f"What is {a} + {b} + {c}?", "chosen": chosen, "rejected": rejected})
    return rows


def train_start(model: str, folder: str) -> None:
    """The policy and reference of all runs: SFT on worked-out sums."""
    import torch
    import trl
    from datasets import Dataset

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(SFT_STEPS * SFT_BATCH, seed=500)]
    config = trl.SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        max_steps=SFT_STEPS, per_device_train_batch_size=SFT_BATCH, learning_rate=2e-5, activation_checkpointing=False,
        seed=0,
    )  # fmt: skip
    torch.set_num_threads(os.cpu_count() or 1)
    trainer = trl.SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(folder)


def neutral_text() -> str:
    """Plain paragraphs from the descriptions of installed packages."""
    lines = [
        line.strip()
        for name in NEUTRAL_PACKAGES
        for line in str(metadata(name).get_payload() or metadata(name)["Description"]).splitlines()
    ]
    return "\n".join(line for line in lines if len(line) > 80 and not set("<>|[]`{}") & set(line))[:3000]


def perplexity(model: Any, tokenizer: Any, text: str) -> float:
    """Of `text`, in windows of 256 tokens."""
    import torch

    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    losses = []
    model.eval()
    with torch.no_grad():
        for window in ids.split(256):
            if len(window) > 1:
                logits = model(input_ids=window[None]).logits[0, :-1]
                losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return float(torch.cat(losses).mean().exp())


def run(arm: str, seed: int, steps: int, model: str) -> Result:
    """Train one arm with one seed."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers.utils import logging

    import trl_ext

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = trl_ext.DPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
            max_steps=steps, per_device_train_batch_size=BATCH, per_device_eval_batch_size=16, seed=seed, beta=BETA,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", eval_strategy="steps",
            eval_steps=max(steps // 2, 1), eval_on_start=True, logging_steps=steps, activation_checkpointing=False,
            precompute_ref_log_probs=True, **ARMS[arm],
        )  # fmt: skip
        trainer = trl_ext.DPOTrainer(
            model,
            args=config,
            train_dataset=Dataset.from_list(pairs(steps * BATCH, 1000 + seed)),
            eval_dataset=Dataset.from_list(pairs(HELD_OUT, 7)),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        text = neutral_text()
        neutral_start = perplexity(trainer.model, trainer.processing_class, text)
        trainer.train()
        neutral_end = perplexity(trainer.model, trainer.processing_class, text)
    log = [entry for entry in trainer.state.log_history if "eval_logps/chosen_vs_ref" in entry]
    tokens = log[-1]["eval_logps/chosen_vs_ref"] / log[-1]["eval_logps/chosen_vs_ref_per_token"]
    return Result(
        arm=arm,
        seed=seed,
        seconds=time.perf_counter() - start,
        chosen=log[-1]["eval_logps/chosen_vs_ref"],
        rejected=log[-1]["eval_logps/rejected_vs_ref"],
        accuracy=log[-1]["eval_rewards/accuracies"],
        chosen_perplexity=float(torch.tensor(-log[-1]["eval_logps/chosen"] / tokens).exp()),
        chosen_perplexity_start=float(torch.tensor(-log[0]["eval_logps/chosen"] / tokens).exp()),
        neutral_perplexity=neutral_end,
        neutral_perplexity_start=neutral_start,
        steps=[int(entry["step"]) for entry in log],
        curve_chosen=[entry["eval_logps/chosen_vs_ref"] for entry in log],
        curve_margin=[entry["eval_logps/chosen_vs_ref"] - entry["eval_logps/rejected_vs_ref"] for entry in log],
    )


def spread(values: Sequence[float], digits: int) -> str:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return f"{fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def table(results: Sequence[Result]) -> str:
    """Markdown; one row per arm."""
    lines = [
        "| arm | chosen vs reference, nats | margin, nats | held-out accuracy | perplexity of chosen (start) "
        "| perplexity of neutral text (start) |",
        "|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [result for result in results if result.arm == arm]
        cells = [
            arm,
            spread([run.chosen for run in runs], 2),
            spread([run.chosen - run.rejected for run in runs], 2),
            spread([run.accuracy for run in runs], 3),
            f"{spread([run.chosen_perplexity for run in runs], 3)} ({runs[0].chosen_perplexity_start:.3f})",
            f"{spread([run.neutral_perplexity for run in runs], 2)} ({runs[0].neutral_perplexity_start:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(results: Sequence[Result]) -> bytes:
    """Held-out chosen log-probability and margin over the run; band = lowest to highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, arm in enumerate(dict.fromkeys(result.arm for result in results)):
        runs = [result for result in results if result.arm == arm]
        for axis, curves in zip(axes, ([r.curve_chosen for r in runs], [r.curve_margin for r in runs]), strict=True):
            columns = list(zip(*curves, strict=True))
            axis.plot(runs[0].steps, [fmean(column) for column in columns], label=arm, color=f"C{number}")
            axis.fill_between(
                runs[0].steps, list(map(min, columns)), list(map(max, columns)), color=f"C{number}", alpha=0.15
            )
    axes[0].axhline(0, color="black", linestyle=":", linewidth=1)
    axes[0].set_title("chosen answer against the reference (nats)", fontsize=9)
    axes[1].set_title("margin (nats)", fontsize=9)
    for axis in axes:
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0].legend(fontsize=7)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    pyplot.close(figure)
    return drawn.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--arms", choices=list(ARMS), nargs="+", default=list(ARMS))
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    import matplotlib  # noqa: F401  (missing: say so now, not after ten minutes)

    os.environ |= ENVIRONMENT
    from trl_ext.models.embedded import resolve_model

    command = shlex.join(["python", "-m", "tests.benchmarks.preference", *sys.argv[1:]])
    print_header(command)
    start = tempfile.TemporaryDirectory()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(train_start, resolve_model(options.model), start.name).result()
    jobs = [(arm, seed) for seed in range(options.seeds) for arm in options.arms]
    results: list[Result] = []
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, arm, seed, options.steps, start.name) for arm, seed in jobs]
        for future in as_completed(futures):
            results.append(result := future.result())
            print(f"{len(results)}/{len(jobs)} {asdict(result)}", file=sys.stderr, flush=True)
            # After every run: all of them take long, and a part is worth keeping.
            head = {"command": command, "machine": describe(), "beta": BETA, "learning_rate": LEARNING_RATE}
            rows = [asdict(result) for result in sorted(results, key=lambda r: jobs.index((r.arm, r.seed)))]
            write_atomic(options.out / "preference.json", json.dumps(head | {"arms": ARMS, "runs": rows}) + "\n")
    results.sort(key=lambda r: (options.arms.index(r.arm), r.seed))
    print(table(results))
    write_atomic(options.out / "preference.png", picture(results))


if __name__ == "__main__":
    main()

"""What the options do to learning: GDPO, the KL controllers, and the entropy bonus, over several seeds.

    python -m tests.benchmarks.learning [gdpo|kl|entropy|all] [--seeds 5] [--steps N] [--out tests/benchmarks/results]

The policy is a random one-layer Llama with 1024 tokens that really learns: 32 completions of 8 tokens a step, AdamW at
3e-3. Rewards read the token ids. "Start" and "end" are means over the first and last 10 % of the steps; every cell is
the mean over seeds 0, 1, ... ± standard deviation [lowest .. highest].

- gdpo: `small` (share of even ids, 0 to 1) and `large` (100 * share of even id // 2) are independent and can both be
  had. TRL's default sums first, so the large one decides *as long as it varies within a group*: once every completion
  earns it, its variance is gone and the small one is learnt after it. `large_noisy` has noise of standard deviation 10
  on top, as a learned reward has, and never runs out of variance: the small one is then left to chance. TRL's
  `normalize_then_sum` is GDPO without the handling of ties, so the two coincide where nothing is tied.
- kl: `halves` (share of even id // 2) with k3 in the loss, from the same beta: fixed, or moved towards 0.1 or 0.4 nats
  per token. What counts is the mean over the last half of the run. The doubling rule may change beta by a factor 2 at
  every step, while the policy answers over tens of steps: its beta swings, and single steps stray more.
- entropy: `halves` without, with, and with a vanishing entropy bonus, for GRPO and RLOO, without a KL term.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.benchmarks.learning_arms import COMMON, COMPARISONS, Run, build_models, quiet_worker, train
from tests.benchmarks.learning_report import TABLES, as_json, by_arm, markdown, picture
from tests.benchmarks.machine import describe, print_header
from trl_ext.files import write_atomic

# The workers read these when they import: one thread each, and no look-ups in the hub.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def run_all(name: str, seeds: list[int], steps: int, pool: ProcessPoolExecutor, folder: Path) -> list[Run]:
    """Every arm with every seed; the seeds of one arm are neighbours, in the order of the arms."""
    jobs = [pool.submit(train, arm, seed, steps, folder) for arm in COMPARISONS[name].arms() for seed in seeds]
    for done, job in enumerate(as_completed(jobs), start=1):
        job.result()  # raises what the worker raised, at once
        if done % 10 == 0 or done == len(jobs):
            print(f"{name}: {done} of {len(jobs)} runs", file=sys.stderr, flush=True)
    return [job.result() for job in jobs]


def compare(name: str, options: argparse.Namespace, command: str, pool: ProcessPoolExecutor, folder: Path) -> None:
    """Run one comparison, print its table, write its files."""
    seeds = list(range(options.seeds))
    steps = options.steps or COMPARISONS[name].steps
    start = time.perf_counter()
    runs = run_all(name, seeds, steps, pool, folder)
    seconds = time.perf_counter() - start
    trained = sum(run.seconds for run in runs)
    groups = by_arm(runs)
    print(f"## {name}: {steps} steps, seeds {seeds}, {seconds:.0f} s in {options.workers} processes, ", end="")
    print(f"{1000 * trained / steps / len(runs):.0f} ms a step\n")
    print(markdown(TABLES[name](groups)) + "\n", flush=True)
    header = {
        "command": command,
        "machine": describe(),
        "steps": steps,
        "seeds": seeds,
        "seconds": round(seconds, 1),
        "processes": options.workers,
        "settings": COMMON,
    }
    write_atomic(options.out / f"learning_{name}.json", as_json(name, runs, header))
    write_atomic(options.out / f"learning_{name}.png", picture(name, groups))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.learning", description=__doc__.splitlines()[0])
    parser.add_argument("comparison", nargs="?", default="all", choices=[*COMPARISONS, "all"])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds: 0, 1, ...")
    parser.add_argument("--steps", type=int, help="optimiser steps of every run; default: what each comparison needs")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.steps is not None and options.steps < 10:
        parser.error("--steps must be at least 10: start and end are tenths of the run")
    return options


def main() -> None:
    options = parse()
    import matplotlib  # noqa: F401  (missing: say so now, not after ten minutes)

    os.environ |= ENVIRONMENT
    command = shlex.join(["python", "-m", "tests.benchmarks.learning", *sys.argv[1:]])
    print_header(command)
    names = list(COMPARISONS) if options.comparison == "all" else [options.comparison]
    # Not fork: torch has started threads by now.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        build_models(Path(folder), range(options.seeds))
        with ProcessPoolExecutor(options.workers, mp_context=context, initializer=quiet_worker) as pool:
            for name in names:
                compare(name, options, command, pool, Path(folder))


if __name__ == "__main__":
    main()

"""The quickstart: GRPO with four rewards on small prompts, then a before/after report. Start it with quickstart.sh."""

import sys
from pathlib import Path

import torch
from rich.console import Console
from transformers import ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from datasets_builders.quickstart_prompts import build_quickstart_prompts
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.evaluation.before_after import BeforeAfter
from trl_ext.models.embedded import resolve_model
from trl_ext.monitoring.run_folder import MetricsFile, RewardProgress, new_run_folder
from trl_ext.rewards import REWARD_RANGES, load_reward

RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"


def parse(argv: list[str]) -> tuple[GRPOConfig, ModelConfig]:
    """The recipe, overridden by the command line; `--model` means `--model_name_or_path`."""
    parser = TrlParser((GRPOConfig, ModelConfig))
    on_cpu = not torch.accelerator.is_available()
    # float32 there: most CPUs only emulate bfloat16.
    parser.set_defaults(use_cpu=on_cpu, bf16=False if on_cpu else None)
    argv = [f"--model_name_or_path{item[7:]}" if item.split("=")[0] == "--model" else item for item in argv]
    config = [] if "--config" in argv else ["--config", str(RECIPE)]
    training_args, model_args = parser.parse_args_and_config([*config, *argv])
    model_args.model_name_or_path = resolve_model(model_args.model_name_or_path)
    kept = {"revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation}
    training_args.model_init_kwargs = {"dtype": model_args.dtype, **kept, **(training_args.model_init_kwargs or {})}
    return training_args, model_args


def main(argv: list[str]) -> None:
    """Train, evaluate, report."""
    console = Console()
    args, model_args = parse(argv)
    wanted, args.output_dir = args.output_dir, str(new_run_folder(args.output_dir))
    if args.output_dir != wanted:
        console.print(f"{wanted} holds an earlier run and is kept; this run starts clean in {args.output_dir}")
    train, heldout = build_quickstart_prompts(seed=args.seed)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[load_reward(name) for name in sorted(REWARD_RANGES)],
        args=args,
        train_dataset=train,
        callbacks=[MetricsFile(args.output_dir)],
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgress())
    measured = BeforeAfter(trainer, heldout, REWARD_RANGES)
    try:
        trainer.train()
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. Metrics so far: {args.output_dir}/metrics.jsonl. Run the command again to start.")
        sys.exit(130)
    trainer.save_model()
    table, report = measured.finish("Quickstart")
    console.print(table, f"Report: {report}", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

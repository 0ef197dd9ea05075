"""The quickstart: GRPO with four rewards on small prompts, then a before/after report. Start it with quickstart.sh."""

import sys
from pathlib import Path

import torch
from rich.console import Console
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from datasets_builders.quickstart_prompts import build_quickstart_prompts
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.evaluation.before_after import BeforeAfter
from trl_ext.models.embedded import resolve_model
from trl_ext.monitoring.run_folder import MetricsFile, new_run_folder, show_rewards
from trl_ext.rewards import REWARD_RANGES, load_reward

RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"


def parse(argv: list[str]) -> tuple[GRPOConfig, ModelConfig]:
    """The recipe, overridden by the command line; `--model` means `--model_name_or_path`."""
    parser = TrlParser((GRPOConfig, ModelConfig))
    if not torch.accelerator.is_available():
        # float32: most CPUs only emulate bfloat16.
        parser.set_defaults(use_cpu=True, bf16=False)
    argv = [item.replace("--model", "--model_name_or_path", item.split("=")[0] == "--model") for item in argv]
    args, model_args = parser.parse_args_and_config(argv if "--config" in argv else ["--config", str(RECIPE), *argv])
    model_args.model_name_or_path = resolve_model(model_args.model_name_or_path)
    loading = {name: getattr(model_args, name) for name in ("dtype", "attn_implementation")}
    args.model_init_kwargs = {"revision": model_args.model_revision, **loading, **(args.model_init_kwargs or {})}
    return args, model_args


def main(argv: list[str]) -> None:
    """Train, evaluate, report."""
    args, model_args = parse(argv)
    args.output_dir = str(new_run_folder(args.output_dir))
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
    show_rewards(trainer)
    measured = BeforeAfter(trainer, heldout, REWARD_RANGES, fresh_adapter=model_args.use_peft)
    trainer.train()
    trainer.save_model()
    table, report = measured.finish("Quickstart")
    Console().print(table, f"Report: {report}", sep="\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; what was logged is in the run folder. Run the same command again to start anew.")

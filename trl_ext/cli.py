"""The `trl-ext` command: training through `accelerate launch`, the environment report, the embedded model.

Nothing heavy is imported before the verb is known.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from .models.embedded import DTYPES
from .scripts import TRAINING_SCRIPTS, UnknownOptionError, check_options, launch_folder, our_classes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in TRAINING_SCRIPTS:
        return _train(arguments[0], arguments[1:])
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.print_help()
        return 0
    verb = {"env": _print_environment, "models": _prepare_model, "reward-eval": _evaluate_reward}[options.verb]
    return verb(options)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-ext", description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="{grpo,rloo,dpo,kto,reward,reward-eval,env,models}")
    for name, prefix in TRAINING_SCRIPTS.items():
        verbs.add_parser(name, help=f"train with trl_ext's {prefix}Trainer; `trl-ext {name} --help` lists its options")
    score = verbs.add_parser("reward-eval", help="accuracy, calibration and disagreement of a reward model on pairs")
    score.add_argument("model", help="folder that RewardTrainer saved")
    score.add_argument("data", help="name or folder for datasets.load_dataset, or a .json(l) file, of pairs")
    score.add_argument("--split", default="test", help="default: test")
    score.add_argument("--limit", type=int, help="at most so many pairs")
    score.add_argument("--reduce", default="mean", help="mean, min, median, lcb or uwo")
    score.add_argument("--coef", type=float, default=1.0, help="weight of the disagreement in lcb and uwo")
    score.add_argument("--elsewhere", help="a .jsonl file of {prompt, completion} unlike the training data")
    score.add_argument("--out", default="reward_eval", help="folder for reward_eval.json and reliability.png")
    verbs.add_parser("env", help="print the versions and the hardware, for bug reports")
    models = verbs.add_parser("models", help="the embedded default model")
    actions = models.add_subparsers(dest="action", required=True)
    prepare = actions.add_parser("prepare", help="convert it once (half a minute) and print its folder")
    prepare.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights on disk")
    prepare.add_argument("--force", action="store_true", help="convert again even if it is there")
    return parser


def _train(name: str, arguments: list[str]) -> int:
    """Split the arguments between `accelerate launch` and the training script, and launch."""
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.accelerate_launcher import launch_training_script
    from trl.cli.commands.training import _subtract_subsequence

    with our_classes(name, only_config=True) as script:
        parser = script.make_parser(prog=f"trl-ext {name}")
        try:
            *_, config_rest, argv_rest = parser.parse_args_and_config(
                arguments, return_remaining_strings=True, separate_remaining_strings=True
            )
            check_options([*config_rest, *argv_rest], parser)
            launch_arguments = resolve_accelerate_config_argument(resolve_our_config([*config_rest, *argv_rest]))
        except (UnknownOptionError, ValueError, OSError) as error:
            print(f"trl-ext {name}: error: {error}", file=sys.stderr)
            return 2
    try:
        launch_training_script(
            # TRL joins this to its own script folder, and joining an absolute path gives that path.
            script_name=str(launch_folder() / f"{name}.py"),
            launch_args=launch_arguments,
            training_script_args=_subtract_subsequence(arguments, argv_rest),
        )
    except subprocess.CalledProcessError as error:
        # The script has printed its own error; the launcher's traceback would hide it.
        return int(error.returncode)
    return 0


def resolve_our_config(launch_arguments: list[str]) -> list[str]:
    """Replace the name after `--accelerate_config` by the path of `launch/accelerate/NAME.yaml`, if there is one.

    Paths to files and TRL's names stay as they are, for TRL's own resolution.
    """
    option = "--accelerate_config"
    if option not in launch_arguments[:-1]:
        return launch_arguments
    index = launch_arguments.index(option) + 1
    ours = launch_folder() / "accelerate" / f"{launch_arguments[index]}.yaml"
    if not ours.is_file():
        return launch_arguments
    return [*launch_arguments[:index], str(ours), *launch_arguments[index + 1 :]]


def _prepare_model(options: argparse.Namespace) -> int:
    from .models.embedded import prepare_embedded_model

    try:
        print(prepare_embedded_model(dtype=options.dtype, force=options.force))
    except ImportError as error:
        print(f"trl-ext models prepare: error: {error}", file=sys.stderr)
        return 1
    return 0


def _evaluate_reward(options: argparse.Namespace) -> int:
    from .evaluation.reward_cli import run_reward_eval

    try:
        print(run_reward_eval(options))
    except (ValueError, OSError, ImportError) as error:
        print(f"trl-ext reward-eval: error: {error}", file=sys.stderr)
        return 1
    return 0


def _print_environment(_: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    import torch
    from trl.scripts.env import print_env

    from .models.embedded import embedded_model_available

    print_env()
    for package in ("trl-ext", "peft", "bitsandbytes", "deepspeed"):
        try:
            print(f"- {package}: {version(package)}")
        except PackageNotFoundError:
            print(f"- {package}: not installed")
    capabilities = torch.cpu.get_capabilities()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    print(f"- device: {device}, {torch.accelerator.device_count()} accelerator(s), {torch.get_num_threads()} threads")
    print(f"- CPU: {capabilities.get('cpu_name', 'unknown')}, avx512_bf16: {capabilities.get('avx512_bf16', False)}")
    print(f"- embedded model: {'available' if embedded_model_available() else 'not installed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Run TRL's own training scripts with this package's trainers and configs.

TRL's script modules look up their classes in the `trl` package each time they run, so it is enough to put ours there
for the duration: options, data loading, reward functions and saving all stay TRL's.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trl_ext.temporarily import temporarily

if TYPE_CHECKING:
    from trl import TrlParser

# Verb -> prefix of the class names, in trl and in trl_ext alike.
TRAINING_SCRIPTS = {"grpo": "GRPO", "rloo": "RLOO", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}


class UnknownOptionError(ValueError):
    """An option that neither the training script nor `accelerate launch` knows; the message names it."""


def launch_folder() -> Path:
    """Return the folder of entry scripts and YAML files: in the wheel inside the package, else `launch/` beside it.

    Raises:
        FileNotFoundError: neither is there (a broken installation).
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_launch", package.parent / "launch"):
        if (folder / "setup.sh").is_file():
            return folder
    raise FileNotFoundError(f"no launch folder beside or inside {package}; reinstall trl-ext")


def run_training_script(
    name: str, argv: Sequence[str] | None = None, datasets: Mapping[str, Callable[[], Path]] | None = None
) -> None:
    """Parse the command line and train: what `python -m trl.scripts.<name>` does, with this package's classes.

    `--model_name_or_path embedded` means the embedded default model; `--reward_funcs` also takes reward models, see
    `trl_ext.rewards.configured`.

    Args:
        name: a key of `TRAINING_SCRIPTS`.
        argv: arguments; `sys.argv[1:]` by default.
        datasets: names that `--dataset_name` knows beside paths and hub ids, with what makes the folder of each.

    Raises:
        UnknownOptionError: an option on the command line or in the `--config` file that nothing reads.
    """
    from .models.embedded import resolve_model

    with our_classes(name) as script:
        parser = script.make_parser()
        *parsed, config_rest, argv_rest = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
        # Options of `accelerate launch` may stand in the config file; it has read them already.
        check_options([*config_rest, *argv_rest], parser)
        script_args, training_args, model_args, dataset_args = parsed
        if model_args.model_name_or_path is not None:
            model_args.model_name_or_path = resolve_model(model_args.model_name_or_path)
        if datasets and script_args.dataset_name in datasets:
            script_args.dataset_name = str(datasets[script_args.dataset_name]())
        if getattr(script_args, "reward_funcs", None):
            from .rewards.configured import import_path

            script_args.reward_funcs = [import_path(name) for name in script_args.reward_funcs]
        script.main(script_args, training_args, model_args, dataset_args)


@contextmanager
def our_classes(name: str, only_config: bool = False) -> Iterator[ModuleType]:
    """Let TRL's script module `name` find this package's config and trainer; yields that module.

    Args:
        name: a key of `TRAINING_SCRIPTS`.
        only_config: leave out the trainer, whose import takes seconds: enough for parsing.

    Raises:
        ValueError: unknown `name`.
    """
    if name not in TRAINING_SCRIPTS:
        raise ValueError(f"unknown training script {name!r}; known: {', '.join(TRAINING_SCRIPTS)}")
    import trl

    import trl_ext

    prefix = TRAINING_SCRIPTS[name]
    script = importlib.import_module(f"trl.scripts.{name}")
    with ExitStack() as stack:
        stack.enter_context(temporarily(trl, **{f"{prefix}Config": getattr(trl_ext, f"{prefix}Config")}))
        if not only_config:
            trainer = getattr(trl_ext, f"{prefix}Trainer")
            stack.enter_context(temporarily(trl, **{f"{prefix}Trainer": trainer}))
            stack.enter_context(temporarily(trainer, end=_ending_together(trainer.end)))
        yield script


def _ending_together(end: Any) -> Any:
    """TRL's scripts end with `trainer.end()`, which destroys the process group; a rank still busy would then abort."""

    def end_together(trainer: Any) -> None:
        trainer.accelerator.wait_for_everyone()
        end(trainer)

    return end_together


def check_options(remaining: Sequence[str], parser: "TrlParser") -> None:
    """Check that `accelerate launch` knows each option which the training script's parser left over.

    Args:
        remaining: options and values, as TRL's parser returned them.
        parser: the training script's, for suggestions.

    Raises:
        UnknownOptionError: one is unknown, or a value belongs to no option.
    """
    from accelerate.commands.launch import launch_command_parser

    launcher = launch_command_parser()
    rest = _without_accelerate_config(list(remaining))
    # The launcher requires a script; whatever takes its place is a value without an option.
    parsed, unknown = launcher.parse_known_args([*rest, "SCRIPT"])
    names = [item for item in unknown if item.startswith("-")]
    if names:
        raise UnknownOptionError(f"unknown option {', '.join(map(_shown, names))}{_suggestion(names[0], parser)}")
    if parsed.training_script != "SCRIPT" or unknown:
        raise UnknownOptionError(f"unexpected argument {parsed.training_script!r}: it belongs to no option")


def _shown(option: str) -> str:
    return option.split("=", 1)[0]


def _suggestion(option: str, parser: "TrlParser") -> str:
    import difflib

    known = [name for action in parser._actions for name in action.option_strings]
    close = difflib.get_close_matches(_shown(option), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _without_accelerate_config(arguments: list[str]) -> list[str]:
    if "--accelerate_config" not in arguments:
        return arguments
    index = arguments.index("--accelerate_config")
    return arguments[:index] + arguments[index + 2 :]

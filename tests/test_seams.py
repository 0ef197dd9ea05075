"""What the package relies on in TRL's private code, and that only `trl_ext/seams/` does so."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import trl_ext
from tests.trainers.harness import base_config, prompts, spaces
from trl_ext.seams.preference import PreferenceSeams
from trl_ext.seams.registry import TRL_SEAMS, Seam, body_hash, changed_seams
from trl_ext.seams.rollout import RolloutSeams, reward_names
from trl_ext.temporarily import temporarily

PACKAGE = Path(trl_ext.__file__).resolve().parent
SEAM_CLASSES: dict[type, tuple[type, ...]] = {
    RolloutSeams: (trl.GRPOTrainer, trl.RLOOTrainer),
    PreferenceSeams: (trl.DPOTrainer,),
}
SEAM_IDS = [f"{seam.owner.partition(':')[2]}.{seam.method}" for seam in TRL_SEAMS]
PRIVATE_NAMES = (
    "_compute_loss",
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_metrics[",
    "_logs[",
    "_entropy_bonus_enabled",
    "_prepare_dataset",
)


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def functions_of(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if inspect.isfunction(value) and not is_dunder(name)}


def our_trainers() -> list[type]:
    values = [getattr(trl_ext, name) for name in trl_ext.__all__]
    return [value for value in values if inspect.isclass(value) and hasattr(value, "training_step")]


def our_bases(cls: type) -> Iterator[tuple[type, tuple[type, ...]]]:
    """Each class of ours in the MRO, with the classes that come after it."""
    for index, base in enumerate(cls.__mro__):
        if base.__module__.split(".")[0] == "trl_ext":
            yield base, cls.__mro__[index + 1 :]


class TestInstalledTRL:
    @pytest.mark.parametrize("seam", TRL_SEAMS, ids=SEAM_IDS)
    def test_method_is_as_it_was_checked(self, seam: Seam) -> None:
        """Catches: a TRL release that changed what we intercept."""
        message = f"TRL changed {seam.method}: read the diff, run tests/trainers, update trl_ext/seams/registry.py"
        function = seam.current()
        assert tuple(inspect.signature(function).parameters) == seam.parameters, message
        assert body_hash(function) == seam.body_hash, f"{message} to {body_hash(function)}"

    def test_no_seam_is_listed_twice(self) -> None:
        keys = [(seam.owner, seam.method) for seam in TRL_SEAMS]
        assert len(set(keys)) == len(keys)
        assert changed_seams() == ()

    def test_a_change_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches: a hash of the wrapper, a comparison that is always true."""

        def other_body(self: Any, model: Any, inputs: Any) -> Any:
            return None

        def other_arguments(self: Any, generation_batch: Any, more: Any) -> Any:
            return None

        monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", other_body)
        monkeypatch.setattr(trl.RLOOTrainer, "_prepare_inputs", other_arguments)
        changes = changed_seams.__wrapped__()
        assert len(changes) == 2
        assert re.search(r"GRPOTrainer\._compute_loss: body", changes[0])
        assert re.search(r"RLOOTrainer\._prepare_inputs: arguments .*'more'", changes[1])


class TestOverrides:
    OVERRIDES = sorted(
        (cls.__name__, name)
        for cls, owners in SEAM_CLASSES.items()
        for name in functions_of(cls)
        if any(hasattr(owner, name) for owner in owners)
    )

    def test_there_are_overrides(self) -> None:
        rollout = {name for cls, name in self.OVERRIDES if cls == "RolloutSeams"}
        assert {"_compute_loss", "_calculate_rewards", "create_optimizer"} <= rollout
        assert {name for cls, name in self.OVERRIDES if cls == "PreferenceSeams"} >= {"_compute_loss", "training_step"}

    @pytest.mark.parametrize("trainer", our_trainers(), ids=lambda cls: cls.__name__)
    def test_each_is_listed_or_public(self, trainer: type) -> None:
        """Catches: a new override of a private method that no hash guards, for one of the trainers that have it."""
        owner = next(base for base in trainer.__mro__ if base.__module__.split(".")[0] == "trl")
        listed = {seam.method for seam in TRL_SEAMS if seam.owner == f"{owner.__module__}:{owner.__name__}"}
        missing = {
            name
            for cls, _ in our_bases(trainer)
            for name in functions_of(cls)
            if name.startswith("_") and hasattr(owner, name) and name not in listed
        }
        assert not missing, f"add {sorted(missing)} of {owner.__name__} to TRL_SEAMS"

    @pytest.mark.parametrize(("cls", "name"), OVERRIDES)
    def test_takes_the_arguments_of_trl(self, cls: str, name: str) -> None:
        """Catches: a call by keyword that fails in the override only."""
        seams, owners = next(item for item in SEAM_CLASSES.items() if item[0].__name__ == cls)
        parameters = inspect.signature(getattr(seams, name)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for owner in owners:
            assert tuple(parameters) == tuple(inspect.signature(inspect.unwrap(getattr(owner, name))).parameters)

    @pytest.mark.parametrize("trainer", our_trainers(), ids=lambda cls: cls.__name__)
    def test_every_overriding_method_says_so(self, trainer: type) -> None:
        """Catches: an override that silently becomes a new method when TRL (or a hook) is renamed."""
        unmarked = [
            f"{cls.__name__}.{name}"
            for cls, bases in our_bases(trainer)
            for name, function in functions_of(cls).items()
            if any(name in vars(base) for base in bases) and not getattr(function, "__override__", False)
        ]
        assert not unmarked

    @pytest.mark.parametrize("trainer", our_trainers(), ids=lambda cls: cls.__name__)
    def test_a_method_marked_as_override_overrides_something(self, trainer: type) -> None:
        """Catches: a hook for a method that TRL no longer has, which would never be called."""
        stale = [
            f"{cls.__name__}.{name}"
            for cls, bases in our_bases(trainer)
            for name, function in functions_of(cls).items()
            if getattr(function, "__override__", False) and not any(name in vars(base) for base in bases)
        ]
        assert not stale

    @pytest.mark.parametrize("trainer", our_trainers(), ids=lambda cls: cls.__name__)
    def test_private_methods_are_overridden_in_seams_only(self, trainer: type) -> None:
        """Catches: a trainer that goes around the seams; also a name of ours that collides with one of TRL's."""
        theirs = [base for base in trainer.__mro__ if base.__module__.split(".")[0] != "trl_ext"]
        around = [
            f"{cls.__name__}.{name}"
            for cls, _ in our_bases(trainer)
            if not cls.__module__.startswith("trl_ext.seams.")
            for name in vars(cls)
            if name.startswith("_") and not is_dunder(name) and any(name in vars(base) for base in theirs)
        ]
        assert not around

    def test_the_scan_finds_what_the_seams_use(self) -> None:
        """Catches: a list of private names that nothing uses any more."""
        text = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "seams").glob("*.py"))
        assert all(name in text for name in PRIVATE_NAMES)

    @pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
    def test_only_seams_mentions_private_names(self, path: Path) -> None:
        """Catches: knowledge of TRL's internals that spreads over the package."""
        text = path.read_text(encoding="utf-8")
        # Not our own names that contain one: `_ext_logs[` is no mention of `_logs[`.
        found = [name for name in PRIVATE_NAMES if re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}", text)]
        assert not found or path.parent == PACKAGE / "seams"


class Target:
    kind = "class"

    def __init__(self) -> None:
        self.value = 1
        self.other = 2

    @property
    def fixed(self) -> int:
        return 3


class TestTemporarily:
    def test_sets_and_restores(self) -> None:
        target = Target()
        with temporarily(target, value=10, kind="block"):
            assert (target.value, target.other, target.kind) == (10, 2, "block")
        assert (target.value, target.other, target.kind, Target.kind) == (1, 2, "class", "class")

    def test_restores_after_an_exception(self) -> None:
        """Catches: a restore outside of `finally`: the next step would train with beta 0."""
        target = Target()
        with pytest.raises(RuntimeError, match="out of memory"), temporarily(target, value=10, other=20):
            raise RuntimeError("out of memory")
        assert (target.value, target.other) == (1, 2)

    def test_nests(self) -> None:
        target = Target()
        with temporarily(target, value=10):
            with temporarily(target, value=100):
                assert target.value == 100
            assert target.value == 10
        assert target.value == 1

    def test_restores_what_was_there_even_when_the_block_changed_it(self) -> None:
        target = Target()
        with temporarily(target, value=10):
            target.value = 11
        assert target.value == 1

    def test_an_attribute_that_does_not_exist_is_an_error_that_changes_nothing(self) -> None:
        """Catches: a renamed attribute of TRL that would be set in vain."""
        target = Target()
        with pytest.raises(AttributeError, match="no_such_name"), temporarily(target, value=10, no_such_name=1):
            pass
        assert target.value == 1

    def test_an_attribute_that_cannot_be_set_changes_nothing(self) -> None:
        target = Target()
        with pytest.raises(AttributeError), temporarily(target, value=10, fixed=4):
            pass
        assert target.value == 1


class CallableReward:
    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)


async def asynchronous(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def scaled(completions: list[Any], scale: float = 1.0, **_: Any) -> list[float]:
    return [scale] * len(completions)


class TestRewardNames:
    @pytest.fixture(scope="class")
    def reward_model(self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Folder of a tiny reward model."""
        folder = tmp_path_factory.mktemp("rewards") / "tiny-reward"
        config = AutoConfig.from_pretrained(tiny_model)
        config.num_labels = 1
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        return folder

    @pytest.mark.parametrize(
        ("trainer", "config"),
        [(trl.GRPOTrainer, trl.GRPOConfig), (trl.RLOOTrainer, trl.RLOOConfig)],
        ids=["grpo", "rloo"],
    )
    def test_equal_the_names_of_trl(
        self, trainer: Any, config: Any, tiny_model: Path, reward_model: Path, tmp_path: Path
    ) -> None:
        """Gates are resolved by these names before TRL is built. Catches: the repr of a partial, a whole path."""
        twice_partial = functools.partial(functools.partial(scaled, scale=2.0), scale=3.0)
        loaded = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
        funcs = [spaces, twice_partial, CallableReward(), asynchronous, lambda completions, **_: [], spaces]
        funcs += [str(reward_model), loaded]
        # Before: TRL replaces the paths in this list by models.
        names = reward_names(funcs)
        built = self.build(trainer, config, tiny_model, funcs, tmp_path)
        expected = ["spaces", "scaled", "CallableReward", "asynchronous", "<lambda>", "spaces"]
        assert names == built.reward_func_names == [*expected, "tiny-reward", "tiny-reward"]

    def test_one_function_without_a_list(self, tiny_model: Path, tmp_path: Path) -> None:
        built = self.build(trl.GRPOTrainer, trl.GRPOConfig, tiny_model, spaces, tmp_path)
        assert reward_names(spaces) == built.reward_func_names == ["spaces"]

    def test_none(self) -> None:
        assert reward_names(None) == reward_names([]) == []

    @staticmethod
    def build(trainer: Any, config: Any, model: Path, reward_funcs: Any, folder: Path) -> Any:
        return trainer(
            model=str(model),
            reward_funcs=reward_funcs,
            args=config(**base_config(folder)),
            train_dataset=prompts(),
        )

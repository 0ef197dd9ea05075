"""Bad values and combinations are refused before a model is loaded, with the field and the fix in the message."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from tests.trainers.harness import base_config, characters, prompts, spaces
from trl_ext import GRPOConfig, GRPOTrainer, RewardGate, RLOOConfig, RLOOTrainer, TrlParser

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"kl_estimator": "k4", "beta": 0.1}, "kl_estimator='k4' is unknown"),
    ({"kl_estimator": "k3", "beta": 0.0}, "no effect with beta=0.0. Set beta"),
    ({"kl_estimator": "k3", "beta": -0.1}, "Set beta > 0"),
    ({"kl_estimator": "k1", "beta": 0.1, "kl_placement": "loss", "use_bias_correction_kl": False}, "exactly 0"),
    ({"kl_estimator": "k2", "beta": 0.1, "kl_placement": "loss", "use_bias_correction_kl": True}, r"E\[k2\]"),
    ({"kl_max_log_ratio": 10.0}, "kl_max_log_ratio=10.0 has no effect without kl_estimator"),
    (
        {"kl_estimator": "k2", "beta": 0.1, "kl_placement": "reward", "kl_max_log_ratio": 10.0},
        "no effect on k2",
    ),
    ({"kl_estimator": "k3", "beta": 0.1, "kl_max_log_ratio": 0.0}, "must be positive"),
    ({"kl_controller": "proportional", "kl_target": 0.1}, "no effect without kl_estimator"),
    ({"kl_estimator": "k3", "beta": 0.1, "kl_controller": "proportional"}, "needs kl_target > 0"),
    ({"kl_estimator": "k3", "beta": 0.1, "kl_target": 0.1}, "no effect with kl_controller='fixed'"),
    (
        {"kl_estimator": "k3", "beta": 2.0, "kl_controller": "doubling", "kl_target": 0.1},
        "beta_min <= beta <= beta_max",
    ),
    ({"policy_kl_coef": 1.0}, "used once, by the policy that"),
    ({"kl_early_stop": 0.1}, "Set num_iterations >= 2"),
    ({"kl_early_stop": 0.0, "num_iterations": 2}, "must be positive"),
    ({"policy_kl_coef": -1.0, "num_iterations": 2}, "Set it >= 0"),
    ({"policy_kl_coef": 1.0, "num_iterations": 2, "policy_kl_target": 0.1}, "policy_kl_controller='fixed'"),
    ({"multi_objective_aggregation": "gpdo"}, "Use one of"),
    ({"reward_gates": [{"gate": "a", "threshold": None}]}, "threshold"),
    ({"reward_gates": [{"gate": "a", "threshold": 1, "flor": "zero"}]}, "flor"),
    ({"reward_gates": [{"gate": "a", "threshold": 1, "floor": "none"}]}, "floor"),
    ({"reward_gates": [{"gate": "a", "threshold": 1, "gated": []}]}, "gated"),
    ({"reward_gates": {"gate": "a"}}, "must be a list"),
    ({"diversity_ngram": 0}, "diversity_ngram=0"),
    ({"diversity_cap": 1.5}, "diversity_cap=1.5"),
    ({"diversity_min_reward": 0.0}, "no effect with diversity_coef"),
    ({"skip_zero_signal_groups": True, "beta": 0.1}, "Set kl_estimator="),
    ({"diversity_coef": -0.1}, "pay for repeating"),
    ({"diversity_ngram": 5}, "no effect with diversity_coef=0.0"),
    (
        {"kl_estimator": "k3", "beta": 0.1, "kl_controller": "doubling", "kl_target": 0.1, "kl_horizon": 3.0},
        "no effect with kl_controller='doubling'",
    ),
    ({"beta_max": 3.0}, "no effect with kl_controller='fixed'"),
    ({"policy_kl_horizon": 3.0}, "no effect with policy_kl_controller='fixed'"),
    ({"entropy_coef_final": float("nan")}, "must be finite"),
    ({"kl_early_stop": float("inf"), "num_iterations": 2}, "must be finite"),
    (
        {"kl_early_stop": 0.1, "steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 3},
        "straddle",
    ),
    ({"entropy_coef_schedule": "cosine"}, "without entropy_coef_final"),
    ({"entropy_coef_schedule": "step", "entropy_coef_final": 0.1}, "is unknown"),
]
GRPO_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"multi_objective_aggregation": "gdpo", "scale_rewards": "batch"}, "scale_rewards"),
    (
        {"top_entropy_quantile": 0.5, "kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1},
        "top_entropy_quantile",
    ),
    ({"use_vllm": True, "policy_kl_coef": 1.0}, "used once"),
    ({"loss_type": "vespo", "kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}, "vespo"),
    (
        {"off_policy_mask_threshold": 0.5, "kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1},
        "off_policy_mask_threshold",
    ),
    ({"entropy_coef_final": 0.1, "use_adaptive_entropy": True}, "use_adaptive_entropy"),
]


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize(("settings", "message"), BOTH, ids=[message for _, message in BOTH])
def test_bad_options_are_refused(config_class: Any, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_class(**base_config(tmp_path, **settings))


@pytest.mark.parametrize(("settings", "message"), GRPO_ONLY, ids=[message for _, message in GRPO_ONLY])
def test_bad_grpo_options_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**base_config(tmp_path, **settings))


def test_rloo_bias_correction_needs_a_term(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RLOO has none by default"):
        RLOOConfig(**base_config(tmp_path, use_bias_correction_kl=True))


def test_rloo_bias_correction_in_the_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RLOO's default"):
        RLOOConfig(**base_config(tmp_path, kl_estimator="k3", use_bias_correction_kl=True))


@pytest.mark.parametrize("config_class", [GRPOConfig, RLOOConfig])
def test_a_config_with_gates_prints_pickles_and_copies(config_class: Any, tmp_path: Path) -> None:
    """TrainingArguments prints itself through dataclasses.asdict, which rebuilds every dict from pairs."""
    config = config_class(**base_config(tmp_path, reward_gates=[{"gate": "a", "threshold": "1e-3"}]))
    gate = {"gate": "a", "threshold": 0.001, "gated": None, "floor": "worst"}
    assert "1" in str(config) and dataclasses.asdict(config)["reward_gates"] == [gate]
    assert pickle.loads(pickle.dumps(config)).reward_gates == [gate]
    assert json.loads(config.to_json_string())["reward_gates"] == [gate]


def must_not_load(*_: Any, **__: Any) -> None:
    raise AssertionError("a model was loaded before the arguments were checked")


@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_gates": [{"gate": "safety", "threshold": 0.5}]}, "no reward function is named 'safety'"),
        ({"reward_gates": [{"gate": "spaces", "threshold": 0.5, "gated": ["spaces"]}]}, "cannot gate itself"),
        ({"reward_weights": [1.0]}, "reward_weights has 1 entries for 2"),
        ({"reward_weights": [1.0, 2.0], "multi_objective_aggregation": "pareto"}, "beyond sign and zero"),
    ],
)
def test_names_and_weights_are_checked_before_a_model_is_loaded(
    trainer: Any, config: Any, settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = next(base for base in trainer.__mro__ if base.__module__.startswith("trl."))
    module = importlib.import_module(theirs.__module__)
    monkeypatch.setattr(module, "create_model_from_path", must_not_load)
    with pytest.raises(ValueError, match=message):
        trainer("no/such/model", [spaces, characters], args=config(**base_config(tmp_path, **settings)))


def test_one_reward_has_nothing_to_gate(tmp_path: Path) -> None:
    config = GRPOConfig(**base_config(tmp_path, reward_gates=[{"gate": "spaces", "threshold": 0.5}]))
    with pytest.raises(ValueError, match="nothing to gate"):
        GRPOTrainer("no/such/model", [spaces], args=config)


def test_two_rewards_of_one_name_cannot_be_gated_by_it(tmp_path: Path) -> None:
    config = GRPOConfig(**base_config(tmp_path, reward_gates=[{"gate": "spaces", "threshold": 0.5}]))
    with pytest.raises(ValueError, match="2 reward functions are named 'spaces'"):
        GRPOTrainer("no/such/model", [spaces, spaces], args=config)


def test_a_reward_model_with_several_labels_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """TRL would use the first label of three without a word."""
    reward_model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    with pytest.raises(ValueError, match="num_labels=3"):
        GRPOTrainer(str(tiny_model), reward_model, args=GRPOConfig(**base_config(tmp_path)), train_dataset=prompts())


def test_diversity_with_tools_is_refused(tmp_path: Path) -> None:
    config = GRPOConfig(**base_config(tmp_path, diversity_coef=0.1))
    with pytest.raises(ValueError, match="tool output"):
        GRPOTrainer("no/such/model", [spaces], args=config, tools=[print])
    with pytest.raises(ValueError, match="rollout_func"):
        GRPOTrainer("no/such/model", [spaces], args=config, rollout_func=print)


def test_gates_from_the_command_line(tmp_path: Path) -> None:
    """JSON after the flag, YAML in a recipe: the same gates; a typo shows its message."""
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--reward_gates", '{"gate": "safety", "threshold": 0.5}']
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("reward_gates: [{gate: safety, threshold: 0.5, gated: [helpfulness]}]\n")
    (from_flags,) = TrlParser([GRPOConfig]).parse_args_and_config(flags)
    (from_yaml,) = TrlParser([GRPOConfig]).parse_args_and_config([*flags[:3], "--config", str(recipe)])
    assert from_flags.reward_gates == [{"gate": "safety", "threshold": 0.5, "gated": None, "floor": "worst"}]
    assert from_yaml.reward_gates == [RewardGate({"gate": "safety", "threshold": 0.5, "gated": ["helpfulness"]})]


def test_a_bad_gate_on_the_command_line_shows_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        TrlParser([GRPOConfig]).parse_args_and_config(
            ["--output_dir", str(tmp_path), "--reward_gates", '{"gate": "safety", "treshold": 1}']
        )
    assert "treshold" in capsys.readouterr().err

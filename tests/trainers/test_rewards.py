"""Aggregation, gates, diversity, zero-signal groups: what reaches the advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from tests.trainers.harness import PROMPTS, base_config, characters, history, prompts, spaces, text_of, train
from tests.trainers.losses import batch, generation_batch, loss_and_gradient, make
from trl_ext import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_ext.formulas.advantages import gdpo_advantages, group_advantages, leave_one_out_advantages, pareto_fronts
from trl_ext.formulas.diversity import group_ngram_diversity

NAN = float("nan")
# Two groups of four; columns differ 100-fold in scale.
FIRST = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
SECOND = [300.0, 100.0, 200.0, 0.0, 50.0, 50.0, 50.0, 80.0]
MATRIX = torch.tensor([FIRST, SECOND]).T


def small(completions: list[Any], **_: Any) -> list[float]:
    return FIRST[: len(completions)]


def large(completions: list[Any], **_: Any) -> list[float]:
    return SECOND[: len(completions)]


def missing(completions: list[Any], **_: Any) -> list[float | None]:
    """None for the first row."""
    return [None, *[1.0 * i for i in range(1, len(completions))]]


def nothing(completions: list[Any], **_: Any) -> list[None]:
    return [None] * len(completions)


def ones(completions: list[Any], **_: Any) -> list[float]:
    return [0.1] * len(completions)


def scored(method: str, model: Path, folder: Path, reward_funcs: list[Any], **settings: Any) -> tuple[Any, Any]:
    """A trainer and its scored generation batch of two groups, before the shuffle."""
    trainer = make(method, model, folder, reward_funcs, gradient_accumulation_steps=2, **settings)
    return trainer, trainer._generate_and_score_completions(generation_batch(trainer))


@pytest.mark.parametrize("rule", ["gdpo", "pareto", "normalize_then_sum", "sum_then_normalize"])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_each_rule_reaches_the_advantages(method: str, rule: str, tiny_model: Path, tmp_path: Path) -> None:
    """Against the formulas, with weights; the completions table shows what is trained on."""
    trainer, output = scored(
        method,
        tiny_model,
        tmp_path,
        [small, large],
        beta=0.0,
        multi_objective_aggregation=rule,
        reward_weights=[1.0, 1.0] if rule == "pareto" else [1.0, 2.0],
    )
    w = torch.tensor([1.0, 2.0])
    z = torch.stack([group_advantages(MATRIX[:, k], 4) for k in range(2)], dim=1)
    fronts = pareto_fronts(MATRIX, 4).float()
    if method == "grpo":
        expected = {
            "gdpo": gdpo_advantages(MATRIX, 4, w),
            "pareto": group_advantages(-fronts, 4),
            "normalize_then_sum": ((z * w).sum(1) - (z * w).sum(1).mean()) / ((z * w).sum(1).std() + 1e-4),
            "sum_then_normalize": group_advantages(MATRIX @ w, 4),
        }[rule]
    else:
        combined = {"pareto": -fronts, "sum_then_normalize": MATRIX @ w}.get(rule, (z * w).sum(1))
        expected = leave_one_out_advantages(combined, 4)
    assert torch.allclose(output["advantages"], expected, atol=1e-4)
    assert list(trainer._logs["advantages"]) == pytest.approx(output["advantages"].tolist())


def test_gdpo_logs_who_drives_the_update(tiny_model: Path, tmp_path: Path) -> None:
    """By the columns above: `small` is tied nowhere, `large` nowhere, `ones` everywhere."""
    trainer, _ = scored("grpo", tiny_model, tmp_path, [small, large, ones], multi_objective_aggregation="gdpo")
    metrics = trainer._metrics["train"]
    assert metrics["gdpo/ones/tie_fraction"] == [1.0]
    assert metrics["gdpo/small/tie_fraction"] == [0.0]
    assert metrics["gdpo/ones/share"] == [0.0]
    assert metrics["gdpo/small/share"][0] + metrics["gdpo/large/share"][0] == pytest.approx(1.0)
    assert 0.3 < metrics["gdpo/small/share"][0] < 0.7, "100x in scale must not matter"
    assert metrics["gdpo/frac_zero_signal"] == [0.0]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize(
    ("generations", "values"), [(3, (0.7, 0.9)), (6, (0.7, 0.9)), (7, (5.3, 1.0)), (10, (0.3, 0.6))]
)
def test_constant_rewards_give_exactly_no_advantage(
    method: str, generations: int, values: tuple[float, float], tiny_model: Path, tmp_path: Path
) -> None:
    """TRL 1.16 turns the rounding of these constants into advantages of 0.7. Catches the tie rule removed."""

    def tied(completions: list[Any], **_: Any) -> list[float]:
        return [values[0]] * generations + [values[1]] * generations

    settings: dict[str, Any] = {
        "num_generations": generations,
        "per_device_train_batch_size": generations,
        "multi_objective_aggregation": "gdpo",
        "beta": 0.0,
    }
    trainer, output = scored(method, tiny_model, tmp_path, [tied], **settings)
    assert (output["advantages"] == 0).all()
    assert trainer._metrics["train"]["frac_reward_zero_std"] == [1.0]
    assert trainer._metrics["train"]["gdpo/frac_zero_signal"] == [1.0]


@pytest.mark.parametrize("rule", ["gdpo", "pareto"])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_missing_reward_is_no_nan(method: str, rule: str, tiny_model: Path, tmp_path: Path) -> None:
    """None in one function, None in all: finite advantages, and 0 for the row nobody scored."""
    _, output = scored(method, tiny_model, tmp_path, [missing, nothing], multi_objective_aggregation=rule, beta=0.0)
    assert output["advantages"].isfinite().all()
    assert output["advantages"][0] == 0.0
    assert output["advantages"].abs().max() > 0


@pytest.mark.parametrize("rule", ["sum_then_normalize", "gdpo"])
def test_a_batch_nobody_scored_trains_on_nothing(rule: str, tiny_model: Path, tmp_path: Path) -> None:
    settings = base_config(tmp_path, multi_objective_aggregation=rule, skip_zero_signal_groups=True)
    trainer = train(GRPOTrainer, GRPOConfig(**settings), tiny_model, [nothing])
    assert history(trainer, "grad_norm") == [0.0, 0.0]


def test_an_infinite_reward_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    def broken(completions: list[Any], **_: Any) -> list[float]:
        return [float("inf")] * len(completions)

    with pytest.raises(ValueError, match="broken"):
        scored("grpo", tiny_model, tmp_path, [small, broken], multi_objective_aggregation="gdpo")


def test_a_wrong_number_of_rewards_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    def one_only(completions: list[Any], **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="one_only"):
        scored("grpo", tiny_model, tmp_path, [one_only], multi_objective_aggregation="gdpo")


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_gate_comes_before_any_normalisation(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """Rows that fail `small` >= 0.5 get min(0, group minimum) of `large` = 0; TRL then aggregates as ever."""
    gates = [{"gate": "small", "threshold": 0.5, "gated": ["large"]}]
    trainer, output = scored(method, tiny_model, tmp_path, [small, large], reward_gates=gates, beta=0.0)
    gated = torch.tensor([0.0, 100.0, 200.0, 0.0, 50.0, 0.0, 0.0, 0.0])
    total = gated + MATRIX[:, 0]
    expected = group_advantages(total, 4) if method == "grpo" else leave_one_out_advantages(total, 4)
    assert torch.allclose(output["advantages"], expected, atol=1e-4)
    metrics = trainer._metrics["train"]
    assert metrics["gates/small/pass_rate"] == [3 / 8]
    assert metrics["gates/large/mean_before"] == [pytest.approx(sum(SECOND) / 8)]
    assert metrics["rewards/large/mean"] == [pytest.approx(gated.mean().item())]


@pytest.mark.parametrize("floor", ["worst", "group_min"])
def test_a_gated_cost_is_not_a_prize(floor: str, tiny_model: Path, tmp_path: Path) -> None:
    """`large` has weight -1: a row that fails the gate gets the *largest* cost of its group, never 0."""
    gates = [{"gate": "small", "threshold": 0.5, "floor": floor}]
    trainer, output = scored(
        "grpo", tiny_model, tmp_path, [small, large], reward_gates=gates, reward_weights=[0.0, -1.0]
    )
    assert list(trainer._logs["rewards"]["large"]) == [300.0, 100.0, 200.0, 300.0, 50.0, 80.0, 80.0, 80.0]
    failed = MATRIX[:, 0] < 0.5
    assert output["advantages"][failed].max() < output["advantages"][~failed].min()


@pytest.mark.parametrize(("weights", "used"), [([1.0, 0.0], [0]), ([0.0, 1.0], [1]), ([1.0, -1.0], [0, 1])])
def test_pareto_knows_sign_and_zero_of_the_weights(
    weights: list[float], used: list[int], tiny_model: Path, tmp_path: Path
) -> None:
    """Weight 0 leaves a reward out of the fronts, a negative one makes it a cost."""
    _, output = scored(
        "grpo", tiny_model, tmp_path, [small, large], reward_weights=weights, multi_objective_aggregation="pareto"
    )
    fronts = pareto_fronts((MATRIX * torch.tensor(weights))[:, used], 4).float()
    assert torch.allclose(output["advantages"], group_advantages(-fronts, 4), atol=1e-4)


def test_rloo_logs_zero_signal_without_the_kl_it_does_not_train_on(tiny_model: Path, tmp_path: Path) -> None:
    """TRL's own value contains its k1 in the reward, which is not there when the KL is in the loss."""
    settings = base_config(tmp_path, beta=0.5, kl_estimator="k2", kl_placement="loss")
    trainer = train(RLOOTrainer, RLOOConfig(**settings), tiny_model, [ones])
    assert history(trainer, "frac_reward_zero_std") == [1.0, 1.0]


def test_safety_first_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    """`gated` omitted = all other rewards; a chain applies in order."""
    gates = [{"gate": "small", "threshold": 1}, {"gate": "large", "threshold": 60, "gated": "ones", "floor": "zero"}]
    trainer, _ = scored("grpo", tiny_model, tmp_path, [small, large, ones], reward_gates=gates)
    logged = trainer._logs["rewards"]
    assert list(logged["large"]) == [0.0, 100.0, 200.0, 0.0, 50.0, 0.0, 0.0, 0.0]
    # `ones` was first set to min(0, 0.1) = 0 where `small` failed, then withheld where the *gated* `large` < 60.
    assert list(logged["ones"]) == pytest.approx([0.0, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_diversity_is_a_weighted_reward(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """Column, cap, minimum: against the formula on the generated token ids."""
    trainer, output = scored(
        method,
        tiny_model,
        tmp_path,
        [small],
        beta=0.0,
        diversity_coef=0.5,
        diversity_ngram=2,
        diversity_cap=0.9,
        diversity_min_reward=0.5,
    )
    raw = group_ngram_diversity(output["completion_ids"], output["completion_mask"], 4, 2).clamp(max=0.9)
    paid = torch.where(MATRIX[:, 0] > 0.5, raw, torch.zeros_like(raw))
    assert list(trainer._logs["rewards"]["group_diversity"]) == pytest.approx(paid.tolist())
    total = MATRIX[:, 0] + 0.5 * paid
    expected = group_advantages(total, 4) if method == "grpo" else leave_one_out_advantages(total, 4)
    assert torch.allclose(output["advantages"], expected, atol=1e-4)
    assert trainer._metrics["train"]["rewards/group_diversity/mean"] == [pytest.approx(paid.mean().item())]


def test_the_callers_list_of_rewards_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    """A second trainer built from the same list must not meet our column in it."""
    reward_funcs = [small]
    for _ in range(2):
        make("grpo", tiny_model, tmp_path, reward_funcs, diversity_coef=1.0)
    assert reward_funcs == [small]


def test_diversity_does_not_score_an_unscorable_row(tiny_model: Path, tmp_path: Path) -> None:
    _, output = scored("grpo", tiny_model, tmp_path, [missing], diversity_coef=1.0)
    assert output["advantages"][0] == 0.0


@pytest.mark.parametrize("rule", ["sum_then_normalize", "gdpo"])
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_skipped_groups_leave_the_kl_too(method: str, rule: str, tiny_model: Path, tmp_path: Path) -> None:
    """All groups constant: with the option the gradient is exactly 0, without it the KL still moves the policy."""
    gradients = []
    for skip in (True, False):
        trainer = make(
            method,
            tiny_model,
            tmp_path,
            [ones],
            beta=0.5,
            kl_estimator="k2",
            kl_placement="loss",
            use_bias_correction_kl=False,
            multi_objective_aggregation=rule,
            skip_zero_signal_groups=skip,
        )
        inputs = batch(trainer)
        gradients.append(loss_and_gradient(trainer.model, lambda: trainer.compute_loss(trainer.model, inputs))[1])  # noqa: B023
        if skip:
            assert trainer._metrics["train"]["groups/zero_signal_skipped"] == [1.0]
    assert (gradients[0] == 0).all()
    assert gradients[1].norm() > 0


def test_signal_is_decided_on_the_combined_value_not_on_the_sum(tiny_model: Path, tmp_path: Path) -> None:
    """Rewards (1, 0) and (0, 1): the plain sum is constant, the weighted GDPO value is not."""

    def first(completions: list[Any], **_: Any) -> list[float]:
        return [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]

    def second(completions: list[Any], **_: Any) -> list[float]:
        return [0.0, 1.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]

    trainer, output = scored(
        "grpo",
        tiny_model,
        tmp_path,
        [first, second],
        multi_objective_aggregation="gdpo",
        reward_weights=[1.0, 3.0],
        skip_zero_signal_groups=True,
    )
    assert output["ext_group_signal"].tolist() == [1.0] * 4 + [0.0] * 4
    assert trainer._metrics["train"]["groups/zero_signal_skipped"] == [1.0]
    assert (output["advantages"][4:] == 0).all() and (output["advantages"][:4] != 0).all()


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_standard_and_conversational_prompts_get_equal_rewards(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """The same texts in both formats: every metric of our rewards is defined in both."""
    trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[method]
    texts = {}

    def remember(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
        values = [float(len(text_of(c))) for c in completions]
        texts["conversational" if isinstance(prompts[0], list) else "standard"] = values
        return values

    for conversational in (False, True):
        settings = base_config(tmp_path, multi_objective_aggregation="gdpo", diversity_coef=0.1)
        trainer = train(
            trainer_class, config_class(**settings), tiny_model, [remember], prompts(conversational=conversational)
        )
        assert len(history(trainer, "gdpo/group_diversity/share")) == 2
    assert texts.keys() == {"standard", "conversational"}


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_evaluation_with_one_generation(method: str, tiny_model: Path, tmp_path: Path) -> None:
    """Groups of one in evaluation: no division by zero, metrics under eval_."""
    trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[method]
    settings = base_config(
        tmp_path,
        multi_objective_aggregation="gdpo",
        diversity_coef=0.1,
        reward_gates=[{"gate": "spaces", "threshold": 0.0}],
        skip_zero_signal_groups=True,
        beta=0.1,
        kl_estimator="k3",
        num_generations_eval=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer = train(trainer_class, config_class(**settings), tiny_model, eval_dataset=prompts())
    assert all(value == value for value in history(trainer, "eval_loss"))
    assert len(history(trainer, "eval_kl")) == 2


def test_an_async_reward_works_with_every_option(tiny_model: Path, tmp_path: Path) -> None:
    async def later(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(text_of(c))) for c in completions]

    settings = base_config(
        tmp_path,
        multi_objective_aggregation="gdpo",
        diversity_coef=0.1,
        reward_gates=[{"gate": "later", "threshold": 0}],
    )
    trainer = train(GRPOTrainer, GRPOConfig(**settings), tiny_model, [later, spaces, characters])
    assert len(history(trainer, "gdpo/later/share")) == 2


def test_trls_noise_on_ties_is_why_gdpo_has_a_tie_rule(tiny_model: Path, tmp_path: Path) -> None:
    """Documents the fault of TRL 1.16 that the rule cures; when this fails TRL has fixed it."""
    config = trl.GRPOConfig(
        **base_config(
            tmp_path,
            num_generations=6,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=2,
            multi_objective_aggregation="normalize_then_sum",
        )
    )
    trainer = trl.GRPOTrainer(str(tiny_model), [tied_by_six], args=config, train_dataset=prompts())
    rows = [{"prompt": PROMPTS[i]} for i in range(2) for _ in range(6)]
    advantages = trainer._generate_and_score_completions(rows)["advantages"]
    assert advantages.abs().max() > 0.1


def tied_by_six(completions: list[Any], **_: Any) -> list[float]:
    """Constant within groups: 0.7 and 0.9."""
    return [0.7] * 6 + [0.9] * (len(completions) - 6)

"""Bradley-Terry loss, Poisson counts, temperature and Brier score."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl

from tests.formulas.vectors import Case, assert_matches, tensor, vector_cases
from trl_ext.formulas.reward_model import bradley_terry_loss, brier_score, fit_temperature, poisson_counts

# ---- Bradley-Terry -------------------------------------------------------------------------------------------------


def test_bradley_terry_hand_worked() -> None:
    """Catches: chosen and rejected swapped, the margin added instead of subtracted, a wrong sign of the loss."""
    # -log sigmoid(x) = log(1 + e^-x); pairs (2, 1), (1, 1), (-1, 2): x = 1, 0, -3
    # log(1 + e^-1) = 0.313262, log 2 = 0.693147, log(1 + e^3) = 3.048587
    chosen, rejected = tensor([2.0, 1.0, -1.0]), tensor([1.0, 1.0, 2.0])
    assert_matches(bradley_terry_loss(chosen, rejected), [0.3132616875, 0.6931471806, 3.0485873516])
    # With margin 2, 0, -3: x = -1, 0, 0.
    margin = tensor([2.0, 0.0, -3.0])
    assert_matches(bradley_terry_loss(chosen, rejected, margin), [1.3132616875, 0.6931471806, 0.6931471806])


def test_centring_hand_worked() -> None:
    """Catches: the square of the difference or of each score, a coefficient applied twice, half of it."""
    # 0.1 * (2 + 1)^2 = 0.9; 0.1 * (-1 + 2)^2 = 0.1
    chosen, rejected = tensor([2.0, -1.0]), tensor([1.0, 2.0])
    plain = bradley_terry_loss(chosen, rejected)
    assert_matches(bradley_terry_loss(chosen, rejected, None, 0.1) - plain, [0.9, 0.1])
    assert torch.equal(bradley_terry_loss(chosen, rejected, None, 0.0), plain)


def test_bradley_terry_gradient_hand_worked() -> None:
    """Catches: a detached side, a margin or a centring term that is left out of the gradient."""
    # x = 2 - 1 - 1 = 0: d/dx -log sigmoid(x) = -1/2; centring: d/dc 0.1 (c + r)^2 = 0.2 * 3 = 0.6 for both
    chosen, rejected = tensor([2.0]).requires_grad_(), tensor([1.0]).requires_grad_()
    bradley_terry_loss(chosen, rejected, tensor([1.0]), 0.1).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert_matches(chosen.grad, [-0.5 + 0.6])
    assert_matches(rejected.grad, [0.5 + 0.6])


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_bradley_terry_gradcheck(shape: tuple[int, ...]) -> None:
    """Catches: a gradient that does not belong to the value."""
    torch.manual_seed(0)
    chosen, rejected = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margin = torch.randn(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry_loss(c, r, margin, 0.3), (chosen, rejected))


def test_members_are_columns_of_their_own() -> None:
    """As many pairs as members. Catches: a margin given to members instead of pairs, a mean over members."""
    torch.manual_seed(1)
    chosen, rejected = torch.randn(2, 3, 3, dtype=torch.float64)
    margin = tensor([0.0, 1.0, -4.0])
    together = bradley_terry_loss(chosen, rejected, margin, 0.2)
    alone = [bradley_terry_loss(chosen[:, m], rejected[:, m], margin, 0.2) for m in range(3)]
    assert torch.equal(together, torch.stack(alone, dim=1))


@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry_is_trls_loss(with_margin: bool, center: float | None) -> None:
    """The mean over pairs against the number that TRL's own compute_loss returns for the same scores."""
    torch.manual_seed(2)
    chosen, rejected, margin = torch.randn(3, 7) * 3
    inputs = {"attention_mask": torch.ones(14, 2)} | ({"margin": margin} if with_margin else {})
    logits = torch.cat([chosen, rejected]).unsqueeze(1)
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=center),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    expected = trl.RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    actual = bradley_terry_loss(chosen, rejected, margin if with_margin else None, center).mean()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [100.0, 1e4, 1e18])
def test_extreme_scores_stay_finite(size: float) -> None:
    """Catches: log(sigmoid(x)), which is -inf from x = -104 on in float32, with a NaN gradient."""
    chosen = torch.tensor([size, -size, size], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([-size, size, size]))
    torch.testing.assert_close(loss, torch.tensor([0.0, 2 * size, math.log(2)]))
    loss.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([0.0, -1.0, -0.5]))


def test_half_precision_scores_are_compared_in_float32() -> None:
    """Catches: a loss in bfloat16, whose steps of 1/256 are larger than what an epoch changes."""
    chosen, rejected = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.0], dtype=torch.bfloat16)
    loss = bradley_terry_loss(chosen, rejected, None, 0.1)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.4132616875, abs=1e-7)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "message"),
    [
        ((3,), (2,), None, "`chosen`"),
        ((3, 1), (3,), None, "`rejected`"),
        ((3,), (3,), (1,), "`margin`"),
        ((3, 2), (3, 2), (2,), "`margin`"),
        ((3, 2), (3, 2), (3, 2), "`margin`"),
    ],
)
def test_shapes_are_not_broadcast(
    chosen: tuple[int, ...], rejected: tuple[int, ...], margin: tuple[int, ...] | None, message: str
) -> None:
    """Catches: (B, 1) against (B,), which would compare every pair with every other."""
    with pytest.raises(ValueError, match=message):
        bradley_terry_loss(torch.zeros(chosen), torch.zeros(rejected), None if margin is None else torch.zeros(margin))


# ---- Poisson counts ------------------------------------------------------------------------------------------------


def poisson(count: int) -> float:
    return math.exp(-1) / math.factorial(count)


def test_counts_have_poisson_probabilities() -> None:
    """A fine even grid instead of random numbers. Catches: another rate, a distribution shifted by one."""
    n = 1_000_000
    counts = poisson_counts((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    assert counts.dtype == torch.int64
    for count in range(9):
        assert (counts == count).double().mean().item() == pytest.approx(poisson(count), abs=2e-6), count
    assert counts.double().mean().item() == pytest.approx(1.0, abs=2e-5)
    assert counts.double().var().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("count", range(12))
def test_thresholds_are_exact(count: int) -> None:
    """Just below P(X <= k) the count is k, just above it is k + 1. Catches: float32 thresholds."""
    threshold = math.fsum(poisson(k) for k in range(count + 1))
    below, above = poisson_counts(torch.tensor([threshold - 1e-15, threshold + 1e-15], dtype=torch.float64)).tolist()
    assert (below, above) == (count, count + 1)


def test_the_threshold_itself_belongs_to_the_next_count() -> None:
    """P(X = 0) = P(U < 1/e): a closed upper end would give 0 one number too many."""
    first = torch.exp(torch.tensor(-1.0, dtype=torch.float64))
    numbers = torch.stack([torch.nextafter(first, torch.zeros_like(first)), first])
    assert poisson_counts(numbers).tolist() == [0, 1]


def test_the_ends_and_the_shape() -> None:
    """Catches: an index beyond the table for the largest number below 1, a flattened result."""
    uniform = torch.tensor([[0.0, 0.5], [1 - 2.0**-53, 0.99]], dtype=torch.float64)
    counts = poisson_counts(uniform)
    assert counts.shape == (2, 2)
    assert counts[0].tolist() == [0, 1]
    assert 15 <= counts[1, 0] <= 20
    assert counts[1, 1] == 4
    assert poisson_counts(torch.tensor([0.5], dtype=torch.float32)).tolist() == [1]


# ---- temperature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true_temperature", [0.2, 1.0, 7.0])
def test_temperature_is_scipys_minimum(true_temperature: float) -> None:
    """Catches: 1/T returned, a bisection in the wrong direction or too short, a mean over right pairs only."""
    optimize = pytest.importorskip("scipy.optimize")
    generator = torch.Generator().manual_seed(3)
    size = torch.randn(2000, generator=generator, dtype=torch.float64).abs() * 3
    right = torch.rand(2000, generator=generator, dtype=torch.float64) < torch.sigmoid(size / true_temperature)
    margins = torch.where(right, size, -size)

    def loss(log_temperature: float) -> float:
        return -torch.nn.functional.logsigmoid(margins / math.exp(log_temperature)).mean().item()

    found = optimize.minimize_scalar(loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-10})
    assert fit_temperature(margins) == pytest.approx(math.exp(found.x), rel=1e-5)
    assert fit_temperature(margins) == pytest.approx(true_temperature, rel=0.25)


def test_temperature_in_closed_form() -> None:
    """3 of 4 pairs right by 2: sigmoid(2 / T) = 3/4, so T = 2 / log 3."""
    margins = torch.tensor([2.0, 2.0, 2.0, -2.0])
    assert fit_temperature(margins) == pytest.approx(2 / math.log(3), rel=1e-9)
    assert fit_temperature(10 * margins) == pytest.approx(20 / math.log(3), rel=1e-9)


def test_temperature_without_a_minimum_is_the_end_of_the_range() -> None:
    """Catches: an overflow, a NaN, the wrong end."""
    assert fit_temperature(torch.tensor([0.1, 2.0, 300.0])) == pytest.approx(1e-3)
    assert fit_temperature(torch.tensor([-0.1, -2.0, -300.0])) == pytest.approx(1e3)
    assert fit_temperature(torch.tensor([-1.0, -1.0, 1.0])) == pytest.approx(1e3)


def test_pairs_without_a_score_are_left_out() -> None:
    """Catches: one NaN or infinite score that turns the temperature into an end of the range."""
    margins = torch.tensor([2.0, math.nan, 2.0, math.inf, 2.0, -2.0, -math.inf])
    assert fit_temperature(margins) == pytest.approx(2 / math.log(3), rel=1e-9)


@pytest.mark.parametrize("margins", [[], [math.nan, math.inf]])
def test_temperature_of_nothing_is_refused(margins: list[float]) -> None:
    """Catches: the mean of nothing, NaN, which bisection takes for a large T."""
    with pytest.raises(ValueError, match="no finite entry"):
        fit_temperature(torch.tensor(margins))


# ---- Brier score ---------------------------------------------------------------------------------------------------


def test_brier_score_hand_worked() -> None:
    """Catches: the square of the sum, p instead of 1 - p."""
    # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4: (1/4 + 1/16 + 9/16) / 3 = 7/24
    assert_matches(brier_score(tensor([0.0, math.log(3), -math.log(3)])), 7 / 24)
    assert brier_score(torch.tensor([1e4])).item() == 0.0
    assert brier_score(torch.tensor([-1e4])).item() == 1.0


@pytest.mark.parametrize("case", vector_cases("evaluation", "ece"))
def test_brier_score_vectors(case: Case) -> None:
    """Against the value of an independent program."""
    assert_matches(brier_score(tensor(case["margins"])), case["brier"], case)

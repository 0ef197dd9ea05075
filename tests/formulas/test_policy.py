import math

import pytest
import torch

from tests.formulas.vectors import JUNK, assert_matches, tensor, vector_cases, with_junk
from trl_ext.formulas.policy import clipped_policy_loss


def naive(logps, old_logps, advantages, epsilon, epsilon_high):
    """The formula as it is written in the paper; correct where nothing overflows."""
    ratio = torch.exp(logps - old_logps)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


@pytest.mark.parametrize("case", vector_cases("ppo", "clipped_policy_loss"))
def test_vectors(case):
    """Catches: max instead of min, the sign, a ratio old/new, clipping without the minimum."""
    logps = tensor(case["logps"]).requires_grad_()
    inputs = (logps, tensor(case["old_logps"]), tensor(case["advantages"]), case["epsilon"])
    mask = tensor(case["mask"])
    per_token = clipped_policy_loss(*inputs)
    assert_matches(per_token, case["expected_per_token"], case)
    masked = clipped_policy_loss(*inputs, mask=mask)
    assert_matches(masked.sum() / mask.sum(), case["expected_mean"], case)
    per_token.sum().backward()
    assert (logps.grad == 0).tolist() == case["grad_is_zero"]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        # A > 0, r > 1 + eps: min(1.5 * 2, 1.2 * 2) = 2.4, clipped: gradient 0
        (2.0, 1.5, -2.4, 0.0),
        # A > 0, r < 1 - eps: min(0.5 * 2, 0.8 * 2) = 1, free: d(-r A)/d logps = -r A = -1
        (2.0, 0.5, -1.0, -1.0),
        # A < 0, r < 1 - eps: min(0.5 * -2, 0.8 * -2) = -1.6, clipped: gradient 0
        (-2.0, 0.5, 1.6, 0.0),
        # A < 0, r > 1 + eps: min(1.5 * -2, 1.2 * -2) = -3, free: gradient -r A = 3
        (-2.0, 1.5, 3.0, 3.0),
        # inside the clip range both branches agree: gradient -r A
        (2.0, 1.1, -2.2, -2.2),
        (-2.0, 0.9, 1.8, 1.8),
    ],
)
def test_hand_worked_four_cases_of_the_pessimistic_minimum(advantage, ratio, loss, gradient):
    """Catches: clipping on both sides (no way back for a policy that went wrong), max, the sign."""
    logps = tensor([[math.log(ratio) - 1.0]]).requires_grad_()
    actual = clipped_policy_loss(logps, tensor([[-1.0]]), tensor([[advantage]]), 0.2)
    assert_matches(actual, [[loss]])
    actual.sum().backward()
    assert_matches(logps.grad, [[gradient]])


def test_on_policy_is_the_policy_gradient():
    """Special case r = 1: value -A, gradient -A. Catches: a detached ratio, an advantage used twice."""
    advantages = tensor([[1.5, -0.5, 0.0]])
    logps = tensor([[-1.0, -2.0, -3.0]]).requires_grad_()
    loss = clipped_policy_loss(logps, logps.detach(), advantages, 0.2)
    assert_matches(loss, -advantages)
    loss.sum().backward()
    assert_matches(logps.grad, -advantages)


@pytest.mark.parametrize(("epsilon", "epsilon_high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (0.1, 3.0)])
def test_equals_the_formula_as_written(epsilon, epsilon_high):
    """Catches: epsilon_high used below, or epsilon above. Values equal bit for bit, gradients to 1e-6."""
    torch.manual_seed(0)
    logps, old_logps, advantages = torch.randn(3, 20, 30, dtype=torch.float64)
    gradients = []
    for function in (clipped_policy_loss, naive):
        leaf = logps.clone().requires_grad_()
        loss = function(leaf, old_logps, advantages, epsilon, epsilon_high)
        loss.sum().backward()
        gradients.append((loss.detach(), leaf.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert_matches(gradients[0][1], gradients[1][1])


def test_epsilon_high_defaults_to_epsilon():
    torch.manual_seed(1)
    inputs = torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.equal(clipped_policy_loss(*inputs, 0.2), clipped_policy_loss(*inputs, 0.2, 0.2))
    assert not torch.equal(clipped_policy_loss(*inputs, 0.2), clipped_policy_loss(*inputs, 0.2, 0.5))


def test_gradcheck():
    torch.manual_seed(2)
    logps, old_logps, advantages = torch.randn(3, 3, 4, dtype=torch.float64)
    inputs = (logps.requires_grad_(), old_logps.requires_grad_(), advantages.requires_grad_())
    mask = torch.tensor([[1, 1, 0, 1]] * 3)
    assert torch.autograd.gradcheck(lambda *args: clipped_policy_loss(*args, 0.2, 0.3, mask), inputs)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_junk_under_mask_changes_neither_value_nor_gradient(junk, argument):
    """Catches: loss * mask, after the NaN has been made."""

    def run(junk):
        dirty = [with_junk(value, mask, junk) if index == argument else value for index, value in enumerate(inputs)]
        logps = dirty[0].clone().requires_grad_()
        loss = clipped_policy_loss(logps, dirty[1], dirty[2], 0.2, mask=mask)
        loss.sum().backward()
        return loss, logps.grad

    torch.manual_seed(3)
    inputs = torch.randn(3, 2, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]])
    for actual, expected in zip(run(junk), run(0.0), strict=True):
        assert_matches(actual, expected)
        assert (actual[mask == 0] == 0).all()


@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_clipped_token_stays_finite_however_far_the_policy_moved(log_ratio, advantage):
    """Catches: torch.min after exp: exp(200) is inf in float32, and its gradient 0 * inf = NaN."""
    logps = torch.tensor([[log_ratio]], requires_grad=True)
    loss = clipped_policy_loss(logps, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2)
    loss.sum().backward()
    if advantage < 0 and log_ratio > 0:  # the side that is unbounded by design
        assert loss.item() == math.inf
        return
    assert loss.isfinite().all() and logps.grad.isfinite().all()
    assert logps.grad.item() == 0


def test_a_nan_that_is_not_masked_is_not_hidden():
    """Catches: nan_to_num, which would train on an unscored token as if its ratio were 1."""
    nan = torch.tensor([[math.nan]])
    zero = torch.zeros(1, 1)
    assert clipped_policy_loss(nan, zero, zero + 1, 0.2).isnan().all()
    assert clipped_policy_loss(zero, zero, nan, 0.2).isnan().all()


def test_half_precision_is_computed_in_float32():
    """Catches: the difference taken in bfloat16, where -1.0078125 + 0.003 is still -1.0078125."""
    logps = torch.tensor([[-1.0078125]], dtype=torch.bfloat16)
    old_logps = torch.tensor([[-0.003]], dtype=torch.bfloat16)
    loss = clipped_policy_loss(logps, old_logps, torch.ones(1, 1).bfloat16(), 0.2)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(-1.0078125 - old_logps.item()), abs=1e-6)


def test_no_token():
    empty = torch.zeros(2, 0)
    assert clipped_policy_loss(empty, empty, empty, 0.2, mask=empty).shape == (2, 0)


def test_errors_name_the_argument():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="`advantages`"):
        clipped_policy_loss(zeros, zeros, torch.zeros(2), 0.2)
    with pytest.raises(ValueError, match="`old_logps`"):
        clipped_policy_loss(zeros, zeros[:1], zeros, 0.2)
    with pytest.raises(ValueError, match="`mask`"):
        clipped_policy_loss(zeros, zeros, zeros, 0.2, mask=torch.ones(2))
    with pytest.raises(ValueError, match="`epsilon`"):
        clipped_policy_loss(zeros, zeros, zeros, 1.0)
    with pytest.raises(ValueError, match="`epsilon`"):
        clipped_policy_loss(zeros, zeros, zeros, -0.1)
    with pytest.raises(ValueError, match="`epsilon_high`"):
        clipped_policy_loss(zeros, zeros, zeros, 0.2, -0.1)

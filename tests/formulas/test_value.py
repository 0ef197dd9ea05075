import pytest
import torch

from tests.formulas.vectors import JUNK, assert_matches, tensor, vector_cases, with_junk
from trl_ext.formulas.value import clipped_value_loss


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """values, old_values, returns stacked (3, B, T), and a mask."""
    generator = torch.Generator().manual_seed(0)
    stacked = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    return stacked, torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]])


@pytest.mark.parametrize("case", vector_cases("ppo", "clipped_value_loss"))
def test_vectors(case):
    """Catches: min instead of max, the 1/2 left out, the mean over all entries, clipping around the return."""
    names = ("values", "old_values", "returns", "mask")
    assert_matches(
        clipped_value_loss(*(tensor(case[name]) for name in names), case["clip"]), case["expected_mean"], case
    )


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        # old 0, return 1, clip 0.2. V = 0.5 moved past the clip towards R: clip(V) = 0.2;
        # 1/2 max((0.5 - 1)^2, (0.2 - 1)^2) = 1/2 * 0.64 = 0.32; the clipped branch has gradient 0
        (0.5, 0.32, 0.0),
        # V = 0.1, inside: both branches 1/2 * 0.81 = 0.405; gradient V - R = -0.9
        (0.1, 0.405, -0.9),
        # V = -0.5 moved away: clip(V) = -0.2; 1/2 max(2.25, 1.44) = 1.125; gradient V - R = -1.5
        (-0.5, 1.125, -1.5),
        # V = 3 overshot: clip(V) = 0.2; 1/2 max(4, 0.64) = 2; gradient V - R = 2
        (3.0, 2.0, 2.0),
    ],
)
def test_hand_worked(value, loss, gradient):
    """Catches: min (the critic would be held at its old value), a clip that also stops the way back."""
    values = tensor([[value]]).requires_grad_()
    actual = clipped_value_loss(values, tensor([[0.0]]), tensor([[1.0]]), torch.ones(1, 1), 0.2)
    assert_matches(actual, loss)
    actual.backward()
    assert_matches(values.grad, [[gradient]])


def test_without_clip_it_is_half_the_mean_squared_error():
    """Special case. Catches: None treated as 0, and a large clip that still clips."""
    (values, old_values, returns), mask = random_batch()
    expected = ((values - returns)[mask.bool()] ** 2).mean() / 2
    assert_matches(clipped_value_loss(values, old_values, returns, mask, None), expected)
    assert_matches(clipped_value_loss(values, old_values, returns, mask, 1e9), expected)


def test_first_step_is_half_the_mean_squared_error_for_any_clip():
    """Special case V = V_old. Catches: a clip range that is not around V_old."""
    (values, _, returns), mask = random_batch()
    expected = ((values - returns)[mask.bool()] ** 2).mean() / 2
    assert_matches(clipped_value_loss(values, values, returns, mask, 0.01), expected)


def test_gradcheck():
    (values, old_values, returns), mask = random_batch()
    assert torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, old_values, returns, mask, 0.2), values.requires_grad_()
    )


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_junk_under_mask_changes_neither_value_nor_gradient(junk, argument):
    """Catches: error * mask, and the division by the number of all entries."""

    def run(junk):
        dirty = [with_junk(value, mask, junk) if index == argument else value for index, value in enumerate(stacked)]
        values = dirty[0].clone().requires_grad_()
        loss = clipped_value_loss(values, dirty[1], dirty[2], mask, 0.2)
        loss.backward()
        return loss, values.grad

    stacked, mask = random_batch()
    dirty, clean = run(junk), run(0.0)
    assert_matches(dirty[0], clean[0])
    assert_matches(dirty[1], clean[1])
    assert (dirty[1][mask == 0] == 0).all()


def test_no_real_token_gives_zero_and_a_zero_gradient():
    """Catches: 0 / 0."""
    values = torch.ones(1, 3, requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3), 0.2)
    assert loss.item() == 0
    loss.backward()
    assert (values.grad == 0).all()


def test_num_items_makes_accumulation_equal_to_one_batch():
    """Catches: a mean of means, which weighs the tokens of short answers more (here 3 against 4 tokens)."""
    (values, old_values, returns), mask = random_batch()
    whole = values.clone().requires_grad_()
    loss = clipped_value_loss(whole, old_values, returns, mask, 0.2)
    loss.backward()
    parts = values.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        rows = slice(row, row + 1)
        part = clipped_value_loss(parts[rows], old_values[rows], returns[rows], mask[rows], 0.2, num_items=mask.sum())
        part.backward()
        total += part.detach()
    assert_matches(total, loss.detach())
    assert_matches(parts.grad, whole.grad)


def test_half_precision_is_computed_in_float32():
    """Catches: the square in float16, where 300^2 overflows."""
    values = torch.tensor([[300.0]], dtype=torch.float16)
    loss = clipped_value_loss(values, values, torch.zeros_like(values), torch.ones(1, 1), 0.2)
    assert loss.dtype == torch.float32
    assert loss.item() == 45000.0


def test_errors_name_the_argument():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="`returns`"):
        clipped_value_loss(zeros, zeros, zeros[:, :1], zeros, 0.2)
    with pytest.raises(ValueError, match="`old_values`"):
        clipped_value_loss(zeros, zeros[:1], zeros, zeros, 0.2)
    with pytest.raises(ValueError, match="`mask`"):
        clipped_value_loss(zeros, zeros, zeros, zeros[0], 0.2)
    with pytest.raises(ValueError, match="`clip`"):
        clipped_value_loss(zeros, zeros, zeros, zeros, -0.2)

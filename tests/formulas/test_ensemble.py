import pytest
import torch

from tests.formulas.vectors import assert_matches, tensor, vector_cases
from trl_ext.formulas.ensemble import reduce_ensemble

ALL = ["mean", "min", "median", "lcb", "uwo"]
DISAGREEMENT = ["lcb", "uwo"]


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("case", vector_cases("rewards", "ensemble"))
def test_vectors(case, how):
    """Catches: ddof 1, std and variance swapped, a bonus instead of a penalty, the wrong axis."""
    assert_matches(reduce_ensemble(tensor(case["scores"]), how, case["coef"]), case["expected"][how], case)


def test_hand_worked():
    """Catches: coef applied twice or not at all, sqrt left out, ddof 1 (uwo would be 4 - 0.5 * 19 = -5.5)."""
    # members 1, 2, 9: mean 12/3 = 4; deviations -3, -2, 5; squares 9 + 4 + 25 = 38; variance 38/3 = 12.666667
    # lcb: 4 - 0.5 * sqrt(12.666667) = 4 - 0.5 * 3.559026 = 2.220487
    # uwo: 4 - 0.5 * 12.666667 = -2.333333
    scores = tensor([[1.0], [2.0], [9.0]])
    assert_matches(reduce_ensemble(scores, "mean", 0.5), [4.0])
    assert_matches(reduce_ensemble(scores, "min", 0.5), [1.0])
    assert_matches(reduce_ensemble(scores, "median", 0.5), [2.0])
    assert_matches(reduce_ensemble(scores, "lcb", 0.5), [2.2204869579947814])
    assert_matches(reduce_ensemble(scores, "uwo", 0.5), [-7 / 3])


def test_hand_worked_gradient():
    """Catches: a penalty that is detached, or whose gradient has the wrong sign."""
    # d uwo / d s_i = 1/M - coef * 2 (s_i - m) / M = 1/3 - 2/3 * (-3, -2, 5) = (7/3, 5/3, -3): raising the outlier
    # by 1 costs 3, although it raises the mean.
    scores = tensor([[1.0], [2.0], [9.0]]).requires_grad_()
    reduce_ensemble(scores, "uwo", 1.0).sum().backward()
    assert_matches(scores.grad, [[7 / 3], [5 / 3], [-3.0]])


@pytest.mark.parametrize("how", ALL)
def test_gradcheck(how):
    torch.manual_seed(0)
    scores = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: reduce_ensemble(s, how, 0.7), scores)


def test_median_of_an_even_ensemble_is_the_middle_of_the_two():
    """Catches: torch.median, which returns the lower one (2)."""
    assert_matches(reduce_ensemble(tensor([[8.0], [1.0], [4.0], [2.0]]), "median"), [3.0])


@pytest.mark.parametrize("how", DISAGREEMENT)
def test_zero_coefficient_is_exactly_the_mean(how):
    """Catches: 0 * variance computed anyway, which is NaN once the float32 variance overflows."""
    scores = torch.tensor([[1e30, 0.1], [-3e30, 0.7]])
    assert torch.equal(reduce_ensemble(scores, how, 0.0), reduce_ensemble(scores, "mean"))


@pytest.mark.parametrize("how", ALL)
def test_members_that_agree_give_their_score_and_a_finite_gradient(how):
    """Catches: sqrt(variance), whose gradient at 0 is NaN."""
    scores = torch.full((4, 2), 0.5, dtype=torch.float64, requires_grad=True)
    reduced = reduce_ensemble(scores, how, 3.0)
    assert_matches(reduced, [0.5, 0.5])
    reduced.sum().backward()
    assert scores.grad.isfinite().all()
    assert_matches(scores.grad.sum(0), [1.0, 1.0])


@pytest.mark.parametrize("how", ALL)
def test_one_member_is_its_own_result(how):
    """Catches: ddof 1, which is NaN here."""
    scores = tensor([[0.3, -2.0]])
    assert_matches(reduce_ensemble(scores, how, 2.0), scores[0])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("how", ALL)
def test_a_failed_member_makes_its_completion_nan_and_no_other(how, position):
    """Catches: a median or minimum that quietly leaves the failed member out (NaN sorts last)."""
    scores = tensor([[1.0, 5.0, -1.0], [2.0, 4.0, 0.0], [9.0, 6.0, 1.0]])
    clean = reduce_ensemble(scores, how)
    scores[position, 1] = torch.nan
    reduced = reduce_ensemble(scores, how)
    assert reduced.isnan().tolist() == [False, True, False]
    assert_matches(reduced[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("how", ALL)
def test_order_of_members_does_not_matter(how):
    torch.manual_seed(1)
    scores = torch.randn(6, 7, dtype=torch.float64)
    assert_matches(reduce_ensemble(scores[torch.randperm(6)], how), reduce_ensemble(scores, how))


@pytest.mark.parametrize("how", DISAGREEMENT)
def test_pessimism_is_ordered(how):
    """Catches: the penalty added. min <= lcb is no theorem, but both penalised scores are below the mean."""
    torch.manual_seed(2)
    scores = torch.randn(3, 50, dtype=torch.float64)
    weak, strong = reduce_ensemble(scores, how, 0.1), reduce_ensemble(scores, how, 1.0)
    assert (strong < weak).all() and (weak < reduce_ensemble(scores, "mean")).all()


@pytest.mark.parametrize("how", ALL)
def test_no_completion(how):
    assert reduce_ensemble(torch.zeros(3, 0), how).shape == (0,)


def test_half_precision_is_computed_in_float32():
    """Catches: statistics in bfloat16: 128.5 has no bfloat16 representation."""
    reduced = reduce_ensemble(torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16), "mean")
    assert reduced.dtype == torch.float32
    assert reduced.item() == 128.5
    assert reduce_ensemble(torch.tensor([[1], [2]]), "mean").item() == 1.5


@pytest.mark.parametrize(
    ("scores", "how", "coef", "message"),
    [
        (torch.zeros(3), "mean", 1.0, "`scores`"),
        (torch.zeros(0, 3), "mean", 1.0, "at least one member"),
        (torch.zeros(2, 3), "worst", 1.0, "'worst'"),
        (torch.zeros(2, 3), "lcb", -0.5, "`coef`"),
        (torch.zeros(2, 3), "uwo", float("nan"), "`coef`"),
    ],
)
def test_errors_name_the_argument(scores, how, coef, message):
    with pytest.raises(ValueError, match=message):
        reduce_ensemble(scores, how, coef)

import math

import pytest
import torch

from tests.formulas.vectors import assert_matches, tensor, vector_cases
from trl_ext.formulas.preference import dpop_loss, project_update

ARGUMENTS = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")


def random_logps(size: int = 6, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(-20 + 3 * torch.randn(4, size, generator=generator, dtype=torch.float64))


class TestDPOP:
    @pytest.mark.parametrize("case", vector_cases("preference", "dpop"))
    def test_vectors(self, case):
        """Catches: the penalty outside the sigmoid (100.55 or -99.45 on dpop_hand_50), outside beta, or on rejected."""
        logps = [tensor(case[name]) for name in ARGUMENTS]
        assert_matches(dpop_loss(*logps, case["beta"], case["lambda"]), case["expected"], case)

    def test_hand_worked(self):
        """Catches: 0.5544 + 100 = 100.5544 and 0.5544 - 100 = -99.4456, the wrong variants in circulation."""
        # chosen: -12 - (-10) = -2, rejected: -20 - (-15) = -5, difference -2 + 5 = 3
        # penalty 50 * max(0, -10 + 12) = 100; logit 0.1 * (3 - 100) = -9.7
        # loss log(1 + e^9.7) = 9.7 + log(1 + e^-9.7) = 9.7 + 0.0000613 = 9.7000613
        # gradient: sigmoid(9.7) = 0.99993872; d/d chosen = -0.99993872 * 0.1 * (1 + 50), d/d rejected = +0.099993872
        logps = [tensor([value]).requires_grad_() for value in (-12.0, -20.0, -10.0, -15.0)]
        loss = dpop_loss(*logps, 0.1, 50.0)
        assert_matches(loss, [9.700061281617298])
        loss.sum().backward()
        slope = 1 / (1 + math.exp(-9.7))
        assert_matches(logps[0].grad, [-slope * 0.1 * 51])
        assert_matches(logps[1].grad, [slope * 0.1])

    def test_lambda_zero_is_plain_dpo(self):
        """Special case, value and gradient. Catches: chosen and rejected or policy and reference swapped."""
        results = []
        for use_dpop in (True, False):
            chosen, rejected, ref_chosen, ref_rejected = logps = [value.requires_grad_() for value in random_logps()]
            if use_dpop:
                loss = dpop_loss(*logps, 0.3, 0.0)
            else:
                logits = 0.3 * ((chosen - rejected) - (ref_chosen - ref_rejected))
                loss = -torch.nn.functional.logsigmoid(logits)
            loss.sum().backward()
            results.append([loss.detach(), *(value.grad for value in logps)])
        for actual, expected in zip(*results, strict=True):
            assert_matches(actual, expected)

    def test_step_zero_is_ln_2_with_the_gradient_of_dpo(self):
        """Catches: clamp(min=0), whose gradient at the kink is 1, so that the first step would be 51 times too big."""
        chosen = tensor([-12.0, -3.0]).requires_grad_()
        rejected = tensor([-20.0, -9.0]).requires_grad_()
        loss = dpop_loss(chosen, rejected, chosen.detach(), rejected.detach(), 0.1, 50.0)
        assert_matches(loss, [math.log(2)] * 2)
        loss.sum().backward()
        # d/dx of -log sigmoid at 0 is -1/2: -0.5 * 0.1 and +0.5 * 0.1
        assert_matches(chosen.grad, [-0.05, -0.05])
        assert_matches(rejected.grad, [0.05, 0.05])

    def test_lambda_has_no_effect_where_chosen_is_above_the_reference(self):
        """Catches: |ref_c - pi_c|, or a penalty that turns into a bonus."""
        chosen, rejected, _, ref_rejected = random_logps()
        inputs = (chosen, rejected, chosen - 1, ref_rejected)
        assert torch.equal(dpop_loss(*inputs, 0.1, 50.0), dpop_loss(*inputs, 0.1, 0.0))

    def test_lowering_both_is_punished_only_by_dpop(self):
        """The failure DPOP is for. Catches: a penalty that looks at the rejected answer."""
        # both 5 below the reference: DPO sees a difference of 0 and ln 2; DPOP sees 0.1 * (0 - 2 * 5) = -1
        inputs = (tensor([-15.0]), tensor([-15.0]), tensor([-10.0]), tensor([-10.0]))
        assert_matches(dpop_loss(*inputs, 0.1, 0.0), [math.log(2)])
        assert_matches(dpop_loss(*inputs, 0.1, 2.0), [math.log(1 + math.e)])

    def test_training_on_similar_pairs_lowers_chosen_with_dpo_and_not_with_dpop(self):
        """The failure as it happens. Catches: a penalty without gradient, or with the wrong sign."""
        # One weight t; logits chosen t, rejected 2 t, two others 0. Lowering t helps the margin (its gradient is
        # t - 2 t = -t) although it lowers the chosen answer too (d chosen / dt = 1 - 3/4 at t = 0).
        slopes = tensor([1.0, 2.0, 0.0, 0.0])
        start = (0 * slopes).log_softmax(0)

        def train(dpop_lambda):
            weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
            for _ in range(200):
                logps = (weight * slopes).log_softmax(0)
                loss = dpop_loss(logps[:1], logps[1:2], start[:1], start[1:2], 1.0, dpop_lambda)
                (gradient,) = torch.autograd.grad(loss.sum(), weight)
                weight = (weight - 0.05 * gradient).detach().requires_grad_()
            return (weight * slopes).log_softmax(0)[0].item()

        assert train(0.0) < start[0] - 1.0
        assert train(8.0) > start[0] - 0.02

    def test_penalty_is_inside_beta(self):
        """Catches: beta * margin - lambda * penalty. Multiplying all log-ratios by c equals multiplying beta by c."""
        chosen, rejected, ref_chosen, ref_rejected = random_logps()
        scaled = (ref_chosen + 2 * (chosen - ref_chosen), ref_rejected + 2 * (rejected - ref_rejected))
        actual = dpop_loss(*scaled, ref_chosen, ref_rejected, 0.1, 7.0)
        assert_matches(actual, dpop_loss(chosen, rejected, ref_chosen, ref_rejected, 0.2, 7.0))

    def test_gradcheck(self):
        inputs = tuple(value.requires_grad_() for value in random_logps())
        assert torch.autograd.gradcheck(lambda *logps: dpop_loss(*logps, 0.3, 5.0), inputs)

    @pytest.mark.parametrize("shift", [-1e4, 1e4])
    def test_extreme_margins_stay_finite_in_float32(self, shift):
        """Catches: log(sigmoid(x)) and log(1 + exp(-x)), which are inf with NaN gradients."""
        chosen = torch.tensor([shift], requires_grad=True)
        loss = dpop_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0, 50.0)
        loss.sum().backward()
        assert loss.isfinite().all() and chosen.grad.isfinite().all()
        assert loss.item() == (0.0 if shift > 0 else 51e4)

    def test_a_broken_pair_stays_alone(self):
        """Catches: any mixing of rows."""
        logps = random_logps()
        clean = dpop_loss(*logps, 0.1, 5.0)
        logps[0][2] = torch.nan
        loss = dpop_loss(*logps, 0.1, 5.0)
        assert loss.isnan().tolist() == [False, False, True, False, False, False]
        assert_matches(loss[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])

    def test_no_pair(self):
        assert dpop_loss(*[torch.zeros(0)] * 4, 0.1, 5.0).shape == (0,)

    def test_half_precision_is_computed_in_float32(self):
        """Catches: 0.1 * 3 rounded to bfloat16 (0.3008), which moves the loss by 3e-4."""
        logps = [torch.tensor([value], dtype=torch.bfloat16) for value in (-12.0, -20.0, -10.0, -15.0)]
        loss = dpop_loss(*logps, 0.1, 0.0)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.3)), abs=1e-6)

    @pytest.mark.parametrize("position", range(4))
    def test_shape_errors_name_the_argument(self, position):
        """Catches: (B, 1) against (B,), which would broadcast to (B, B) in silence."""
        logps = [torch.zeros(3) for _ in ARGUMENTS]
        logps[position] = torch.zeros(3, 1)
        with pytest.raises(ValueError, match=f"`{ARGUMENTS[position]}`"):
            dpop_loss(*logps, 0.1, 5.0)

    @pytest.mark.parametrize(
        ("beta", "dpop_lambda", "name"), [(0.0, 1.0, "beta"), (-0.1, 1.0, "beta"), (0.1, -1.0, "dpop_lambda")]
    )
    def test_bad_coefficients(self, beta, dpop_lambda, name):
        with pytest.raises(ValueError, match=f"`{name}`"):
            dpop_loss(*[torch.zeros(3)] * 4, beta, dpop_lambda)


class TestProjectUpdate:
    @pytest.mark.parametrize("case", vector_cases("preference", "projection"))
    def test_vectors(self, case):
        """Catches: the sign (removing the harmless part), a two-sided projection, |c| instead of c . c."""
        projected = project_update(tensor(case["update_gradient"]), tensor(case["chosen_gradient"]))
        assert_matches(projected, case["expected"], case)

    def test_hand_worked(self):
        """Catches: division by the norm instead of its square, g - 2/2.236 c = (0.106, -1.289)."""
        # g = (1, 0.5), c = (1, 2): g . c = 1 + 1 = 2, c . c = 5, g - 2/5 c = (0.6, -0.3), and 0.6 - 0.6 = 0
        projected = project_update(tensor([1.0, 0.5]), tensor([1.0, 2.0]))
        assert_matches(projected, [0.6, -0.3])
        # -g has the dot product -2: harmless, unchanged
        assert_matches(project_update(tensor([-1.0, -0.5]), tensor([1.0, 2.0])), [-1.0, -0.5])

    def test_a_step_along_the_result_never_lowers_the_chosen_log_probability(self):
        """Catches: every sign error, on a real log-probability and not on the formula."""
        torch.manual_seed(0)
        harmful = 0
        for _ in range(50):
            theta = torch.randn(6, dtype=torch.float64, requires_grad=True)
            (chosen,) = torch.autograd.grad(theta.log_softmax(0)[2], theta)
            gradient = torch.randn(6, dtype=torch.float64)
            harmful += bool(gradient @ chosen > 0)
            with torch.no_grad():
                before = theta.log_softmax(0)[2]
                after = (theta - 1e-5 * project_update(gradient, chosen)).log_softmax(0)[2]
            assert after - before > -1e-8
        assert 10 < harmful < 40

    def test_harmful_part_is_gone_and_the_rest_is_kept(self):
        torch.manual_seed(1)
        gradient, chosen = torch.randn(2, 100, dtype=torch.float64)
        gradient = gradient if gradient @ chosen > 0 else -gradient
        projected = project_update(gradient, chosen)
        assert_matches(projected @ chosen, 0.0)
        removed = gradient - projected
        assert_matches(removed * chosen.norm(), chosen * removed.norm())
        assert_matches(project_update(projected, chosen), projected)

    def test_harmless_gradient_is_unchanged_bit_for_bit(self):
        torch.manual_seed(2)
        gradient, chosen = torch.randn(2, 100)
        chosen = -chosen if gradient @ chosen > 0 else chosen
        assert torch.equal(project_update(gradient, chosen), gradient)

    def test_zero_chosen_gradient_changes_nothing(self):
        """Catches: 0 / 0."""
        gradient = torch.tensor([1.0, -2.0])
        assert torch.equal(project_update(gradient, torch.zeros(2)), gradient)

    @pytest.mark.parametrize("scale", [1e-30, 1e-22, 1.0, 1e22, 1e30])
    def test_only_the_direction_of_the_chosen_gradient_matters(self, scale):
        """Catches: c . c in float32, which underflows to 0 or overflows to inf."""
        projected = project_update(torch.tensor([1.0, 0.5]), scale * torch.tensor([1.0, 2.0]))
        assert projected.tolist() == pytest.approx([0.6, -0.3], abs=1e-6)

    def test_a_broken_chosen_gradient_is_not_hidden(self):
        """Catches: a comparison with NaN that silently returns the unprojected gradient."""
        for broken in (torch.nan, torch.inf):
            assert project_update(torch.ones(2), torch.tensor([1.0, broken])).isnan().any()

    def test_shape_is_kept_and_the_dot_product_is_over_all_entries(self):
        """Catches: a projection per row."""
        torch.manual_seed(3)
        gradient, chosen = torch.randn(2, 3, 4, dtype=torch.float64)
        projected = project_update(gradient, chosen)
        assert projected.shape == (3, 4)
        assert_matches(projected.flatten(), project_update(gradient.flatten(), chosen.flatten()))
        assert project_update(torch.zeros(0), torch.zeros(0)).shape == (0,)

    def test_gradcheck(self):
        inputs = (tensor([1.0, 0.5, -0.2]).requires_grad_(), tensor([1.0, 2.0, 0.3]).requires_grad_())
        assert torch.autograd.gradcheck(project_update, inputs)

    def test_half_precision_is_computed_in_float32(self):
        """Catches: the dot product of 4096 ones summed in bfloat16."""
        ones = torch.ones(4096, dtype=torch.bfloat16)
        projected = project_update(ones, ones)
        assert projected.dtype == torch.float32
        assert projected.abs().max() < 1e-6

    def test_errors_name_the_argument(self):
        with pytest.raises(ValueError, match="`chosen_gradient`"):
            project_update(torch.zeros(3), torch.zeros(3, 1))

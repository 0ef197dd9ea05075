from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch

from tests.formulas.vectors import JUNK, Case, assert_matches, tensor, vector_cases, with_junk
from trl_ext.formulas.preference import (
    cal_dpo_loss,
    dpo_shift_loss,
    dpop_loss,
    log_ratios,
    project_update,
    sequence_logps,
)

ARGUMENTS = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")

Logps = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
PairLoss = Callable[..., torch.Tensor]


def four(values: Iterable[torch.Tensor]) -> Logps:
    chosen, rejected, ref_chosen, ref_rejected = values
    return chosen, rejected, ref_chosen, ref_rejected


def random_logps(size: int = 6, seed: int = 0) -> Logps:
    generator = torch.Generator().manual_seed(seed)
    return four(-20 + 3 * torch.randn(4, size, generator=generator, dtype=torch.float64))


def one_pair(chosen: float, rejected: float, dtype: torch.dtype = torch.float64) -> Logps:
    """A pair with these log-ratios: the reference is at 0. Leaves of the graph, all four."""
    return four(tensor([value], dtype).requires_grad_() for value in (chosen, rejected, 0.0, 0.0))


def plain_dpo(
    chosen: torch.Tensor, rejected: torch.Tensor, ref_chosen: torch.Tensor, ref_rejected: torch.Tensor, beta: float
) -> torch.Tensor:
    return -torch.nn.functional.logsigmoid(beta * ((chosen - rejected) - (ref_chosen - ref_rejected)))


def gradients(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output.sum(), inputs)


def train_on_similar_pairs(loss: PairLoss, *coefficients: float) -> float:
    """Log-ratio of the chosen answer after training one weight t; logits chosen t, rejected 2 t, two others 0.

    Lowering t helps the margin (its gradient is t - 2 t = -t) although it lowers the chosen answer too
    (d chosen / dt = 1 - 3/4 at t = 0).
    """
    slopes = tensor([1.0, 2.0, 0.0, 0.0])
    start = (0 * slopes).log_softmax(0)
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(200):
        logps = (weight * slopes).log_softmax(0)
        value = loss(logps[:1], logps[1:2], start[:1], start[1:2], *coefficients)
        (gradient,) = gradients(value, [weight])
        weight = (weight - 0.05 * gradient).detach().requires_grad_()
    return ((weight * slopes).log_softmax(0) - start)[0].item()


class TestDPOP:
    @pytest.mark.parametrize("case", vector_cases("preference", "dpop"))
    def test_vectors(self, case: Case) -> None:
        """Catches: the penalty outside the sigmoid (100.55 or -99.45 on dpop_hand_50), outside beta, or on rejected."""
        logps = four(tensor(case[name]) for name in ARGUMENTS)
        assert_matches(dpop_loss(*logps, case["beta"], case["lambda"]), case["expected"], case)

    def test_hand_worked(self) -> None:
        """Catches: 0.5544 + 100 = 100.5544 and 0.5544 - 100 = -99.4456, the wrong variants in circulation."""
        # chosen: -12 - (-10) = -2, rejected: -20 - (-15) = -5, difference -2 + 5 = 3
        # penalty 50 * max(0, -10 + 12) = 100; logit 0.1 * (3 - 100) = -9.7
        # loss log(1 + e^9.7) = 9.7 + log(1 + e^-9.7) = 9.7 + 0.0000613 = 9.7000613
        # gradient: sigmoid(9.7) = 0.99993872; d/d chosen = -0.99993872 * 0.1 * (1 + 50), d/d rejected = +0.099993872
        logps = four(tensor([value]).requires_grad_() for value in (-12.0, -20.0, -10.0, -15.0))
        loss = dpop_loss(*logps, 0.1, 50.0)
        assert_matches(loss, [9.700061281617298])
        for_chosen, for_rejected = gradients(loss, logps[:2])
        slope = 1 / (1 + math.exp(-9.7))
        assert_matches(for_chosen, [-slope * 0.1 * 51])
        assert_matches(for_rejected, [slope * 0.1])

    def test_lambda_zero_is_plain_dpo(self) -> None:
        """Special case, value and gradient. Catches: chosen and rejected or policy and reference swapped."""
        results = []
        for use_dpop in (True, False):
            logps = four(value.requires_grad_() for value in random_logps())
            if use_dpop:
                loss = dpop_loss(*logps, 0.3, 0.0)
            else:
                loss = plain_dpo(*logps, beta=0.3)
            results.append([loss.detach(), *gradients(loss, logps)])
        for actual, expected in zip(*results, strict=True):
            assert_matches(actual, expected)

    def test_step_zero_is_ln_2_with_the_gradient_of_dpo(self) -> None:
        """Catches: clamp(min=0), whose gradient at the kink is 1, so that the first step would be 51 times too big."""
        chosen = tensor([-12.0, -3.0]).requires_grad_()
        rejected = tensor([-20.0, -9.0]).requires_grad_()
        loss = dpop_loss(chosen, rejected, chosen.detach(), rejected.detach(), 0.1, 50.0)
        assert_matches(loss, [math.log(2)] * 2)
        for_chosen, for_rejected = gradients(loss, [chosen, rejected])
        # d/dx of -log sigmoid at 0 is -1/2: -0.5 * 0.1 and +0.5 * 0.1
        assert_matches(for_chosen, [-0.05, -0.05])
        assert_matches(for_rejected, [0.05, 0.05])

    def test_lambda_has_no_effect_where_chosen_is_above_the_reference(self) -> None:
        """Catches: |ref_c - pi_c|, or a penalty that turns into a bonus."""
        chosen, rejected, _, ref_rejected = random_logps()
        inputs = (chosen, rejected, chosen - 1, ref_rejected)
        assert torch.equal(dpop_loss(*inputs, 0.1, 50.0), dpop_loss(*inputs, 0.1, 0.0))

    def test_lowering_both_is_punished_only_by_dpop(self) -> None:
        """The failure DPOP is for. Catches: a penalty that looks at the rejected answer."""
        # both 5 below the reference: DPO sees a difference of 0 and ln 2; DPOP sees 0.1 * (0 - 2 * 5) = -1
        inputs = (tensor([-15.0]), tensor([-15.0]), tensor([-10.0]), tensor([-10.0]))
        assert_matches(dpop_loss(*inputs, 0.1, 0.0), [math.log(2)])
        assert_matches(dpop_loss(*inputs, 0.1, 2.0), [math.log(1 + math.e)])

    def test_training_on_similar_pairs_lowers_chosen_with_dpo_and_not_with_dpop(self) -> None:
        """The failure as it happens. Catches: a penalty without gradient, or with the wrong sign."""
        assert train_on_similar_pairs(dpop_loss, 1.0, 0.0) < -1.0
        assert train_on_similar_pairs(dpop_loss, 1.0, 8.0) > -0.02

    def test_penalty_is_inside_beta(self) -> None:
        """Catches: beta * margin - lambda * penalty. Multiplying all log-ratios by c equals multiplying beta by c."""
        chosen, rejected, ref_chosen, ref_rejected = random_logps()
        scaled = (ref_chosen + 2 * (chosen - ref_chosen), ref_rejected + 2 * (rejected - ref_rejected))
        actual = dpop_loss(*scaled, ref_chosen, ref_rejected, 0.1, 7.0)
        assert_matches(actual, dpop_loss(chosen, rejected, ref_chosen, ref_rejected, 0.2, 7.0))

    def test_gradcheck(self) -> None:
        inputs = tuple(value.requires_grad_() for value in random_logps())
        assert torch.autograd.gradcheck(partial(dpop_loss, beta=0.3, dpop_lambda=5.0), inputs)

    @pytest.mark.parametrize("shift", [-1e4, 1e4])
    def test_extreme_margins_stay_finite_in_float32(self, shift: float) -> None:
        """Catches: log(sigmoid(x)) and log(1 + exp(-x)), which are inf with NaN gradients."""
        chosen = torch.tensor([shift], requires_grad=True)
        loss = dpop_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0, 50.0)
        (for_chosen,) = gradients(loss, [chosen])
        assert loss.isfinite().all() and for_chosen.isfinite().all()
        assert loss.item() == (0.0 if shift > 0 else 51e4)

    def test_a_broken_pair_stays_alone(self) -> None:
        """Catches: any mixing of rows."""
        logps = random_logps()
        clean = dpop_loss(*logps, 0.1, 5.0)
        logps[0][2] = torch.nan
        loss = dpop_loss(*logps, 0.1, 5.0)
        assert loss.isnan().tolist() == [False, False, True, False, False, False]
        assert_matches(loss[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])

    def test_no_pair(self) -> None:
        assert dpop_loss(*four([torch.zeros(0)] * 4), 0.1, 5.0).shape == (0,)

    def test_half_precision_is_computed_in_float32(self) -> None:
        """Catches: 0.1 * 3 rounded to bfloat16 (0.3008), which moves the loss by 3e-4."""
        logps = four(torch.tensor([value], dtype=torch.bfloat16) for value in (-12.0, -20.0, -10.0, -15.0))
        loss = dpop_loss(*logps, 0.1, 0.0)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.3)), abs=1e-6)

    @pytest.mark.parametrize("position", range(4))
    def test_shape_errors_name_the_argument(self, position: int) -> None:
        """Catches: (B, 1) against (B,), which would broadcast to (B, B) in silence."""
        logps = [torch.zeros(3) for _ in ARGUMENTS]
        logps[position] = torch.zeros(3, 1)
        with pytest.raises(ValueError, match=f"`{ARGUMENTS[position]}`"):
            dpop_loss(*four(logps), 0.1, 5.0)

    @pytest.mark.parametrize(
        ("beta", "dpop_lambda", "name"), [(0.0, 1.0, "beta"), (-0.1, 1.0, "beta"), (0.1, -1.0, "dpop_lambda")]
    )
    def test_bad_coefficients(self, beta: float, dpop_lambda: float, name: str) -> None:
        with pytest.raises(ValueError, match=f"`{name}`"):
            dpop_loss(*four([torch.zeros(3)] * 4), beta, dpop_lambda)


class TestSequenceLogps:
    # Two pairs: rows 0 and 1 chosen, 2 and 3 rejected. 99 is a prompt, 77 padding; row 3 has the longest prompt.
    # Lengths 4 and 2 in the first pair (rows 0 and 2), 1 and 3 in the second (rows 1 and 3).
    PER_TOKEN = (
        (99.0, -1.0, -2.0, -4.0, -8.0),
        (99.0, -3.0, 77.0, 77.0, 77.0),
        (99.0, -0.5, -0.25, 77.0, 77.0),
        (99.0, 99.0, -5.0, -6.0, -7.0),
    )
    MASK = ((0, 1, 1, 1, 1), (0, 1, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 1, 1, 1))

    @staticmethod
    def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
        """Four pairs: chosen longer, rejected longer, equal lengths, one token each; prompts in front, a gap."""
        mask = [
            [0, 1, 0, 1, 1, 1, 1],
            [0, 0, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1, 1, 0],
            [0, 0, 0, 0, 0, 0, 1],
        ]
        generator = torch.Generator().manual_seed(0)
        return -2 * torch.rand(8, 7, generator=generator, dtype=torch.float64), torch.tensor(mask)

    @staticmethod
    def by_loop(
        per_token: torch.Tensor, mask: torch.Tensor, ld_alpha: float | None
    ) -> tuple[list[float], list[list[float]]]:
        """Values and gradients, token by token: the n-th token of an answer weighs ld_alpha once n > shared length."""
        alpha = 1.0 if ld_alpha is None else ld_alpha
        num_pairs = len(per_token) // 2
        values, weights = [], []
        for row in range(2 * num_pairs):
            partner = row + num_pairs if row < num_pairs else row - num_pairs
            shared = min(int(mask[row].sum()), int(mask[partner].sum()))
            seen, value, row_weights = 0, 0.0, []
            for logp, real in zip(per_token[row].tolist(), mask[row].tolist(), strict=True):
                seen += real
                weight = 0.0 if not real else 1.0 if seen <= shared else alpha
                value += weight * logp
                row_weights.append(weight)
            values.append(value)
            weights.append(row_weights)
        return values, weights

    @pytest.mark.parametrize(
        ("ld_alpha", "expected", "tail"),
        [
            # row 0: -1 - 2 - 4 - 8 = -15; row 1: -3; row 2: -0.5 - 0.25 = -0.75; row 3: -5 - 6 - 7 = -18
            (None, [-15.0, -3.0, -0.75, -18.0], 1.0),
            # row 0 shares 2 tokens: -1 - 2 + 0.25 * (-4 - 8) = -6; row 3 shares 1: -5 + 0.25 * (-6 - 7) = -8.25
            (0.25, [-6.0, -3.0, -0.75, -8.25], 0.25),
            # the shared tokens alone: -1 - 2 = -3 and -5
            (0.0, [-3.0, -3.0, -0.75, -5.0], 0.0),
        ],
    )
    def test_hand_worked(self, ld_alpha: float | None, expected: list[float], tail: float) -> None:
        """Catches: the longer length (-15), >= (row 0: -4.5), lengths of the neighbouring row (row 2: -0.5625), the
        column instead of the place in the answer (row 3: -4.5), ld_alpha on the shared part."""
        per_token = tensor(self.PER_TOKEN).requires_grad_()
        logps = sequence_logps(per_token, torch.tensor(self.MASK), ld_alpha)
        assert_matches(logps, expected)
        (gradient,) = gradients(logps, [per_token])
        # the weight of each token: 1 in the shared part, ld_alpha behind it, 0 outside the answer
        expected_gradient = [
            [0.0, 1.0, 1.0, tail, tail],
            [0.0, 1.0, 0.0, 0.0, 0.0],
            [0.0, 1.0, 1.0, 0.0, 0.0],
            [0.0, 0.0, 1.0, tail, tail],
        ]
        assert_matches(gradient, expected_gradient)

    @pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.3, 1.0])
    def test_equals_a_loop_over_rows_and_tokens(self, ld_alpha: float | None) -> None:
        """What TRL computes. Catches: places counted in columns, over a gap or from the start of the prompt."""
        per_token, mask = self.random_batch()
        logps = sequence_logps(per_token.requires_grad_(), mask, ld_alpha)
        values, weights = self.by_loop(per_token.detach(), mask, ld_alpha)
        assert_matches(logps, values)
        (gradient,) = gradients(logps, [per_token])
        assert_matches(gradient, weights)

    @pytest.mark.parametrize("ld_alpha", [None, 1.0])
    def test_without_desensitization_it_is_the_masked_sum(self, ld_alpha: float | None) -> None:
        """Special case. Catches: 1 - ld_alpha as the weight, a mean over tokens."""
        per_token, mask = self.random_batch()
        assert_matches(sequence_logps(per_token, mask, ld_alpha), (per_token * mask).sum(-1))

    def test_default_is_the_plain_sum(self) -> None:
        per_token, mask = self.random_batch()
        assert torch.equal(sequence_logps(per_token, mask), sequence_logps(per_token, mask, None))

    def test_alpha_zero_ignores_the_tail(self) -> None:
        """Special case. Catches: a tail that still has a value or a gradient."""
        per_token, mask = tensor(self.PER_TOKEN), torch.tensor(self.MASK)
        changed = per_token.clone()
        changed[0, 3:], changed[3, 3:] = -1000.0, -1000.0
        assert torch.equal(sequence_logps(changed, mask, 0.0), sequence_logps(per_token, mask, 0.0))

    @pytest.mark.parametrize("ld_alpha", [0.0, 0.5])
    def test_equal_lengths_have_no_tail(self, ld_alpha: float) -> None:
        """Catches: >= for >, which takes the last token of both."""
        per_token = tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
        mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
        # -2 - 3 = -5 and -4 - 5 = -9, whatever ld_alpha
        assert_matches(sequence_logps(per_token, mask, ld_alpha), [-5.0, -9.0])

    def test_linear_in_alpha(self) -> None:
        """shared + alpha * tail. Catches: alpha squared, alpha ** distance."""
        per_token, mask = self.random_batch()
        at_zero, at_one = (sequence_logps(per_token, mask, ld_alpha) for ld_alpha in (0.0, 1.0))
        assert_matches(sequence_logps(per_token, mask, 0.3), 0.7 * at_zero + 0.3 * at_one)
        assert ((at_zero - at_one).abs() > 1e-3).tolist() == [True, False, False, False, False, True, False, False]

    def test_swapping_chosen_and_rejected_swaps_the_result(self) -> None:
        """Catches: a tail for the chosen answers only, or for the rejected ones only."""
        per_token, mask = self.random_batch()
        swapped = sequence_logps(per_token.roll(4, 0), mask.roll(4, 0), 0.3)
        assert torch.equal(swapped.roll(4, 0), sequence_logps(per_token, mask, 0.3))

    @pytest.mark.parametrize("junk", JUNK)
    @pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.5])
    def test_nothing_under_the_mask_reaches_value_or_gradient(self, ld_alpha: float | None, junk: float) -> None:
        """Catches: 0 * NaN, a product with the mask instead of a selection."""
        per_token, mask = self.random_batch()
        clean = per_token.requires_grad_()
        dirty = with_junk(per_token, mask, junk).requires_grad_()
        weights = torch.arange(1.0, 9.0, dtype=torch.float64)
        results = [sequence_logps(values, mask, ld_alpha) for values in (clean, dirty)]
        assert torch.equal(results[0], results[1])
        (expected,) = gradients(weights * results[0], [clean])
        (actual,) = gradients(weights * results[1], [dirty])
        assert actual.isfinite().all() and torch.equal(actual, expected)
        assert (actual[mask == 0] == 0).all()

    @pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.5])
    @pytest.mark.parametrize("junk", JUNK)
    def test_answer_without_a_token_is_0(self, ld_alpha: float | None, junk: float) -> None:
        """Catches: a division by the length; the whole partner is tail then."""
        per_token = tensor([[junk, junk, junk], [-1.0, -2.0, junk]]).requires_grad_()
        mask = torch.tensor([[0, 0, 0], [1, 1, 0]])
        logps = sequence_logps(per_token, mask, ld_alpha)
        alpha = 1.0 if ld_alpha is None else ld_alpha
        # shared length 0: the partner counts alpha * (-1 - 2)
        assert_matches(logps, [0.0, -3.0 * alpha])
        (gradient,) = gradients(logps, [per_token])
        assert gradient.tolist() == [[0.0, 0.0, 0.0], [alpha, alpha, 0.0]]

    @pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.5])
    def test_one_token_each(self, ld_alpha: float | None) -> None:
        """Catches: labels shifted once more, which would drop the only token."""
        per_token, mask = tensor([[-1.5], [-2.5]]), torch.ones(2, 1, dtype=torch.long)
        assert_matches(sequence_logps(per_token, mask, ld_alpha), [-1.5, -2.5])

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float32, torch.bfloat16])
    def test_any_dtype_of_mask(self, dtype: torch.dtype) -> None:
        """Catches: counting 300 tokens in bfloat16 (at most 256) or int8 (at most 127)."""
        per_token = torch.full((2, 400), -1.0, dtype=torch.float64)
        mask = torch.arange(400) < torch.tensor([[400], [300]])
        # 300 + 0.5 * 100
        assert sequence_logps(per_token, mask.to(dtype), 0.5).tolist() == [-350.0, -300.0]

    @pytest.mark.parametrize(("ld_alpha", "expected"), [(None, -1025.0), (0.5, -513.0)])
    def test_half_precision_is_computed_in_float32(self, ld_alpha: float | None, expected: float) -> None:
        """Catches: a sum in bfloat16, which has neither 1025 nor 1 + 0.5 * 1024 = 513 (they become 1024 and 512)."""
        mask = torch.arange(1025) < torch.tensor([[1025], [1]])
        for dtype in (torch.bfloat16, torch.float16):
            logps = sequence_logps(torch.full((2, 1025), -1.0, dtype=dtype), mask, ld_alpha)
            assert logps.dtype == torch.float32
            assert logps.tolist() == [expected, -1.0]

    def test_float64_stays_float64(self) -> None:
        assert sequence_logps(tensor(self.PER_TOKEN), torch.tensor(self.MASK), 0.5).dtype == torch.float64

    @pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.3, 1.0])
    def test_gradcheck(self, ld_alpha: float | None) -> None:
        per_token, mask = self.random_batch()
        assert torch.autograd.gradcheck(
            lambda values: sequence_logps(values, mask, ld_alpha), per_token.requires_grad_()
        )

    @pytest.mark.parametrize("ld_alpha", [None, 0.3])
    def test_a_broken_token_stays_in_its_row(self, ld_alpha: float | None) -> None:
        """Catches: any mixing of rows, NaN hidden by the mask."""
        per_token, mask = self.random_batch()
        clean = sequence_logps(per_token, mask, ld_alpha)
        per_token[2, 1] = torch.nan
        logps = sequence_logps(per_token, mask, ld_alpha)
        assert logps.isnan().tolist() == [row == 2 for row in range(8)]
        assert torch.equal(logps[3:], clean[3:]) and torch.equal(logps[:2], clean[:2])

    @pytest.mark.parametrize("ld_alpha", [None, 0.3])
    def test_inputs_are_not_changed(self, ld_alpha: float | None) -> None:
        """Catches: masking in place, which would break the other uses of the log-probabilities."""
        per_token, mask = self.random_batch()
        before = per_token.clone(), mask.clone()
        sequence_logps(per_token, mask, ld_alpha)
        assert torch.equal(per_token, before[0]) and torch.equal(mask, before[1])

    @pytest.mark.parametrize("ld_alpha", [None, 0.3])
    def test_no_pair_and_no_column(self, ld_alpha: float | None) -> None:
        assert sequence_logps(torch.zeros(0, 5), torch.zeros(0, 5), ld_alpha).shape == (0,)
        assert sequence_logps(torch.zeros(2, 0), torch.zeros(2, 0), ld_alpha).tolist() == [0.0, 0.0]

    def test_odd_rows_are_an_error_only_with_alpha(self) -> None:
        """Catches: chunk(2) of 3 rows, which pairs 2 with 1 and broadcasts in silence."""
        per_token, mask = -torch.ones(3, 2), torch.ones(3, 2)
        assert sequence_logps(per_token, mask).tolist() == [-2.0] * 3
        for ld_alpha in (0.0, 0.5, 1.0):
            with pytest.raises(ValueError, match="`per_token_logps` has 3 rows"):
                sequence_logps(per_token, mask, ld_alpha)

    @pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 3), (4, 2), (2, 3)])
    @pytest.mark.parametrize("ld_alpha", [None, 0.5])
    def test_shape_errors_name_the_argument(self, ld_alpha: float | None, shape: tuple[int, ...]) -> None:
        """Catches: a mask that broadcasts."""
        with pytest.raises(ValueError, match=r"`mask` has shape .*, expected \(4, 3\)"):
            sequence_logps(torch.zeros(4, 3), torch.ones(shape), ld_alpha)


class TestLogRatios:
    def test_hand_worked(self) -> None:
        """Catches: reference minus policy, the margins pi_c - pi_r and ref_c - ref_r (8 and 5), references swapped."""
        # chosen: -12 - (-10) = -2 and -3 - (-7) = 4; rejected: -20 - (-15) = -5 and -9 - (-9.5) = 0.5
        logps = four(
            tensor(values).requires_grad_() for values in ([-12.0, -3.0], [-20.0, -9.0], [-10.0, -7.0], [-15.0, -9.5])
        )
        chosen, rejected = log_ratios(*logps)
        assert_matches(chosen, [-2.0, 4.0])
        assert_matches(rejected, [-5.0, 0.5])
        # weights 3 and 5 tell the two apart: d (3 chosen + 5 rejected) = 3, 5, -3, -5
        for gradient, expected in zip(gradients(3 * chosen + 5 * rejected, logps), (3.0, 5.0, -3.0, -5.0), strict=True):
            assert_matches(gradient, [expected] * 2)

    def test_gradcheck(self) -> None:
        assert torch.autograd.gradcheck(log_ratios, four(value.requires_grad_() for value in random_logps()))

    def test_half_precision_is_subtracted_in_float32(self) -> None:
        """Catches: -300 + 0.5 in bfloat16, which stays -300; 16 bits on one side only."""
        policy, reference = torch.tensor([-300.0]), torch.tensor([-0.5])
        for policy_dtype in (torch.bfloat16, torch.float32):
            for reference_dtype in (torch.bfloat16, torch.float32):
                inputs = four([policy.to(policy_dtype)] * 2 + [reference.to(reference_dtype)] * 2)
                for ratio in log_ratios(*inputs):
                    assert ratio.dtype == torch.float32
                    assert ratio.tolist() == [-299.5]

    def test_no_pair(self) -> None:
        assert [ratio.shape for ratio in log_ratios(*four([torch.zeros(0)] * 4))] == [(0,), (0,)]

    @pytest.mark.parametrize("position", range(4))
    @pytest.mark.parametrize("shape", [(3, 1), (1,), (2,), ()])
    def test_shape_errors_name_the_argument(self, position: int, shape: tuple[int, ...]) -> None:
        """Catches: (B, 1) or (1,) against (B,), which would broadcast in silence."""
        logps = [torch.zeros(3) for _ in ARGUMENTS]
        logps[position] = torch.zeros(shape)
        with pytest.raises(ValueError, match=f"`{ARGUMENTS[position]}`"):
            log_ratios(*four(logps))

    @pytest.mark.parametrize("shape", [(3, 1), (3, 4), ()])
    def test_per_token_values_are_refused(self, shape: tuple[int, ...]) -> None:
        """Catches: four tensors of one wrong shape, per-token log-probabilities for instance."""
        with pytest.raises(ValueError, match="`chosen_logps` must have 1 dimension"):
            log_ratios(*four([torch.zeros(shape)] * 4))


class TestCalDPO:
    def test_hand_worked(self) -> None:
        """Catches: beta on the contrastive part, 1/beta or beta/2 as target, half the squares, targets swapped."""
        # beta 0.25: target 1 / (2 * 0.25) = 2
        # h_c = -12 - (-10) = -2, h_r = -20 - (-15) = -5, h_c - h_r = 3
        # loss log(1 + e^-3) + (-2 - 2)^2 + (-5 + 2)^2 = 0.0485873516 + 16 + 9 = 25.0485873516
        # gradient: sigmoid(-3) = 0.0474258732
        # d/d chosen = -0.0474258732 + 2 * (-4) = -8.0474258732; d/d rejected = 0.0474258732 + 2 * (-3) = -5.9525741268
        # the references have the opposite signs
        logps = four(tensor([value]).requires_grad_() for value in (-12.0, -20.0, -10.0, -15.0))
        loss = cal_dpo_loss(*logps, 0.25)
        assert_matches(loss, [25.04858735157374])
        for_chosen, for_rejected, for_ref_chosen, for_ref_rejected = gradients(loss, logps)
        assert_matches(for_chosen, [-8.047425873177566])
        assert_matches(for_rejected, [-5.952574126822434])
        assert_matches(for_ref_chosen, [8.047425873177566])
        assert_matches(for_ref_rejected, [5.952574126822434])

    @pytest.mark.parametrize(("beta", "expected"), [(0.1, 50.0), (0.5, 2.0), (2.0, 0.125)])
    def test_step_zero(self, beta: float, expected: float) -> None:
        """log 2 + 1/(2 beta^2). Catches: 1/beta as target (four times as much), beta / 2 (0.005 for beta 0.1)."""
        # beta 0.1: 2 * 5^2 = 50; beta 0.5: 2 * 1^2 = 2; beta 2: 2 * 0.25^2 = 0.125
        chosen, rejected = (tensor([-12.0, -3.0]).requires_grad_() for _ in range(2))
        loss = cal_dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta)
        assert_matches(loss, [math.log(2) + expected] * 2)
        # chosen is raised by 1/2 + 2 / (2 beta), rejected lowered by as much
        for_chosen, for_rejected = gradients(loss, [chosen, rejected])
        assert_matches(for_chosen, [-0.5 - 1 / beta] * 2)
        assert_matches(for_rejected, [0.5 + 1 / beta] * 2)

    @pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
    def test_at_the_targets_only_the_contrastive_part_is_left(self, beta: float) -> None:
        """Special case. Catches: another target, which leaves a gradient of the squares; beta in the sigmoid."""
        target = 1 / (2 * beta)
        logps = one_pair(target, -target)
        loss = cal_dpo_loss(*logps, beta)
        # h_c - h_r = 1/beta: log(1 + e^(-1/beta)), 4.54e-5 for beta 0.1, and its slope alone
        assert_matches(loss, [math.log1p(math.exp(-1 / beta))])
        for actual, expected in zip(gradients(loss, logps), gradients(plain_dpo(*logps, beta=1.0), logps), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-12)

    @pytest.mark.parametrize(("offset", "slope"), [(1.0, 2.0), (-1.0, -2.0), (3.0, 6.0)])
    def test_squares_pull_to_the_targets_from_both_sides(self, offset: float, slope: float) -> None:
        """Catches: a hinge, |h|, a factor 2 missing, the same target for both."""
        # one `offset` beside the targets +5 and -5 the squares are offset^2 each, with the slope 2 * offset
        logps = one_pair(5.0 + offset, -5.0 + offset)
        loss, contrastive = cal_dpo_loss(*logps, 0.1), plain_dpo(*logps, beta=1.0)
        assert_matches(loss - contrastive, [2 * offset**2])
        for_chosen, for_rejected = gradients(loss - contrastive, logps[:2])
        assert_matches(for_chosen, [slope])
        assert_matches(for_rejected, [slope])

    def test_contrastive_part_has_no_beta(self) -> None:
        """Loss minus squares is DPO with beta 1, whatever beta. Catches: beta in the sigmoid, swapped answers."""
        logps = random_logps()
        chosen, rejected = logps[0] - logps[2], logps[1] - logps[3]
        for beta in (0.05, 0.5, 5.0):
            squares = (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
            assert_matches(cal_dpo_loss(*logps, beta) - squares, plain_dpo(*logps, beta=1.0))

    def test_mirrored_pair_costs_the_same(self) -> None:
        """f(h_c, h_r) = f(-h_r, -h_c). Catches: two targets of different size, a weight on one square."""
        assert_matches(cal_dpo_loss(*one_pair(1.5, -4.0), 0.1), cal_dpo_loss(*one_pair(4.0, -1.5), 0.1))

    def test_lowering_both_costs_although_dpo_does_not_see_it(self) -> None:
        """The failure Cal-DPO is for. Catches: one square over the difference of the log-ratios."""
        # a common shift s of both: (s - 5)^2 + (s + 5)^2 = 2 s^2 + 50; log 2 stays, s = -3: 68
        loss = cal_dpo_loss(*one_pair(-3.0, -3.0), 0.1)
        assert_matches(plain_dpo(*one_pair(-3.0, -3.0), beta=1.0), [math.log(2)])
        assert_matches(loss, [math.log(2) + 68])

    def test_training_on_similar_pairs_stops_near_the_reference(self) -> None:
        """The failure as it happens. Catches: a square with the wrong sign, targets swapped."""
        assert train_on_similar_pairs(plain_dpo, 1.0) < -1.0
        assert train_on_similar_pairs(cal_dpo_loss, 1.0) > -0.2

    def test_free_log_ratios_end_beside_the_targets(self) -> None:
        """Catches: any sign error in a gradient."""
        # by symmetry h_c = -h_r = m, where -sigmoid(-2 m) + 2 (m - 2) = 0; beta 0.25: m = 2 + 0.01767 / 2 = 2.0088
        reference = tensor([0.0])
        ratios = tensor([-6.0, -6.0]).requires_grad_()
        for _ in range(200):
            loss = cal_dpo_loss(ratios[:1], ratios[1:], reference, reference, 0.25)
            (gradient,) = gradients(loss, [ratios])
            ratios = (ratios - 0.2 * gradient).detach().requires_grad_()
        m = ratios[0].item()
        assert_matches(ratios, [m, -m])
        assert 2 * (m - 2) == pytest.approx(1 / (1 + math.exp(2 * m)), abs=1e-6)
        assert m == pytest.approx(2.0088, abs=1e-4)

    @pytest.mark.parametrize(
        ("chosen", "rejected", "value", "gradient"),
        [
            # target 5. log(1 + e^-1e4) = 0; (1e4 - 5)^2 + 5^2; slopes 2 * 9995 and 2 * 5
            (1e4, 0.0, 9995.0**2 + 25, (19990.0, 10.0)),
            # log(1 + e^1e4) = 1e4; (-1e4 - 5)^2 + 5^2; slopes -1 - 2 * 10005 and 1 + 2 * 5
            (-1e4, 0.0, 1e4 + 10005.0**2 + 25, (-20011.0, 11.0)),
            # log(1 + e^1e4) = 1e4; 5^2 + (1e4 + 5)^2; slopes -1 - 2 * 5 and 1 + 2 * 10005
            (0.0, 1e4, 1e4 + 25 + 10005.0**2, (-11.0, 20011.0)),
            # log(1 + e^-2e4) = 0; both 9995 beside the target
            (1e4, -1e4, 2 * 9995.0**2, (19990.0, -19990.0)),
            # log(1 + e^2e4) = 2e4; both 10005 beside the target
            (-1e4, 1e4, 2e4 + 2 * 10005.0**2, (-20011.0, 20011.0)),
        ],
    )
    def test_extreme_log_ratios_stay_finite_in_float32(
        self, chosen: float, rejected: float, value: float, gradient: tuple[float, float]
    ) -> None:
        """Catches: log(sigmoid(x)) and log(1 + exp(-x)), which are inf with NaN gradients."""
        logps = one_pair(chosen, rejected, torch.float32)
        loss = cal_dpo_loss(*logps, 0.1)
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert [slope.item() for slope in gradients(loss, logps[:2])] == pytest.approx(gradient, rel=1e-6)


class TestDPOShift:
    def test_hand_worked(self) -> None:
        """Catches: lambda on chosen (logit 1.75), on the whole margin (1.125) or outside beta (2.75), 1/lambda."""
        # h_c = -12 - (-10) = -2, h_r = -20 - (-15) = -5; logit 0.5 * (-2 - 0.75 * (-5)) = 0.5 * 1.75 = 0.875
        # loss log(1 + e^-0.875) = 0.3484445811
        # gradient: sigmoid(-0.875) = 0.2942149722; d/d chosen = -0.2942149722 * 0.5 = -0.1471074861,
        # d/d rejected = 0.2942149722 * 0.5 * 0.75 = 0.1103306146; the references have the opposite signs
        logps = four(tensor([value]).requires_grad_() for value in (-12.0, -20.0, -10.0, -15.0))
        loss = dpo_shift_loss(*logps, 0.5, 0.75)
        assert_matches(loss, [0.3484445810050557])
        for_chosen, for_rejected, for_ref_chosen, for_ref_rejected = gradients(loss, logps)
        assert_matches(for_chosen, [-0.14710748608109438])
        assert_matches(for_rejected, [0.11033061456082078])
        assert_matches(for_ref_chosen, [0.14710748608109438])
        assert_matches(for_ref_rejected, [-0.11033061456082078])

    def test_lambda_one_is_plain_dpo_and_dpop_without_penalty(self) -> None:
        """Special case, value and gradient. Catches: 1 - lambda, answers or policy and reference swapped."""
        logps = four(value.requires_grad_() for value in random_logps())
        losses = (dpo_shift_loss(*logps, 0.3, 1.0), dpop_loss(*logps, 0.3, 0.0), plain_dpo(*logps, beta=0.3))
        actual, *others = ([loss.detach(), *gradients(loss, logps)] for loss in losses)
        for other in others:
            for value, expected in zip(actual, other, strict=True):
                assert_matches(value, expected)

    @pytest.mark.parametrize("shift_lambda", [0.05, 0.55, 0.99])
    def test_equals_dpo_with_the_rejected_log_ratio_scaled(self, shift_lambda: float) -> None:
        """Catches: lambda on the policy alone (lambda * pi_r - ref_r), lambda squared."""
        chosen, rejected, ref_chosen, ref_rejected = logps = random_logps()
        scaled = (chosen, ref_rejected + shift_lambda * (rejected - ref_rejected), ref_chosen, ref_rejected)
        assert_matches(dpo_shift_loss(*logps, 0.3, shift_lambda), plain_dpo(*scaled, beta=0.3))

    def test_beta_scales_both_log_ratios(self) -> None:
        """Catches: beta on one of the two. Multiplying all log-ratios by c equals multiplying beta by c."""
        chosen, rejected, ref_chosen, ref_rejected = random_logps()
        scaled = (ref_chosen + 2 * (chosen - ref_chosen), ref_rejected + 2 * (rejected - ref_rejected))
        actual = dpo_shift_loss(*scaled, ref_chosen, ref_rejected, 0.1, 0.7)
        assert_matches(actual, dpo_shift_loss(chosen, rejected, ref_chosen, ref_rejected, 0.2, 0.7))

    @pytest.mark.parametrize("shift_lambda", [0.1, 0.55, 1.0])
    def test_step_zero_is_ln_2_with_less_pressure_on_rejected(self, shift_lambda: float) -> None:
        """Catches: lambda on the chosen answer, a constant shift of the margin (not ln 2)."""
        chosen = tensor([-12.0, -3.0]).requires_grad_()
        rejected = tensor([-20.0, -9.0]).requires_grad_()
        loss = dpo_shift_loss(chosen, rejected, chosen.detach(), rejected.detach(), 0.1, shift_lambda)
        assert_matches(loss, [math.log(2)] * 2)
        # d/dx of -log sigmoid at 0 is -1/2: -0.5 * 0.1 and +0.5 * 0.1 * lambda
        for_chosen, for_rejected = gradients(loss, [chosen, rejected])
        assert_matches(for_chosen, [-0.05, -0.05])
        assert_matches(for_rejected, [0.05 * shift_lambda] * 2)

    def test_training_on_similar_pairs_lowers_chosen_only_with_a_large_lambda(self) -> None:
        """The failure as it happens. Catches: lambda on the chosen answer, which would make it worse."""
        # slope of the margin at t = 0: d chosen - lambda * d rejected = 1/4 - lambda * 5/4, positive below 0.2
        assert train_on_similar_pairs(dpo_shift_loss, 1.0, 1.0) < -1.0
        assert train_on_similar_pairs(dpo_shift_loss, 1.0, 0.1) > 0.0

    @pytest.mark.parametrize(
        ("chosen", "rejected", "value", "gradient"),
        [
            # beta 1, lambda 0.5. Logit 1e4: loss 0, slope 0
            (1e4, 0.0, 0.0, (0.0, 0.0)),
            # logit -1e4: loss 1e4, slopes -1 and +0.5
            (-1e4, 0.0, 1e4, (-1.0, 0.5)),
            # logit -0.5 * 1e4
            (0.0, 1e4, 5e3, (-1.0, 0.5)),
            # logit +0.5 * 1e4
            (0.0, -1e4, 0.0, (0.0, 0.0)),
            # logit -1e4 - 0.5e4
            (-1e4, 1e4, 1.5e4, (-1.0, 0.5)),
        ],
    )
    def test_extreme_log_ratios_stay_finite_in_float32(
        self, chosen: float, rejected: float, value: float, gradient: tuple[float, float]
    ) -> None:
        """Catches: log(sigmoid(x)) and log(1 + exp(-x)), which are inf with NaN gradients."""
        logps = one_pair(chosen, rejected, torch.float32)
        loss = dpo_shift_loss(*logps, 1.0, 0.5)
        assert loss.item() == value
        assert tuple(slope.item() for slope in gradients(loss, logps[:2])) == gradient

    @pytest.mark.parametrize("shift_lambda", [0.0, -0.5, 1.0001, 2.0, math.nan, math.inf])
    def test_bad_lambda_is_named_with_its_value(self, shift_lambda: float) -> None:
        """Catches: 0, which would drop the rejected answer; above 1 (more pressure than DPO); NaN in silence."""
        with pytest.raises(ValueError, match=rf"`dpo_shift_lambda` must be in \(0, 1\], got {shift_lambda}\."):
            dpo_shift_loss(*four([torch.zeros(3)] * 4), 0.1, shift_lambda)

    def test_bounds_of_lambda(self) -> None:
        """Catches: < 1, which would refuse plain DPO."""
        for shift_lambda in (1e-6, 1, 1.0):
            assert dpo_shift_loss(*four([torch.zeros(3)] * 4), 0.1, shift_lambda).isfinite().all()


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(partial(cal_dpo_loss, beta=0.5), id="cal_dpo"),
        pytest.param(partial(dpo_shift_loss, beta=0.5, dpo_shift_lambda=0.75), id="dpo_shift"),
    ],
)
class TestPairLosses:
    """What Cal-DPO and DPO-Shift have in common."""

    def test_gradcheck(self, loss: PairLoss) -> None:
        inputs = four(value.requires_grad_() for value in random_logps())
        assert torch.autograd.gradcheck(loss, inputs)

    def test_a_broken_pair_stays_alone(self, loss: PairLoss) -> None:
        """Catches: any mixing of rows, a mean inside the loss."""
        logps = random_logps()
        clean = loss(*logps)
        logps[0][2] = torch.nan
        broken = loss(*logps)
        assert broken.isnan().tolist() == [False, False, True, False, False, False]
        assert torch.equal(broken[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])

    @pytest.mark.parametrize("size", [0, 1, 5])
    def test_one_value_per_pair(self, loss: PairLoss, size: int) -> None:
        assert loss(*random_logps(size)).shape == (size,)

    def test_half_precision_is_computed_in_float32(self, loss: PairLoss) -> None:
        """Catches: -300 + 0.5 in bfloat16, which stays -300, and losses with 8 bits."""
        logps = four(tensor([value], torch.bfloat16) for value in (-300.0, -302.0, -0.5, -0.75))
        actual = loss(*logps)
        assert actual.dtype == torch.float32
        assert actual.item() == pytest.approx(loss(*(value.double() for value in logps)).item(), rel=1e-6)

    def test_float64_stays_float64(self, loss: PairLoss) -> None:
        assert loss(*random_logps()).dtype == torch.float64

    @pytest.mark.parametrize("junk", JUNK)
    @pytest.mark.parametrize("ld_alpha", [None, 0.5])
    def test_padding_does_not_reach_the_gradient_of_the_tokens(
        self, loss: PairLoss, ld_alpha: float | None, junk: float
    ) -> None:
        """From the tokens to the loss. Catches: 0 * NaN on the way back."""
        per_token = tensor([[junk, -1.0, -2.0, -4.0], [-3.0, junk, junk, junk], [-1.0, -1.0, junk, junk], [junk] * 4])
        mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
        per_token = per_token.requires_grad_()
        pair = sequence_logps(per_token, mask, ld_alpha).chunk(2)
        value = loss(*pair, *torch.zeros(2, 2, dtype=torch.float64))
        # ld_alpha 0.5: -1 - 2 + 0.5 * (-4) = -5 and 0.5 * (-3) = -1.5 (its partner is empty); else -7 and -3
        chosen = tensor([-7.0, -3.0] if ld_alpha is None else [-5.0, -1.5]).requires_grad_()
        rejected = tensor([-2.0, 0.0]).requires_grad_()
        expected = loss(chosen, rejected, *torch.zeros(2, 2, dtype=torch.float64))
        assert_matches(value, expected)
        (gradient,) = gradients(value, [per_token])
        assert gradient.isfinite().all() and (gradient[mask == 0] == 0).all()
        (for_a, for_b), (for_c, _) = gradients(expected, [chosen, rejected])
        tail = 1.0 if ld_alpha is None else 0.5
        assert_matches(gradient[0, 1:], torch.stack([for_a, for_a, tail * for_a]))
        assert_matches(gradient[1, 0], tail * for_b)
        assert_matches(gradient[2, :2], torch.stack([for_c, for_c]))

    @pytest.mark.parametrize("position", range(4))
    @pytest.mark.parametrize("shape", [(3, 1), (1,)])
    def test_shape_errors_name_the_argument(self, loss: PairLoss, position: int, shape: tuple[int, ...]) -> None:
        """Catches: (B, 1) against (B,), which would broadcast to (B, B) in silence."""
        logps = [torch.zeros(3) for _ in ARGUMENTS]
        logps[position] = torch.zeros(shape)
        with pytest.raises(ValueError, match=f"`{ARGUMENTS[position]}`"):
            loss(*logps)

    @pytest.mark.parametrize("beta", [0.0, -0.1, math.nan, -math.inf])
    def test_bad_beta_is_named_with_its_value(self, loss: PairLoss, beta: float) -> None:
        """Catches: a division by 0, a negative beta that trains backwards, NaN in silence."""
        with pytest.raises(ValueError, match=rf"`beta` must be greater than 0, got {beta}\."):
            loss(*[torch.zeros(3)] * 4, beta=beta)


class TestProjectUpdate:
    @pytest.mark.parametrize("case", vector_cases("preference", "projection"))
    def test_vectors(self, case: Case) -> None:
        """Catches: the sign (removing the harmless part), a two-sided projection, |c| instead of c . c."""
        projected = project_update(tensor(case["update_gradient"]), tensor(case["chosen_gradient"]))
        assert_matches(projected, case["expected"], case)

    def test_hand_worked(self) -> None:
        """Catches: division by the norm instead of its square, g - 2/2.236 c = (0.106, -1.289)."""
        # g = (1, 0.5), c = (1, 2): g . c = 1 + 1 = 2, c . c = 5, g - 2/5 c = (0.6, -0.3), and 0.6 - 0.6 = 0
        projected = project_update(tensor([1.0, 0.5]), tensor([1.0, 2.0]))
        assert_matches(projected, [0.6, -0.3])
        # -g has the dot product -2: harmless, unchanged
        assert_matches(project_update(tensor([-1.0, -0.5]), tensor([1.0, 2.0])), [-1.0, -0.5])

    def test_a_step_along_the_result_never_lowers_the_chosen_log_probability(self) -> None:
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

    def test_harmful_part_is_gone_and_the_rest_is_kept(self) -> None:
        torch.manual_seed(1)
        gradient, chosen = torch.randn(2, 100, dtype=torch.float64)
        gradient = gradient if gradient @ chosen > 0 else -gradient
        projected = project_update(gradient, chosen)
        assert_matches(projected @ chosen, 0.0)
        removed = gradient - projected
        assert_matches(removed * chosen.norm(), chosen * removed.norm())
        assert_matches(project_update(projected, chosen), projected)

    def test_harmless_gradient_is_unchanged_bit_for_bit(self) -> None:
        torch.manual_seed(2)
        gradient, chosen = torch.randn(2, 100)
        chosen = -chosen if gradient @ chosen > 0 else chosen
        assert torch.equal(project_update(gradient, chosen), gradient)

    def test_zero_chosen_gradient_changes_nothing(self) -> None:
        """Catches: 0 / 0."""
        gradient = torch.tensor([1.0, -2.0])
        assert torch.equal(project_update(gradient, torch.zeros(2)), gradient)

    @pytest.mark.parametrize("scale", [1e-30, 1e-22, 1.0, 1e22, 1e30])
    def test_only_the_direction_of_the_chosen_gradient_matters(self, scale: float) -> None:
        """Catches: c . c in float32, which underflows to 0 or overflows to inf."""
        projected = project_update(torch.tensor([1.0, 0.5]), scale * torch.tensor([1.0, 2.0]))
        assert projected.tolist() == pytest.approx([0.6, -0.3], abs=1e-6)

    def test_a_broken_chosen_gradient_is_not_hidden(self) -> None:
        """Catches: a comparison with NaN that silently returns the unprojected gradient."""
        for broken in (torch.nan, torch.inf):
            assert project_update(torch.ones(2), torch.tensor([1.0, broken])).isnan().any()

    def test_shape_is_kept_and_the_dot_product_is_over_all_entries(self) -> None:
        """Catches: a projection per row."""
        torch.manual_seed(3)
        gradient, chosen = torch.randn(2, 3, 4, dtype=torch.float64)
        projected = project_update(gradient, chosen)
        assert projected.shape == (3, 4)
        assert_matches(projected.flatten(), project_update(gradient.flatten(), chosen.flatten()))
        assert project_update(torch.zeros(0), torch.zeros(0)).shape == (0,)

    def test_gradcheck(self) -> None:
        inputs = (tensor([1.0, 0.5, -0.2]).requires_grad_(), tensor([1.0, 2.0, 0.3]).requires_grad_())
        assert torch.autograd.gradcheck(project_update, inputs)

    def test_half_precision_is_computed_in_float32(self) -> None:
        """Catches: the dot product of 4096 ones summed in bfloat16."""
        ones = torch.ones(4096, dtype=torch.bfloat16)
        projected = project_update(ones, ones)
        assert projected.dtype == torch.float32
        assert projected.abs().max() < 1e-6

    def test_errors_name_the_argument(self) -> None:
        with pytest.raises(ValueError, match="`chosen_gradient`"):
            project_update(torch.zeros(3), torch.zeros(3, 1))

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.formulas.vectors import JUNK, Case, assert_matches, tensor, vector_cases, with_junk
from trl_ext.formulas.kl import KLController, kl_per_token, policy_kl, return_to_go
from trl_ext.formulas.reduce import sequence_sums

ESTIMATORS = ("k1", "k2", "k3")


def masked_mean(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (per_token * mask).sum() / mask.sum()


class TestEstimators:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("case", vector_cases("kl", "per_token"))
    def test_vectors(self, case: Case, estimator: str) -> None:
        """Catches: u with the wrong sign, k2 without the half, k3 of -u (which estimates the other divergence)."""
        actual = kl_per_token(tensor(case["logps"]), tensor(case["ref_logps"]), estimator)
        assert_matches(actual, case["expected"][estimator])
        assert_matches(masked_mean(actual, tensor(case["mask"])), case["masked_mean"][estimator])

    def test_hand_worked_value_and_gradient(self) -> None:
        """Catches: every sign and scale of the value and, separately, of the gradient."""
        # pi = 1/2, ref = 1/4: u = ln 2 = 0.693147
        # k1 = 0.693147, d/du = 1;  k2 = 0.693147^2 / 2 = 0.240227, d/du = u = 0.693147
        # k3 = e^-u - 1 + u = 0.5 - 1 + 0.693147 = 0.193147, d/du = 1 - e^-u = 0.5
        ln2 = math.log(2)
        expected = {"k1": (ln2, 1.0), "k2": (ln2**2 / 2, ln2), "k3": (ln2 - 0.5, 0.5)}
        for estimator, (value, slope) in expected.items():
            logps, ref_logps = (tensor([[math.log(p)]]).requires_grad_() for p in (0.5, 0.25))
            kl = kl_per_token(logps, ref_logps, estimator)
            assert_matches(kl, [[value]])
            kl.sum().backward()
            assert_matches(logps.grad, [[slope]])
            assert_matches(ref_logps.grad, [[-slope]])

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_gradcheck(self, estimator: str) -> None:
        torch.manual_seed(0)
        inputs = tuple((-torch.rand(2, 3, dtype=torch.float64)).requires_grad_() for _ in range(2))
        assert torch.autograd.gradcheck(lambda a, b: kl_per_token(a, b, estimator, 0.9), inputs)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_equal_policies_give_exactly_zero_value(self, estimator: str) -> None:
        """Step 0 of a run. Catches: any offset. The gradient of k2 and k3 is 0 there, that of k1 is 1."""
        logps = -torch.rand(2, 3)
        current = logps.clone().requires_grad_()
        kl = kl_per_token(current, logps, estimator)
        assert torch.equal(kl, torch.zeros(2, 3))
        kl.sum().backward()
        assert torch.equal(current.grad, torch.full((2, 3), 1.0 if estimator == "k1" else 0.0))

    def test_signs(self) -> None:
        """k1 is negative where the policy is below the reference; k2 and k3 never are. Catches: |u| and k3 - 2u."""
        logps = torch.linspace(-3, 3, 31, dtype=torch.float64).unsqueeze(0) - 5
        reference = torch.full_like(logps, -5)
        assert_matches(kl_per_token(logps, reference, "k1"), logps + 5)
        for estimator in ("k2", "k3"):
            kl = kl_per_token(logps, reference, estimator)
            assert (kl >= 0).all()
            assert (kl > 0).sum() == 30

    def test_k3_is_never_negative_in_float32(self) -> None:
        """Catches: exp(-u) - 1, which loses all digits of a small u and gives values down to -6e-8."""
        log_ratio = torch.linspace(-1e-3, 1e-3, 2001)
        assert (kl_per_token(log_ratio, torch.zeros_like(log_ratio), "k3") >= 0).all()

    def test_half_precision_is_computed_in_float32(self) -> None:
        """Catches: the difference or the square rounded to bfloat16 (1.5^2 / 2 + ... with 3 digits)."""
        logps = torch.tensor([[-1.0, -7.09375]], dtype=torch.bfloat16, requires_grad=True)
        ref_logps = torch.tensor([[-2.00390625, -7.0]], dtype=torch.bfloat16)
        for estimator in ESTIMATORS:
            kl = kl_per_token(logps, ref_logps, estimator)
            assert kl.dtype == torch.float32
            expected = kl_per_token(logps.detach().double(), ref_logps.double(), estimator)
            assert_matches(kl.double(), expected)
        assert kl_per_token(logps.double(), ref_logps, "k1").dtype == torch.float64

    def test_unknown_estimator(self) -> None:
        with pytest.raises(ValueError, match="Unknown KL estimator 'k4'"):
            kl_per_token(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # type: ignore[arg-type]

    def test_shape_error_names_the_arguments(self) -> None:
        """Catches: (B, 1) against (B, T), which would broadcast in silence."""
        with pytest.raises(ValueError, match=r"`logps`.*`ref_logps`"):
            kl_per_token(torch.zeros(2, 3), torch.zeros(2, 1), "k1")


class TestOverflow:
    @pytest.mark.parametrize("case", vector_cases("kl", "overflow"))
    def test_vectors_in_float32(self, case: Case) -> None:
        """Catches: clamping the value after exp (inf becomes the limit, its gradient 0 * inf = NaN)."""
        for estimator, expected in case["expected"].items():
            logps = torch.tensor(case["logps"], requires_grad=True)
            kl = kl_per_token(logps, torch.tensor(case["ref_logps"]), estimator, case["max_log_ratio"])
            torch.testing.assert_close(kl, torch.tensor(expected), rtol=1e-6, atol=0)
            kl.sum().backward()
            assert logps.grad is not None and logps.grad.isfinite().all()

    def test_clamped_tokens_get_no_gradient_and_the_others_keep_theirs(self) -> None:
        """Catches: one bound only (u > 0 would pass), and a clamp of the whole batch by its maximum."""
        # u = -12, -1, 1, 12 with the limit 10: gradient 1 - e^-u = 1 - e, 1 - 1/e inside, 0 outside
        logps = tensor([[-12.0, -1.0, 1.0, 12.0]]).requires_grad_()
        kl = kl_per_token(logps, torch.zeros_like(logps), "k3", 10.0)
        # e^10 - 1 - 10 = 22015.4658; e - 2 = 0.718282; 1/e = 0.367879; e^-10 - 1 + 10 = 9.0000454
        assert_matches(kl, [[math.exp(10) - 11, math.e - 2, math.exp(-1), math.exp(-10) + 9]])
        kl.sum().backward()
        assert_matches(logps.grad, [[0.0, 1 - math.e, 1 - math.exp(-1), 0.0]])

    def test_none_and_a_wide_limit_change_no_bit(self) -> None:
        """Catches: a default limit, or a rewritten formula on one of the two paths."""
        torch.manual_seed(0)
        logps, ref_logps = -30 * torch.rand(2, 4, 8)
        results = []
        for arguments in ((), (None,), (50.0,)):
            current = logps.clone().requires_grad_()
            kl = kl_per_token(current, ref_logps, "k3", *arguments)
            kl.sum().backward()
            results.append((kl.detach(), current.grad))
        for kl, gradient in results[1:]:
            assert torch.equal(kl, results[0][0])
            assert torch.equal(gradient, results[0][1])
        assert results[0][0].max() > math.exp(15)

    @pytest.mark.parametrize("estimator", ["k1", "k2"])
    def test_limit_is_ignored_without_an_exponential(self, estimator: str) -> None:
        """Catches: honest signal of k1 and k2 cut away."""
        logps, ref_logps = tensor([[-100.0, -1.0]]), tensor([[-1.0, -100.0]])
        unlimited = kl_per_token(logps, ref_logps, estimator)
        assert torch.equal(kl_per_token(logps, ref_logps, estimator, 10.0), unlimited)


class TestGradientOnPolicy:
    """The table of what each estimator means as a loss, by exact expectation over all actions of a softmax."""

    @staticmethod
    def expected_gradient(
        case: Case,
        term: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        sampling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gradient of sum_a q(a) * term(logps, ref_logps, log q) with the sampling distribution q held fixed."""
        theta = tensor(case["theta"]).requires_grad_()
        logps = theta.log_softmax(0)
        ref_logps = tensor(case["ref_theta"]).log_softmax(0)
        old_logps = logps.detach() if sampling is None else sampling.log_softmax(0)
        (old_logps.exp() * term(logps, ref_logps, old_logps)).sum().backward()
        assert theta.grad is not None
        return theta.grad

    @pytest.mark.parametrize("case", vector_cases("kl", "gradient_on_policy"))
    def test_expected_values(self, case: Case) -> None:
        """k1 and k3 are unbiased, k2 is not. Catches: an estimator of KL(reference || policy)."""
        logps, ref_logps = (tensor(case[name]).log_softmax(0) for name in ("theta", "ref_theta"))
        for estimator, expected in case["expected_value"].items():
            assert_matches((logps.exp() * kl_per_token(logps, ref_logps, estimator)).sum(), expected)
        assert case["expected_value"]["k1"] == pytest.approx(case["reverse_kl"], abs=1e-12)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("case", vector_cases("kl", "gradient_on_policy"))
    def test_as_a_loss(self, case: Case, estimator: str) -> None:
        """k1: 0, k2: reverse KL, k3: forward KL. Catches: k2 and k3 exchanged, k1 with a hidden ratio."""
        gradient = self.expected_gradient(case, lambda logps, ref, _: kl_per_token(logps, ref, estimator))
        assert_matches(gradient, case["loss_grad"][estimator])
        true = {"k1": [0.0] * 6, "k2": case["true_reverse_kl_grad"], "k3": case["true_forward_kl_grad"]}
        assert_matches(gradient, true[estimator])

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("case", vector_cases("kl", "gradient_on_policy"))
    def test_as_a_loss_with_the_ratio(self, case: Case, estimator: str) -> None:
        """ratio * k1 and ratio * k3: reverse KL; ratio * k2: that of E[k2]. Catches: a detached estimator."""
        gradient = self.expected_gradient(
            case, lambda logps, ref, old: torch.exp(logps - old) * kl_per_token(logps, ref, estimator)
        )
        assert_matches(gradient, case["loss_grad_with_ratio"][estimator])
        if estimator == "k2":
            assert (gradient - tensor(case["true_reverse_kl_grad"])).abs().max() > 0.1
        else:
            assert_matches(gradient, case["true_reverse_kl_grad"])

    @pytest.mark.parametrize("case", vector_cases("kl", "gradient_on_policy"))
    def test_off_policy(self, case: Case) -> None:
        """stopgrad(ratio) * k2, ratio * k1 and ratio * k3 stay right off-policy, k2 alone does not."""
        sampling = tensor(case["theta"]) + tensor([0.3, -0.5, 0.2, 0.4, -0.9, 0.1])

        def gradient(estimator: str, weight: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            return self.expected_gradient(
                case, lambda logps, ref, old: weight(logps - old) * kl_per_token(logps, ref, estimator), sampling
            )

        assert_matches(gradient("k2", lambda u: u.exp().detach()), case["true_reverse_kl_grad"])
        assert_matches(gradient("k1", torch.exp), case["true_reverse_kl_grad"])
        assert_matches(gradient("k3", torch.exp), case["true_reverse_kl_grad"])
        assert (gradient("k2", torch.ones_like) - tensor(case["true_reverse_kl_grad"])).abs().max() > 0.05

    @pytest.mark.parametrize("case", vector_cases("kl", "gradient_on_policy"))
    def test_autograd_confirms_the_true_gradients(self, case: Case) -> None:
        """The reference values of this class, from the definition of the divergence."""
        theta = tensor(case["theta"]).requires_grad_()
        logps, ref_logps = theta.log_softmax(0), tensor(case["ref_theta"]).log_softmax(0)
        reverse = (logps.exp() * (logps - ref_logps)).sum()
        forward = (ref_logps.exp() * (ref_logps - logps)).sum()
        assert_matches(reverse, case["reverse_kl"])
        assert_matches(forward, case["forward_kl"])
        assert_matches(torch.autograd.grad(reverse, theta, retain_graph=True)[0], case["true_reverse_kl_grad"])
        assert_matches(torch.autograd.grad(forward, theta)[0], case["true_forward_kl_grad"])


class TestReturnToGo:
    def test_hand_worked_value_and_gradient(self) -> None:
        """Catches: the sum from the start, the sum without the own token, a sum over padding."""
        # row 1: 1 + 2 + 4 = 7, 2 + 4 = 6, 4; row 2 (one token): 5, padding 0; row 3 skips the tool token: 1 + 4 = 5
        per_token = tensor([[1.0, 2.0, 4.0], [5.0, 9.0, 9.0], [1.0, 9.0, 4.0]]).requires_grad_()
        mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1]])
        result = return_to_go(per_token, mask)
        assert_matches(result, [[7.0, 6.0, 4.0], [5.0, 0.0, 0.0], [5.0, 0.0, 4.0]])
        # x_s is in the sums of all real t <= s: gradient = number of real tokens up to s
        result.sum().backward()
        assert_matches(per_token.grad, [[1.0, 2.0, 3.0], [1.0, 0.0, 0.0], [1.0, 0.0, 2.0]])

    @pytest.mark.parametrize("junk", JUNK)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, junk: float) -> None:
        """Catches: x * mask (0 * NaN)."""
        torch.manual_seed(0)
        clean = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
        dirty = with_junk(clean, mask, junk).requires_grad_()
        for per_token in (clean, dirty):
            return_to_go(per_token, mask).square().sum().backward()
        assert torch.equal(return_to_go(clean, mask), return_to_go(dirty, mask))
        assert torch.equal(clean.grad, dirty.grad)

    def test_one_token_is_itself(self) -> None:
        assert_matches(return_to_go(tensor([[3.0]]), torch.tensor([[1]])), [[3.0]])

    def test_shape_error(self) -> None:
        with pytest.raises(ValueError, match=r"`per_token`.*`mask`"):
            return_to_go(torch.zeros(2, 3), torch.ones(2, 1))

    @staticmethod
    def two_token_policy(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the first token (V,) and of the second one given the first (V, V); action 0 ends the sequence."""
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(4, generator=generator, dtype=torch.float64)
        return first, torch.randn(4, 4, generator=generator, dtype=torch.float64)

    @staticmethod
    def all_sequences(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (S, 2) of every sequence and their mask; [EOS] is padded by NaN."""
        first_logps, second_logps = first.log_softmax(0), second.log_softmax(1)
        rows = [torch.stack([first_logps[0], torch.full((), torch.nan, dtype=torch.float64)])]
        rows += [torch.stack([first_logps[a], second_logps[a, b]]) for a in range(1, 4) for b in range(4)]
        mask = torch.ones(len(rows), 2)
        mask[0, 1] = 0
        return torch.stack(rows), mask

    def surrogate_gradient(self, credit: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """Exact expectation of the policy gradient whose cost per token is `credit(k1, mask)`, held fixed."""
        parameters = [logits.requires_grad_() for logits in self.two_token_policy(0)]
        logps, mask = self.all_sequences(*parameters)
        ref_logps, _ = self.all_sequences(*self.two_token_policy(1))
        cost = credit(kl_per_token(logps, ref_logps, "k1").detach(), mask)
        probabilities = sequence_sums(logps, mask).detach().exp()
        assert_matches(probabilities.sum(), 1.0)
        loss = (probabilities * sequence_sums(cost * logps, mask)).sum()
        return list(torch.autograd.grad(loss, parameters))

    def true_gradient(self) -> list[torch.Tensor]:
        parameters = [logits.requires_grad_() for logits in self.two_token_policy(0)]
        logps, mask = self.all_sequences(*parameters)
        ref_logps, _ = self.all_sequences(*self.two_token_policy(1))
        total, ref_total = sequence_sums(logps, mask), sequence_sums(ref_logps, mask)
        return list(torch.autograd.grad((total.exp() * (total - ref_total)).sum(), parameters))

    def test_k1_in_the_reward_gives_the_gradient_of_the_sequence_level_reverse_kl(self) -> None:
        """Over all sequences of up to two tokens. Catches: the KL so far instead of the KL to go."""
        for actual, expected in zip(self.surrogate_gradient(return_to_go), self.true_gradient(), strict=True):
            assert_matches(actual, expected)

    def test_k1_of_the_own_token_only_would_be_biased(self) -> None:
        """Why the sum to go: the first token also decides which states come after it."""
        first, second = self.surrogate_gradient(lambda kl, mask: kl.nan_to_num(nan=0.0))
        true_first, true_second = self.true_gradient()
        assert (first - true_first).abs().max() > 0.01
        assert_matches(second, true_second)


class TestMask:
    """The mask acts before exp and square, so that nothing under it reaches a value or a gradient."""

    MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
    # -100 is what a tool token may get: e^99 overflows float32.
    JUNK = (*JUNK, -100.0)
    FUNCTIONS: ClassVar = {name: functools.partial(kl_per_token, estimator=name) for name in ESTIMATORS} | {
        "policy_kl": policy_kl
    }

    def value_and_gradient(self, name: str, junk_logps: float, junk_ref_logps: float) -> tuple[torch.Tensor, Any]:
        """(B, T) and the gradient of the sum over real tokens, with the junk under mask 0."""
        logps = with_junk(torch.full((2, 3), -1.5), self.MASK, junk_logps).requires_grad_()
        ref_logps = with_junk(torch.full((2, 3), -1.0), self.MASK, junk_ref_logps)
        per_token = self.FUNCTIONS[name](logps, ref_logps, mask=self.MASK)
        sequence_sums(per_token, self.MASK).sum().backward()
        return per_token.detach(), logps.grad

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, name: str) -> None:
        """Catches: masking after exp (0 * inf): the NaN gradient of one tool token makes every parameter NaN."""
        clean, gradient = self.value_and_gradient(name, -1.5, -1.0)
        assert torch.equal(clean == 0, self.MASK == 0)
        assert torch.equal(gradient == 0, self.MASK == 0)
        for junk in self.JUNK:
            for arguments in ((junk, -1.0), (-1.5, junk), (junk, junk)):
                value, dirty_gradient = self.value_and_gradient(name, *arguments)
                assert torch.equal(value, clean)
                assert torch.equal(dirty_gradient, gradient)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_real_tokens_keep_every_bit(self, name: str, dtype: torch.dtype) -> None:
        """Catches: a mask that scales, or one that is inverted."""
        torch.manual_seed(0)
        logps, ref_logps = -5 * torch.rand(2, 2, 3)
        unmasked = self.FUNCTIONS[name](logps, ref_logps)
        masked = self.FUNCTIONS[name](logps, ref_logps, mask=self.MASK.to(dtype))
        assert torch.equal(masked, torch.where(self.MASK.bool(), unmasked, torch.zeros(2, 3)))

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_shape_error_names_the_mask(self, name: str) -> None:
        with pytest.raises(ValueError, match="`mask`"):
            self.FUNCTIONS[name](torch.zeros(2, 3), torch.zeros(2, 3), mask=torch.ones(2, 1))


class TestPolicyKL:
    @pytest.mark.parametrize("case", vector_cases("kl", "policy_kl"))
    def test_vectors(self, case: Case) -> None:
        """Catches: the k3 of the other direction, exp(-d) - 1 + d."""
        actual = policy_kl(tensor(case["logps"]), tensor(case["old_logps"]))
        assert_matches(actual, case["expected"])
        assert_matches(masked_mean(actual, tensor(case["mask"])), case["masked_mean"])

    def test_hand_worked_value_and_gradient(self) -> None:
        """Catches: d with the wrong sign (gradient +0.5), a missing -1."""
        # new 1/4, old 1/2: d = -ln 2; e^d - 1 - d = 0.5 - 1 + 0.693147 = 0.193147; d/d logps = e^d - 1 = -0.5
        logps, old_logps = (tensor([[math.log(p)]]).requires_grad_() for p in (0.25, 0.5))
        kl = policy_kl(logps, old_logps)
        assert_matches(kl, [[math.log(2) - 0.5]])
        kl.sum().backward()
        assert_matches(logps.grad, [[-0.5]])
        assert_matches(old_logps.grad, [[0.5]])

    def test_estimates_the_divergence_from_old_to_new_and_its_gradient(self) -> None:
        """By enumeration over samples of the old policy. Catches: KL(new || old)."""
        generator = torch.Generator().manual_seed(3)
        theta, old_theta = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        theta.requires_grad_()
        logps, old_logps = theta.log_softmax(0), old_theta.log_softmax(0)
        estimate = (old_logps.exp() * policy_kl(logps, old_logps)).sum()
        divergence = (old_logps.exp() * (old_logps - logps)).sum()
        assert_matches(estimate, divergence.detach())
        actual, expected = (torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in (estimate, divergence))
        assert_matches(actual, expected)

    def test_is_the_k3_estimator_seen_from_the_old_policy(self) -> None:
        torch.manual_seed(0)
        logps, old_logps = -torch.rand(2, 3, 4, dtype=torch.float64)
        assert_matches(policy_kl(logps, old_logps), kl_per_token(old_logps, logps, "k3"))

    def test_exactly_zero_before_the_first_update(self) -> None:
        """Value and gradient. Catches: a penalty that moves the policy on its first step."""
        logps = (-torch.rand(2, 3)).requires_grad_()
        kl = policy_kl(logps, logps.detach())
        kl.sum().backward()
        assert torch.equal(kl, torch.zeros(2, 3))
        assert torch.equal(logps.grad, torch.zeros(2, 3))

    def test_is_never_negative_in_float32(self) -> None:
        """Catches: exp(d) - 1 by subtraction, which gives down to -6e-8."""
        difference = torch.linspace(-1e-3, 1e-3, 2001)
        assert (policy_kl(difference, torch.zeros_like(difference)) >= 0).all()

    def test_half_precision_is_computed_in_float32(self) -> None:
        logps = torch.tensor([[-2.015625]], dtype=torch.bfloat16)
        old_logps = torch.tensor([[-1.0078125]], dtype=torch.bfloat16)
        kl = policy_kl(logps, old_logps)
        assert kl.dtype == torch.float32
        assert_matches(kl.double(), policy_kl(logps.double(), old_logps.double()))

    def test_shape_error_names_the_arguments(self) -> None:
        with pytest.raises(ValueError, match=r"`logps`.*`old_logps`"):
            policy_kl(torch.zeros(2, 3), torch.zeros(3))


def proportional(beta: float = 0.1, **arguments: Any) -> KLController:
    settings: dict[str, Any] = {"target": 0.05, "horizon": 64, "rule": "proportional"}
    return KLController(beta, **(settings | arguments))


class TestController:
    @pytest.mark.parametrize("case", vector_cases("kl", "controller_"))
    def test_vectors(self, case: Case) -> None:
        """Catches: 1 + x for exp(x), no clip of the error, bounds of 1.5 taken as 2, n or horizon forgotten."""
        given = {key: case[key] for key in ("beta", "target", "horizon", "beta_min", "beta_max") if key in case}
        controller = KLController(**given, rule=case["name"].removeprefix("controller_"))
        for step in case["steps"]:
            updated = controller.update(step["kl"], step.get("n", 1))
            assert updated == pytest.approx(step["beta"], abs=1e-12)
            assert controller.beta == updated

    def test_proportional_hand_worked(self) -> None:
        """Catches: target / kl, a clip of the product, a linear step."""
        # kl = 0.055 is 10% above the target: 0.1 * exp(0.1 * 32 / 64) = 0.1 * e^0.05 = 0.10512711
        assert proportional().update(0.055, 32) == pytest.approx(0.1 * math.exp(0.05), abs=1e-12)
        # 4 times the target: clipped to 20%: 0.1 * exp(0.2 * 32 / 64) = 0.1 * e^0.1
        assert proportional().update(0.2, 32) == pytest.approx(0.1 * math.exp(0.1), abs=1e-12)
        # a negative k1 mean: -20%
        assert proportional().update(-3.0, 32) == pytest.approx(0.1 * math.exp(-0.1), abs=1e-12)

    def test_two_updates_are_one_of_twice_the_size(self) -> None:
        """What the exponential form is for: the result does not depend on how the sequences are batched."""
        twice, once = proportional(), proportional()
        twice.update(0.053, 16)
        assert twice.update(0.053, 16) == pytest.approx(once.update(0.053, 32), rel=1e-12)

    def test_doubling_boundaries(self) -> None:
        """kl = 1.5 target and kl = target / 1.5 do not move it. Catches: >= and <=, swapped directions."""
        for kl, factor in ((1.5, 1), (1.5000001, 2), (1 / 1.5, 1), (0.6666, 0.5), (1.0, 1)):
            controller = KLController(0.2, target=1.0, rule="doubling")
            assert controller.update(kl, 1000) == pytest.approx(0.2 * factor, abs=1e-12)

    def test_fixed_never_moves_not_even_on_nan(self) -> None:
        controller = KLController(0.0)
        for kl in (0.0, 100.0, math.nan, math.inf):
            assert controller.update(kl, 10**6) == 0.0

    @pytest.mark.parametrize("rule", ["proportional", "doubling"])
    def test_never_leaves_its_bounds(self, rule: str) -> None:
        """Catches: no clip, a clip of one side, a linear step that changes the sign."""
        for kl, bound in ((100.0, 0.4), (-100.0, 0.02)):
            controller = KLController(0.1, 0.05, 8.0, 0.02, 0.4, rule)  # type: ignore[arg-type]
            values = [controller.update(kl, 64) for _ in range(20)]
            assert values[-1] == bound
            assert all(0.02 <= value <= 0.4 for value in values)

    @pytest.mark.parametrize(("kl", "bound"), [(0.0, 1e-4), (1.0, 1.0)])
    def test_a_huge_step_ends_at_the_bound(self, kl: float, bound: float) -> None:
        """4096 sequences against a horizon of 1. Catches: exp(819), an OverflowError in the middle of a run."""
        assert proportional(horizon=1.0).update(kl, 4096) == bound

    @pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("rule", ["proportional", "doubling"])
    def test_a_broken_measurement_is_an_error_and_leaves_beta(self, rule: str, kl: float) -> None:
        """Catches: NaN that fails every comparison and silently keeps or clips beta."""
        controller = KLController(0.1, target=0.05, rule=rule)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="KL controller got kl="):
            controller.update(kl, 8)
        assert controller.beta == 0.1

    @pytest.mark.parametrize("rule", ["proportional", "doubling"])
    def test_resume_continues_the_same_path(self, rule: str) -> None:
        """Catches: a coefficient that restarts from the config (verl#2653)."""
        path = [0.2, 0.3, 0.01, 0.06, 0.2]
        straight = KLController(0.1, 0.05, 64.0, rule=rule)  # type: ignore[arg-type]
        first = KLController(0.1, 0.05, 64.0, rule=rule)  # type: ignore[arg-type]
        expected = [straight.update(kl, 32) for kl in path]
        for kl in path[:3]:
            first.update(kl, 32)
        resumed = KLController(0.1, 0.05, 64.0, rule=rule)  # type: ignore[arg-type]
        resumed.load_state_dict(first.state_dict())
        assert resumed.beta == first.beta != 0.1
        assert [resumed.update(kl, 32) for kl in path[3:]] == expected[3:]

    def test_loaded_state_is_clipped_to_the_bounds_of_this_run(self) -> None:
        for loaded, kept in ((0.9, 0.5), (1e-9, 0.01), (0.3, 0.3)):
            controller = proportional(beta_min=0.01, beta_max=0.5)
            controller.load_state_dict({"beta": loaded})
            assert controller.beta == kept

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"rule": "pid"}, "Unknown rule"),
            ({"target": 0.0}, "`target`"),
            ({"target": -0.1}, "`target`"),
            ({"target": math.nan}, "`target`"),
            ({"horizon": 0}, "`horizon`"),
            ({"beta_min": 0.0}, "beta_min"),
            ({"beta_min": 2.0, "beta_max": 1.0}, "beta_min"),
            ({"beta": 2.0}, "outside"),
            ({"beta": 0.0}, "outside"),
            ({"beta": math.nan}, "outside"),
        ],
    )
    def test_bad_arguments(self, arguments: dict[str, Any], message: str) -> None:
        """Catches: beta = 0 with an adaptive rule, which could never grow (a knob that does nothing)."""
        with pytest.raises(ValueError, match=message):
            proportional(**arguments)

    def test_fixed_accepts_any_beta(self) -> None:
        assert KLController(5.0).beta == 5.0

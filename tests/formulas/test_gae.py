import pytest
import torch

from tests.formulas.vectors import JUNK, assert_matches, tensor, vector_cases, with_junk
from trl_ext.formulas.gae import gae, masked_whiten, token_rewards

MASKS = {
    "full": [1, 1, 1, 1, 1],
    "right-padded": [1, 1, 1, 0, 0],
    "left-padded": [0, 0, 1, 1, 1],
    "hole": [1, 0, 0, 1, 1],
    "hole-and-padding": [1, 0, 1, 1, 0],
    "one-token": [0, 0, 1, 0, 0],
    "empty": [0, 0, 0, 0, 0],
}


def random_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rewards, values (B, T) and one row per kind of mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(list(MASKS.values()))
    rewards, values = (torch.randn(mask.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, mask


class TestTokenRewards:
    @pytest.mark.parametrize("case", vector_cases("ppo", "token_rewards"))
    def test_vectors(self, case):
        """Catches: the KL added, beta on the score, the score on every token or on the last column."""
        rewards = token_rewards(tensor(case["kl"]), tensor(case["scores"]), tensor(case["mask"]), case["beta"])
        assert_matches(rewards, case["expected"], case)

    def test_hand_worked_score_is_on_the_last_real_token_not_on_padding(self):
        """Catches: the score on the first PAD (index 3), or on EOS only of answers that have padding."""
        # [a, b, EOS, PAD, PAD]: -0.1 * kl on 3 tokens, and 2 on index 2 only: -0.1 * 3 + 2 = 1.7
        # a full-length answer: on the last index, -0.1 * 5 + 4 = 3.5
        kl = tensor([[1.0, 2.0, 3.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        expected = [[-0.1, -0.2, 1.7, 0.0, 0.0], [-0.1, -0.2, -0.3, -0.4, 3.5]]
        assert_matches(token_rewards(kl, tensor([2.0, 4.0]), mask, 0.1), expected)

    @pytest.mark.parametrize("mask_row", MASKS.values(), ids=MASKS.keys())
    def test_score_is_paid_exactly_once_whatever_the_mask(self, mask_row):
        """Catches: mask.sum() - 1 as the index of the last token (wrong with left padding and with holes)."""
        rewards = token_rewards(torch.zeros(1, 5), torch.ones(1), torch.tensor([mask_row]), 0.5)[0]
        real = [index for index, is_real in enumerate(mask_row) if is_real]
        assert rewards.nonzero().flatten().tolist() == real[-1:]

    @pytest.mark.parametrize("junk", JUNK)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, junk):
        """Catches: kl * mask (0 * NaN is NaN) and a row without real tokens that still gets its score."""
        kl, _, mask = random_batch()
        scores = torch.arange(len(mask), dtype=torch.float64)
        clean = token_rewards(kl * mask, scores, mask, 0.3)
        kl = with_junk(kl, mask, junk).requires_grad_()
        scores = with_junk(scores, mask.any(1), junk).requires_grad_()
        rewards = token_rewards(kl, scores, mask, 0.3)
        assert_matches(rewards, clean)
        rewards.sum().backward()
        assert_matches(kl.grad, -0.3 * mask.double())
        assert_matches(scores.grad, mask.any(1).double())

    def test_gradcheck(self):
        kl, _, mask = random_batch()
        scores = torch.randn(len(mask), dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda k, s: token_rewards(k, s, mask, 0.3), (kl.requires_grad_(), scores))

    def test_beta_zero_is_the_score_alone(self):
        kl, _, mask = random_batch()
        rewards = token_rewards(kl, torch.ones(len(mask), dtype=torch.float64), mask, 0.0)
        assert_matches(rewards.sum(1), mask.any(1).double())

    def test_half_precision_is_computed_in_float32(self):
        """Catches: -0.1 * 1 + 100 rounded to bfloat16, which is 100: the KL would vanish beside a large score."""
        rewards = token_rewards(torch.ones(1, 1).bfloat16(), torch.tensor([100.0]).bfloat16(), torch.ones(1, 1), 0.1)
        assert rewards.dtype == torch.float32
        assert rewards.item() == pytest.approx(99.9)

    def test_errors_name_the_argument(self):
        kl, scores, mask = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3)
        with pytest.raises(ValueError, match="`mask`"):
            token_rewards(kl, scores, mask[:, :2], 0.1)
        with pytest.raises(ValueError, match="`scores`"):
            token_rewards(kl, scores[:1], mask, 0.1)
        with pytest.raises(ValueError, match="`scores`"):
            token_rewards(kl, scores.unsqueeze(1), mask, 0.1)
        with pytest.raises(ValueError, match="`kl`"):
            token_rewards(kl[0], scores, mask[0], 0.1)
        with pytest.raises(ValueError, match="`beta`"):
            token_rewards(kl, scores, mask, -0.1)


class TestGAE:
    @pytest.mark.parametrize("case", vector_cases("ppo", "gae"))
    def test_vectors(self, case):
        """Catches: gamma or lam left out or swapped, V shifted, padding leaking, holes discounted through."""
        last_values = tensor(case["last_values"]) if "last_values" in case else None
        advantages, returns = gae(
            tensor(case["rewards"]),
            tensor(case["values"]),
            tensor(case["mask"]),
            case["gamma"],
            case["lam"],
            last_values,
        )
        assert_matches(advantages, case["expected_advantages"], case)
        assert_matches(returns, case["expected_returns"], case)

    def test_hand_worked_padded_critic_value_does_not_leak(self):
        """Catches: V_{t+1} = 100 read from padding, which gives [95.95, 101]."""
        # delta_1 = 1 + 1 * 0 - 0 = 1 (after the last real token the value is 0); A_1 = 1
        # delta_0 = 0 + 1 * 0 - 0 = 0; A_0 = 0 + 1 * 0.95 * 1 = 0.95
        advantages, returns = gae(tensor([[0, 1, 0]]), tensor([[0, 0, 100]]), tensor([[1, 1, 0]]), 1.0, 0.95)
        assert_matches(advantages, [[0.95, 1.0, 0.0]])
        assert_matches(returns, [[0.95, 1.0, 0.0]])

    def test_hand_worked_value_is_of_the_state_before_the_token(self):
        """Catches: V read one position late (A_1 would be 1 - 0 = 1), and returns without V."""
        # values V_0 = 1, V_1 = 2; rewards 0, 1; gamma = lam = 0.5
        # A_1 = delta_1 = 1 + 0.5 * 0 - 2 = -1
        # delta_0 = 0 + 0.5 * 2 - 1 = 0;  A_0 = 0 + 0.5 * 0.5 * (-1) = -0.25
        # returns = A + V = 0.75, 1
        advantages, returns = gae(tensor([[0.0, 1.0]]), tensor([[1.0, 2.0]]), torch.ones(1, 2), 0.5, 0.5)
        assert_matches(advantages, [[-0.25, -1.0]])
        assert_matches(returns, [[0.75, 1.0]])

    def test_hand_worked_gradient(self):
        """Catches: detached pieces, and gamma * lam applied to the wrong neighbour."""
        # A_0 = delta_0 + c delta_1 + c^2 delta_2 with c = gamma lam = 0.9 * 0.5 = 0.45
        # dA_0/dr = (1, 0.45, 0.2025)
        # dA_0/dV = (-1, gamma - c, c gamma - c^2) = (-1, 0.45, 0.405 - 0.2025)
        rewards = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        values = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        advantages, _ = gae(rewards, values, torch.ones(1, 3), 0.9, 0.5)
        advantages[0, 0].backward()
        assert_matches(rewards.grad, [[1.0, 0.45, 0.2025]])
        assert_matches(values.grad, [[-1.0, 0.45, 0.2025]])

    @pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
    @pytest.mark.parametrize("bootstrap", [False, True])
    def test_masked_tokens_are_skipped_as_if_they_were_not_there(self, lam, bootstrap):
        """Catches: discounting through holes, bootstrapping from their values, an end of the answer at a hole."""
        rewards, values, mask = random_batch()
        last_values = torch.arange(1.0, len(mask) + 1, dtype=torch.float64) if bootstrap else None
        advantages, returns = gae(rewards, values, mask, 0.9, lam, last_values)
        for row, real in enumerate(mask.bool()):
            last_value = last_values[row : row + 1] if bootstrap else None
            short = (rewards[row, real].unsqueeze(0), values[row, real].unsqueeze(0))
            alone = gae(*short, torch.ones_like(short[0]), 0.9, lam, last_value)
            assert_matches(advantages[row, real], alone[0][0])
            assert_matches(returns[row, real], alone[1][0])
            assert (advantages[row, ~real] == 0).all() and (returns[row, ~real] == 0).all()

    @pytest.mark.parametrize("junk", JUNK)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, junk):
        """Catches: multiplying by the mask instead of choosing, in any of the three inputs."""

        def run(rewards, values, last_values):
            inputs = [value.detach().clone().requires_grad_() for value in (rewards, values, last_values)]
            advantages, returns = gae(inputs[0], inputs[1], mask, 0.9, 0.7, inputs[2])
            (advantages.square().sum() + returns.sum()).backward()
            return advantages, returns, *(value.grad for value in inputs)

        rewards, values, mask = random_batch()
        last_values = torch.ones(len(mask), dtype=torch.float64)
        clean = run(with_junk(rewards, mask, 0.0), with_junk(values, mask, 0.0), last_values)
        dirty = run(
            with_junk(rewards, mask, junk), with_junk(values, mask, junk), with_junk(last_values, mask.any(1), junk)
        )
        for actual, expected in zip(dirty, clean, strict=True):
            assert_matches(actual, expected)
        for grad in dirty[2:4]:
            assert (grad[mask == 0] == 0).all()

    def test_lam_one_is_reward_to_go_minus_value(self):
        """Schulman et al., eq. 18. Catches: gamma missing in the trace (the sum would be undiscounted)."""
        rewards, values, mask = random_batch(1)
        advantages, returns = gae(rewards, values, mask, 0.9, 1.0)
        for row in range(len(mask)):
            to_go = torch.zeros((), dtype=torch.float64)
            for t in reversed(range(mask.shape[1])):
                if mask[row, t]:
                    to_go = rewards[row, t] + 0.9 * to_go
                    assert_matches(returns[row, t], to_go)
                    assert_matches(advantages[row, t], to_go - values[row, t])

    def test_lam_zero_is_the_one_step_error(self):
        """Schulman et al., eq. 17. Catches: a trace that does not vanish with lam."""
        rewards, values, _ = random_batch(2)
        advantages, _ = gae(rewards, values, torch.ones_like(rewards), 0.9, 0.0)
        next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        assert_matches(advantages, rewards + 0.9 * next_values - values)

    def test_exact_critic_gives_zero_advantage(self):
        """Catches: any error in delta. With V = discounted reward-to-go nothing is better than expected."""
        rewards, values, mask = random_batch(3)
        _, reward_to_go = gae(rewards, torch.zeros_like(values), mask, 0.9, 1.0)
        advantages, _ = gae(rewards, reward_to_go, mask, 0.9, 0.6)
        assert_matches(advantages, torch.zeros_like(advantages))

    def test_last_values_of_zero_mean_an_ended_answer(self):
        """Catches: None treated as the last critic value, and last_values not discounted."""
        rewards, values, mask = random_batch(4)
        plain = gae(rewards, values, mask, 0.9, 0.5)
        zero = gae(rewards, values, mask, 0.9, 0.5, torch.zeros(len(mask)))
        assert_matches(zero[0], plain[0])
        # One token: A = r + gamma * V_last - V = 1 + 0.9 * 10 - 2 = 8
        advantages, _ = gae(tensor([[1.0]]), tensor([[2.0]]), torch.ones(1, 1), 0.9, 0.5, tensor([10.0]))
        assert_matches(advantages, [[8.0]])

    def test_gradcheck(self):
        rewards, values, mask = random_batch(5)
        last_values = torch.randn(len(mask), dtype=torch.float64)
        inputs = tuple(value.requires_grad_() for value in (rewards, values, last_values))
        assert torch.autograd.gradcheck(lambda r, v, last: gae(r, v, mask, 0.9, 0.7, last), inputs)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
    def test_mask_dtype_does_not_matter(self, dtype):
        rewards, values, mask = random_batch()
        assert_matches(gae(rewards, values, mask.to(dtype), 0.9, 0.5)[0], gae(rewards, values, mask, 0.9, 0.5)[0])

    def test_no_token_and_no_row(self):
        for shape in ((2, 0), (0, 3)):
            empty = torch.zeros(shape)
            advantages, returns = gae(empty, empty, empty, 1.0, 0.95)
            assert advantages.shape == returns.shape == shape

    def test_half_precision_is_computed_in_float32(self):
        """Catches: 256 + 1 - 0 accumulated in bfloat16, which stays 256."""
        rewards = torch.tensor([[1.0, 256.0]], dtype=torch.bfloat16)
        advantages, returns = gae(rewards, torch.zeros_like(rewards), torch.ones(1, 2), 1.0, 1.0)
        assert advantages.dtype == returns.dtype == torch.float32
        assert advantages.tolist() == [[257.0, 256.0]]

    def test_errors_name_the_argument(self):
        rewards, mask = torch.zeros(2, 3), torch.ones(2, 3)
        with pytest.raises(ValueError, match="`values`"):
            gae(rewards, rewards[:, :2], mask, 1.0, 1.0)
        with pytest.raises(ValueError, match="`mask`"):
            gae(rewards, rewards, mask[:1], 1.0, 1.0)
        with pytest.raises(ValueError, match="`rewards`"):
            gae(rewards[0], rewards[0], mask[0], 1.0, 1.0)
        with pytest.raises(ValueError, match="`last_values`"):
            gae(rewards, rewards, mask, 1.0, 1.0, torch.zeros(2, 1))
        with pytest.raises(ValueError, match="`gamma`"):
            gae(rewards, rewards, mask, 1.1, 1.0)
        with pytest.raises(ValueError, match="`lam`"):
            gae(rewards, rewards, mask, 1.0, float("nan"))


class TestMaskedWhiten:
    @pytest.mark.parametrize("case", vector_cases("ppo", "whiten"))
    def test_vectors(self, case):
        """Catches: statistics over padding, ddof 1, padding left at -mean/std."""
        assert_matches(masked_whiten(tensor(case["values"]), tensor(case["mask"])), case["expected"], case)

    def test_hand_worked(self):
        """Catches: ddof 1 (std would be 2.83), division by the variance, padding in the mean (it would be 1.33)."""
        # real 1 and 5: mean 3, deviations -2 and 2, variance (4 + 4)/2 = 4, std 2: -1 and 1
        assert_matches(masked_whiten(tensor([[1.0, 5.0, -2.0]]), torch.tensor([[1, 1, 0]])), [[-1.0, 1.0, 0.0]])

    def test_real_entries_get_mean_0_and_std_1_over_the_whole_batch(self):
        """Catches: whitening per row."""
        values, _, mask = random_batch()
        real = masked_whiten(values * 7 + 3, mask)[mask.bool()]
        assert_matches(real.mean(), 0.0)
        assert_matches(real.var(correction=0), 1.0)

    def test_shards_with_global_statistics_equal_the_whole(self):
        """Catches: local statistics used although global ones are given, and a shard of one entry set to 0."""
        values, mask = tensor([[1.0, 2.0, 9.0], [4.0, -3.0, 7.0]]), torch.tensor([[1, 1, 1], [0, 1, 0]])
        real = values[mask.bool()]
        mean, var = real.mean(), real.var(correction=0)
        shards = [masked_whiten(values[row : row + 1], mask[row : row + 1], mean, var) for row in range(2)]
        assert_matches(torch.cat(shards), masked_whiten(values, mask))
        assert_matches(masked_whiten(values, mask, mean.item(), var.item()), masked_whiten(values, mask))

    @pytest.mark.parametrize("junk", JUNK)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, junk):
        """Catches: values * mask in the mean or in the result."""

        def run(junk):
            dirty = with_junk(values, mask, junk).requires_grad_()
            whitened = masked_whiten(dirty, mask)
            (whitened * torch.arange(whitened.numel()).view_as(whitened)).sum().backward()
            return whitened, dirty.grad

        values, _, mask = random_batch()
        for actual, expected in zip(run(junk), run(0.0), strict=True):
            assert_matches(actual, expected)
            assert (actual[mask == 0] == 0).all()

    def test_gradcheck(self):
        values, _, mask = random_batch()
        assert torch.autograd.gradcheck(lambda v: masked_whiten(v, mask), values.requires_grad_())

    @pytest.mark.parametrize("mask_row", [[0, 0, 0], [0, 1, 0]])
    def test_fewer_than_two_real_entries_give_zero_and_a_finite_gradient(self, mask_row):
        values = torch.tensor([[3.0, 5.0, 7.0]], requires_grad=True)
        whitened = masked_whiten(values, torch.tensor([mask_row]))
        assert (whitened == 0).all()
        whitened.sum().backward()
        assert (values.grad == 0).all()

    @pytest.mark.parametrize("constant", [0.7, -1e-3, 12345.678, 0.0])
    @pytest.mark.parametrize("size", [2, 7, 1000, 4097])
    def test_constant_values_carry_no_signal(self, constant, size):
        """Catches: (v - mean) / (0 + 1e-8), which turns rounding noise of 6e-8 into advantages of the order of 1."""
        values = torch.full((size,), constant, requires_grad=True)
        whitened = masked_whiten(values, torch.ones(size))
        assert (whitened == 0).all()
        whitened.sum().backward()
        assert values.grad.isfinite().all()

    def test_small_but_real_differences_are_whitened(self):
        """Catches: a tie rule with an absolute tolerance."""
        values = torch.tensor([1e-7, -1e-7, 3e-7, -3e-7])
        # std = sqrt((1 + 1 + 9 + 9) / 4) * 1e-7 = sqrt(5) * 1e-7; 1e-7 / (2.23607e-7 + 1e-8) = 0.42807
        assert masked_whiten(values, torch.ones(4)).tolist() == pytest.approx(
            [0.42807, -0.42807, 1.28422, -1.28422], 1e-4
        )

    def test_half_precision_is_computed_in_float32(self):
        whitened = masked_whiten(torch.tensor([1000.0, 1004.0]).bfloat16(), torch.ones(2))
        assert whitened.dtype == torch.float32
        assert whitened.tolist() == pytest.approx([-1.0, 1.0])

    def test_errors_name_the_argument(self):
        values = torch.zeros(2, 3)
        with pytest.raises(ValueError, match="`mask`"):
            masked_whiten(values, torch.ones(3))
        with pytest.raises(ValueError, match="`mean` and `var`"):
            masked_whiten(values, torch.ones(2, 3), mean=0.0)
        with pytest.raises(ValueError, match="`mean` and `var`"):
            masked_whiten(values, torch.ones(2, 3), var=1.0)

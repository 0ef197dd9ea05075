from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.formulas.vectors import Case, assert_matches, tensor, vector_cases
from trl_ext.formulas.advantages import (
    gdpo_advantages,
    gdpo_terms,
    group_advantages,
    leave_one_out_advantages,
    nan_stats,
    normalise_batch,
    pareto_fronts,
    zero_signal_groups,
)

NAN = math.nan
# In float32 the mean of G equal numbers is off by an ulp for these G and most values.
ROUNDING_GROUPS = (3, 6, 7, 10)
OFFSETS = (0.1, 0.3, 0.7, -5.3, 1000.1, 123_456.7)


def random_rewards(size: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = tensor([10.0**column for column in range(columns)])
    return torch.randn(size, columns, generator=generator, dtype=torch.float64) * scales


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case.get("dtype", "float64"))


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], rewards: list[float], row: int) -> torch.Tensor:
    """d advantage[row] / d rewards."""
    inputs = tensor(rewards).requires_grad_()
    (gradient,) = torch.autograd.grad(function(inputs)[row], inputs)
    return gradient


class TestNanStats:
    def test_hand_worked(self) -> None:
        """Catches: ddof 0 (std 2.1602), NaN counted as 0 (mean 3), the wrong dimension."""
        # 1, 3, 8: mean 4, deviations -3, -1, 4: (9 + 1 + 16) / 2 = 13
        stats = nan_stats(tensor([[1.0, 3.0, NAN, 8.0], [2.0, NAN, NAN, NAN], [NAN] * 4]), 1)
        assert_matches(stats.mean, [[4.0], [2.0], [0.0]])
        assert_matches(stats.std, [[math.sqrt(13)], [0.0], [0.0]])
        assert stats.count.tolist() == [[3], [1], [0]]

    def test_equals_torch_without_nan(self) -> None:
        rewards = random_rewards(12, 3)
        stats = nan_stats(rewards, 0)
        assert_matches(stats.mean, rewards.mean(0, keepdim=True))
        assert_matches(stats.std, rewards.std(0, keepdim=True))

    def test_tied_is_relative_to_the_mean_above_one_and_absolute_below(self) -> None:
        """Catches: an absolute tolerance (large offsets), a purely relative one (mean 0 would never tie)."""
        # std of (x - d, x + d) is d * sqrt 2
        for mean, deviation, tied in ((0.0, 5e-7, True), (0.0, 2e-6, False), (1e3, 5e-4, True), (1e3, 2e-3, False)):
            stats = nan_stats(tensor([mean - deviation, mean + deviation]), 0)
            assert stats.tied(1e-6).item() is tied


class TestGroup:
    @pytest.mark.parametrize("case", vector_cases("advantages", "group_"))
    def test_vectors(self, case: Case) -> None:
        """Catches: ddof 0, the group's std for the batch's, "none" divided by a std."""
        actual = group_advantages(tensor(case["rewards"]), case["num_generations"], case["scale"], case["eps"])
        assert_matches(actual, case["expected"], case)

    def test_hand_worked(self) -> None:
        """Catches: the sign, ddof 0 (denominator 1.6330), the mean of the batch, eps inside the root."""
        # group 1, 3, 5: mean 3, std sqrt((4 + 0 + 4) / 2) = 2: -2 / 2.0001, 0, 2 / 2.0001
        # group 0, 0, 3: mean 1, std sqrt((1 + 1 + 4) / 2) = sqrt 3: -1, -1, 2 over 1.732151
        rewards = tensor([1.0, 3.0, 5.0, 0.0, 0.0, 3.0])
        first, second = 2 + 1e-4, math.sqrt(3) + 1e-4
        expected = [-2 / first, 0.0, 2 / first, -1 / second, -1 / second, 2 / second]
        assert_matches(group_advantages(rewards, 3), expected)
        assert_matches(group_advantages(rewards, 3, "none"), [-2.0, 0.0, 2.0, -1.0, -1.0, 2.0])
        # batch: mean 2, squares 1 + 1 + 9 + 4 + 4 + 1 = 20, std sqrt(20 / 5) = 2
        batch = [value / first for value in (-2.0, 0.0, 2.0, -1.0, -1.0, 2.0)]
        assert_matches(group_advantages(rewards, 3, "batch"), batch)
        # eps is added to the std: with eps = 2 the first group is divided by 4
        assert_matches(group_advantages(rewards, 3, eps=2.0)[:3], [-0.5, 0.0, 0.5])

    def test_gradient_hand_worked(self) -> None:
        """Catches: a detached mean. A_0 = r_0 - (r_0 + r_1 + r_2 + r_3) / 4 and nothing of the other group."""
        gradient = gradient_of(lambda r: group_advantages(r, 4, "none"), [1.0, 2.0, 4.0, 8.0, 0.0, 1.0, 3.0, 5.0], 0)
        assert_matches(gradient, [0.75, -0.25, -0.25, -0.25, 0.0, 0.0, 0.0, 0.0])

    @pytest.mark.parametrize("scale", ["group", "batch"])
    def test_gradcheck(self, scale: str) -> None:
        rewards = random_rewards(6, 1)[:, 0].requires_grad_()
        assert torch.autograd.gradcheck(lambda r: group_advantages(r, 3, scale), rewards)  # type: ignore[arg-type]

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_missing_rewards_shift_nobody(self, scale: str) -> None:
        """Row 1 unscorable (trl#5773). Catches: NaN taken as 0 in the mean, in the std or in the count."""
        rewards = tensor([1.0, NAN, 3.0, 5.0, 2.0, 4.0, 6.0, 9.0])
        actual = group_advantages(rewards, 4, scale)  # type: ignore[arg-type]
        assert actual[1] == 0
        known = tensor([1.0, 3.0, 5.0])
        divisor = {"none": 1.0, "group": 2 + 1e-4, "batch": rewards[~rewards.isnan()].std() + 1e-4}[scale]
        assert_matches(actual[[0, 2, 3]], (known - 3) / divisor)

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_nothing_known_or_one_known_is_zero(self, scale: str) -> None:
        """Catches: NaN advantages from 0 / 0 (swift#8123)."""
        rewards = tensor([NAN, NAN, NAN, NAN, 7.0, NAN, 1.0, 2.0, 3.0])
        actual = group_advantages(rewards, 3, scale)  # type: ignore[arg-type]
        assert torch.equal(actual[:6], torch.zeros(6, dtype=torch.float64))
        assert (actual[6] < 0) and (actual[8] > 0)
        assert torch.equal(group_advantages(rewards[:3], 3, scale), torch.zeros(3, dtype=torch.float64))  # type: ignore[arg-type]

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_group_of_one(self, scale: str) -> None:
        """Evaluation with one generation. Catches: the NaN of a std over one entry."""
        rewards = tensor([1.0, 5.0, -3.0])
        assert torch.equal(group_advantages(rewards, 1, scale), torch.zeros(3, dtype=torch.float64))  # type: ignore[arg-type]

    def test_constant_groups_give_at_most_rounding_noise(self) -> None:
        for size in ROUNDING_GROUPS:
            assert group_advantages(torch.full((size,), 0.7), size).abs().max() < 1e-2

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"`rewards` has 5 rows.*num_generations=2"):
            group_advantages(torch.zeros(5), 2)
        with pytest.raises(ValueError, match="`num_generations` must be at least 1"):
            group_advantages(torch.zeros(4), 0)
        with pytest.raises(ValueError, match="`rewards` must have 1 dimension"):
            group_advantages(torch.zeros(4, 1), 2)
        with pytest.raises(ValueError, match="'sequence'"):
            group_advantages(torch.zeros(4), 2, "sequence")  # type: ignore[arg-type]


class TestLeaveOneOut:
    @pytest.mark.parametrize("case", vector_cases("advantages", "leave_one_out"))
    def test_vectors(self, case: Case) -> None:
        """Catches: the own reward left in the baseline, a division by G."""
        actual = leave_one_out_advantages(tensor(case["rewards"]), case["num_generations"])
        assert_matches(actual, case["expected"], case)

    def test_hand_worked(self) -> None:
        """Catches: r - mean (which gives -2, -1, 3), the sign."""
        # 1, 2, 6: 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5
        assert_matches(leave_one_out_advantages(tensor([1.0, 2.0, 6.0]), 3), [-3.0, -1.5, 4.5])

    def test_gradient_hand_worked(self) -> None:
        """1 for the own reward, -1 / (G - 1) for the others, 0 for other groups. Catches: 1 - 1/G."""
        gradient = gradient_of(lambda r: leave_one_out_advantages(r, 3), [1.0, 2.0, 6.0, 4.0, 5.0, 5.0], 1)
        assert_matches(gradient, [-0.5, 1.0, -0.5, 0.0, 0.0, 0.0])

    def test_is_the_centred_reward_times_g_over_g_minus_1(self) -> None:
        """Special case. Catches: groups mixed by a wrong view."""
        rewards = random_rewards(12, 1)[:, 0]
        for size in (2, 3, 4, 6):
            centred = group_advantages(rewards, size, "none")
            assert_matches(leave_one_out_advantages(rewards, size), centred * size / (size - 1))

    def test_missing_rewards_shift_nobody(self) -> None:
        """Catches: NaN as 0 in a baseline, G - 1 as the count, a gradient of NaN."""
        # known 1, 2, 6 again; then one known: no sibling; then none
        rewards = [1.0, NAN, 2.0, 6.0, NAN, 9.0, NAN, NAN, NAN, NAN, NAN, NAN]
        actual = leave_one_out_advantages(tensor(rewards), 4)
        assert_matches(actual, [-3.0, 0.0, -1.5, 4.5] + [0.0] * 8)
        gradient = gradient_of(lambda r: leave_one_out_advantages(r, 4), rewards, 0)
        assert_matches(gradient, [1.0, 0.0, -0.5, -0.5] + [0.0] * 8)

    def test_group_of_one(self) -> None:
        """Catches: r - 0 / 0, or the reward itself as the advantage."""
        assert torch.equal(leave_one_out_advantages(torch.tensor([1.0, 2.0]), 1), torch.zeros(2))

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"`rewards` has 5 rows.*num_generations=2"):
            leave_one_out_advantages(torch.zeros(5), 2)
        with pytest.raises(ValueError, match="`rewards` must have 1 dimension"):
            leave_one_out_advantages(torch.zeros(4, 1), 2)


class TestGDPO:
    @pytest.mark.parametrize("case", vector_cases("advantages", "gdpo"))
    def test_vectors(self, case: Case) -> None:
        """Catches: weights before the normalisation, ddof 0, sum then normalise, no batch step, no tie rule."""
        rewards = tensor(case["rewards"], dtype_of(case))
        options = {key: case[key] for key in ("eps", "tie_tol") if key in case}
        actual = gdpo_advantages(rewards, case["num_generations"], case["weights"], **options)
        assert actual.dtype == rewards.dtype
        assert_matches(actual, case["expected"], case)
        if "before_batch_normalization" in case:
            terms = gdpo_terms(rewards, case["num_generations"], case["weights"], **options)
            assert_matches(terms.combined, case["before_batch_normalization"])
            assert_matches(terms.weighted.sum(1), case["before_batch_normalization"])

    def test_hand_worked(self) -> None:
        """Catches: the column of scale 100 eats the other one, weights that do not weigh."""
        # G = 2, column 0: (0, 2), std sqrt 2, z = -+1 / (1.41421 + 1e-4) = -+0.7070568
        # column 1: (300, 100), std 100 sqrt 2, z = +-100 / (141.42136 + 1e-4) = +-0.7071063
        # weights 3 and 1: A_0 = -3 * 0.7070568 + 0.7071063 = -1.4140641
        # two rows -A, A: mean 0, std |A| sqrt 2; A / (|A| sqrt 2 + 1e-4)
        rewards = tensor([[0.0, 300.0], [2.0, 100.0]])
        first, second = 1 / (math.sqrt(2) + 1e-4), 100 / (100 * math.sqrt(2) + 1e-4)
        combined = 3 * first - second
        terms = gdpo_terms(rewards, 2, [3.0, 1.0])
        assert_matches(terms.weighted, [[-3 * first, second], [3 * first, -second]])
        assert_matches(terms.combined, [-combined, combined])
        assert terms.tied.tolist() == [[False, False]]
        expected = combined / (combined * math.sqrt(2) + 1e-4)
        assert_matches(gdpo_advantages(rewards, 2, [3.0, 1.0]), [-expected, expected])

    def test_gradcheck(self) -> None:
        rewards = random_rewards(6, 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda r: gdpo_advantages(r, 3, [1.0, 0.5]), rewards)

    def test_one_column_is_the_batch_normalised_group_z(self) -> None:
        """Special case, also with a weight, which the batch normalisation removes. Catches: a double eps or ddof."""
        rewards = random_rewards(12, 1)
        z = group_advantages(rewards[:, 0], 4)
        assert_matches(gdpo_advantages(rewards, 4, [1.0]), (z - z.mean()) / (z.std() + 1e-4))
        assert_matches(gdpo_advantages(rewards, 4, [2.0]), (2 * z - 2 * z.mean()) / (2 * z.std() + 1e-4))
        assert_matches(gdpo_advantages(rewards, 4, [-1.0]), -gdpo_advantages(rewards, 4, [1.0]))

    def test_scale_and_offset_of_a_column_do_not_matter(self) -> None:
        """What GDPO is for. Catches: a shared std over the columns."""
        rewards = random_rewards(12, 2)
        changed = rewards * tensor([1000.0, 50.0]) + tensor([-3.0, 7.0])
        actual, expected = (gdpo_advantages(r, 4, [1.0, 0.5], eps=0.0) for r in (changed, rewards))
        assert_matches(actual, expected)

    def test_zero_weight_removes_a_column_even_a_broken_one(self) -> None:
        rewards = random_rewards(12, 2)
        alone = gdpo_advantages(rewards[:, :1], 4, [1.0])
        assert_matches(gdpo_advantages(rewards, 4, [1.0, 0.0]), alone)
        rewards[3, 1] = NAN
        assert_matches(gdpo_advantages(rewards, 4, [1.0, 0.0]), alone)

    def test_batch_normalisation_is_over_the_sequences_of_all_groups(self) -> None:
        """Catches: a second normalisation per group, or over the columns."""
        rewards = random_rewards(12, 3)
        rewards[:4] = 1.0
        advantages = gdpo_advantages(rewards, 4, [1.0, 1.0, 1.0])
        assert_matches(advantages.mean(), 0.0)
        assert advantages.std().item() == pytest.approx(1.0, abs=1e-3)
        assert_matches(advantages[:4], [0.0] * 4)


class TestTies:
    @pytest.mark.parametrize("offset", OFFSETS)
    @pytest.mark.parametrize("num_generations", ROUNDING_GROUPS)
    @pytest.mark.parametrize("groups", [1, 2, 17])
    def test_constant_groups_are_exactly_zero_in_float32(
        self, groups: int, num_generations: int, offset: float
    ) -> None:
        """Other values in each group. Catches: std > 0 as the rule, noise of 1e-8 blown up to 0.7 (TRL 1.16)."""
        levels = offset * (1 + torch.arange(groups, dtype=torch.float32))
        column = levels.repeat_interleave(num_generations)
        rewards = torch.stack([column, column.flip(0), torch.full_like(column, offset)], dim=1)
        size = groups * num_generations
        terms = gdpo_terms(rewards, num_generations, [1.0, 0.5, 2.0])
        assert terms.tied.all()
        assert torch.equal(terms.weighted, torch.zeros(size, 3))
        assert torch.equal(gdpo_advantages(rewards, num_generations, [1.0, 0.5, 2.0]), torch.zeros(size))
        assert zero_signal_groups(column, num_generations).all()

    @pytest.mark.parametrize("num_generations", ROUNDING_GROUPS)
    def test_a_tied_column_leaves_the_other_alone(self, num_generations: int) -> None:
        """0.1 + 0.3 in the tied column. Catches: a tie of one column that drops the row, or noise that adds to it."""
        torch.manual_seed(0)
        signal = torch.randn(2 * num_generations)
        tied = torch.full_like(signal, 0.1) + 0.3
        both = gdpo_advantages(torch.stack([tied, signal], dim=1), num_generations, [1.0, 1.0])
        alone = gdpo_advantages(signal.unsqueeze(1), num_generations, [1.0])
        # The two layouts are summed in different orders: equal up to an ulp.
        torch.testing.assert_close(both, alone, rtol=0, atol=1e-6)
        assert not gdpo_terms(torch.stack([tied, signal], dim=1), num_generations, [1.0, 1.0]).weighted[:, 0].any()

    def test_a_small_but_real_difference_survives(self) -> None:
        """One reward of 8 differs by 1e-3 around 0.7, and by 1 around 1000. Catches: a tolerance too wide."""
        for base, step in ((0.7, 1e-3), (1000.0, 1.0)):
            rewards = torch.full((8, 1), base)
            rewards[5] += step
            advantages = gdpo_advantages(rewards, 8, [1.0])
            assert advantages[5] > 2
            assert not zero_signal_groups(rewards[:, 0], 8).any()

    def test_batch_ties_too(self) -> None:
        """Catches: the tie rule only inside groups."""
        values = torch.full((7,), 0.3) + 0.1
        assert torch.equal(normalise_batch(values), torch.zeros(7))
        assert torch.equal(normalise_batch(torch.tensor([5.0])), torch.zeros(1))

    def test_tolerance_can_be_set(self) -> None:
        rewards = tensor([[0.0], [1e-3], [0.0], [1.0]])
        assert gdpo_terms(rewards, 2, [1.0], tie_tol=1e-2).tied.tolist() == [[True], [False]]
        assert gdpo_terms(rewards, 2, [1.0]).tied.tolist() == [[False], [False]]

    def test_constant_groups_are_exactly_zero_in_bfloat16(self) -> None:
        """Catches: statistics in half precision."""
        for num_generations in ROUNDING_GROUPS:
            for offset in OFFSETS:
                rewards = torch.full((2 * num_generations, 1), offset, dtype=torch.bfloat16)
                assert not gdpo_advantages(rewards, num_generations, [1.0]).any()
                assert zero_signal_groups(rewards[:, 0], num_generations).all()

    def test_bfloat16_rewards_are_computed_in_float32(self) -> None:
        """Catches: a mean with 3 digits (of 100.5 and 101 for example) in any of the advantages."""
        rewards = (100 + random_rewards(12, 2)).to(torch.bfloat16)
        for function in (
            lambda r: group_advantages(r[:, 0], 4),
            lambda r: leave_one_out_advantages(r[:, 0], 4),
            lambda r: gdpo_advantages(r, 4, [1.0, 1.0]),
            lambda r: normalise_batch(r[:, 0]),
        ):
            assert function(rewards).dtype == torch.float32
            torch.testing.assert_close(function(rewards), function(rewards.float()), rtol=0, atol=0)


class TestGDPOMissing:
    def test_a_row_with_only_nan_gets_zero_and_shifts_nobody(self) -> None:
        """Catches: 0 in the batch statistics for the unscorable row."""
        rewards = random_rewards(8, 2)
        rewards[5] = NAN
        actual = gdpo_advantages(rewards, 4, [1.0, 1.0])
        assert actual[5] == 0
        combined = gdpo_terms(rewards, 4, [1.0, 1.0]).combined
        assert combined.isnan().tolist() == [index == 5 for index in range(8)]
        known = combined[~combined.isnan()]
        assert_matches(actual[[0, 1, 2, 3, 4, 6, 7]], (known - known.mean()) / (known.std() + 1e-4))

    def test_a_group_or_batch_of_nan_is_zero(self) -> None:
        """Catches: NaN advantages for everyone (swift#8123)."""
        rewards = torch.full((6, 2), NAN)
        assert torch.equal(gdpo_advantages(rewards, 3, [1.0, 1.0]), torch.zeros(6))
        rewards[3:] = torch.tensor([[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]])
        advantages = gdpo_advantages(rewards, 3, [1.0, 1.0])
        assert torch.equal(advantages[:3], torch.zeros(3))
        assert advantages[3] < 0 < advantages[5]

    def test_one_known_reward_of_a_column_carries_no_signal(self) -> None:
        """Catches: NaN from a std over one entry."""
        rewards = tensor([[0.0, NAN], [1.0, 5.0], [2.0, NAN]])
        terms = gdpo_terms(rewards, 3, [1.0, 1.0])
        assert terms.tied.tolist() == [[False, True]]
        assert_matches(terms.weighted[:, 1], [0.0] * 3)
        assert_matches(gdpo_advantages(rewards, 3, [1.0, 1.0]), gdpo_advantages(rewards[:, :1], 3, [1.0]))

    def test_group_of_one(self) -> None:
        assert torch.equal(gdpo_advantages(random_rewards(3, 2), 1, [1.0, 1.0]), torch.zeros(3, dtype=torch.float64))

    def test_errors(self) -> None:
        """Catches: a wrong number of weights that broadcasts in silence (trl#6533)."""
        rewards = torch.zeros(4, 3)
        for weights in ([1.0], [1.0, 1.0], torch.ones(1, 3)):
            with pytest.raises(ValueError, match="`weights`"):
                gdpo_advantages(rewards, 2, weights)
        with pytest.raises(ValueError, match=r"`rewards` has 4 rows.*num_generations=3"):
            gdpo_advantages(rewards, 3, [1.0] * 3)
        with pytest.raises(ValueError, match="`rewards` must have 2 dimension"):
            gdpo_advantages(rewards[:, 0], 2, [1.0])


class TestNormaliseBatch:
    def test_hand_worked(self) -> None:
        """Catches: ddof 0, NaN in the mean, the sign."""
        # 1, 3, 5: mean 3, std 2
        assert_matches(normalise_batch(tensor([1.0, NAN, 3.0, 5.0])), [-2 / 2.0001, 0.0, 0.0, 2 / 2.0001])

    def test_nothing_known(self) -> None:
        assert torch.equal(normalise_batch(torch.full((3,), NAN)), torch.zeros(3))


def fronts_by_peeling(rewards: list[list[float]]) -> list[int]:
    """Definition for one group without NaN."""

    def dominates(first: list[float], second: list[float]) -> bool:
        pairs = list(zip(first, second, strict=True))
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    fronts, remaining, index = [-1] * len(rewards), set(range(len(rewards))), 0
    while remaining:
        front = {i for i in remaining if not any(dominates(rewards[j], rewards[i]) for j in remaining)}
        for i in front:
            fronts[i] = index
        remaining -= front
        index += 1
    return fronts


class TestPareto:
    @pytest.mark.parametrize("case", vector_cases("rewards", "pareto"))
    def test_vectors(self, case: Case) -> None:
        """Catches: smaller is better, equal rows that dominate each other, the number of dominators."""
        assert pareto_fronts(tensor(case["rewards"]), case["num_generations"]).tolist() == case["expected"]

    def test_hand_worked(self) -> None:
        """Catches: dominance by all columns strictly ((2, 2) over (2, 1) needs only one), fronts over the batch."""
        # (2, 2) dominates (2, 1) and (1, 2), which do not dominate each other; (0, 0) is below both
        # the second group is the same plus 10: a front over the batch would push the first group down
        group = tensor([[0.0, 0.0], [2.0, 2.0], [2.0, 1.0], [1.0, 2.0]])
        assert pareto_fronts(torch.cat([group, group + 10]), 4).tolist() == [2, 0, 1, 1] * 2

    @pytest.mark.parametrize("columns", [1, 2, 3])
    def test_equals_the_definition(self, columns: int) -> None:
        """Small integers, so that there are many ties."""
        torch.manual_seed(columns)
        rewards = torch.randint(0, 4, (30, columns)).float()
        expected = [front for group in rewards.split(6) for front in fronts_by_peeling(group.tolist())]
        assert pareto_fronts(rewards, 6).tolist() == expected

    def test_one_column_orders_like_the_column(self) -> None:
        """Special case: the front is the rank of the value, and the advantages order like the rewards."""
        rewards = tensor([3.0, 1.0, 3.0, 2.0])
        fronts = pareto_fronts(rewards.unsqueeze(1), 4)
        assert fronts.tolist() == [0, 2, 0, 1]
        advantages = group_advantages(-fronts.double(), 4)
        assert advantages.argsort(stable=True).tolist() == rewards.argsort(stable=True).tolist()
        assert advantages[0] == advantages[2] > 0 > advantages[1]

    def test_only_the_order_in_each_column_matters(self) -> None:
        rewards = random_rewards(12, 3)
        assert torch.equal(pareto_fronts(rewards, 4), pareto_fronts(rewards.exp() * 7 - 3, 4))

    def test_equal_rows_share_the_best_front(self) -> None:
        """No signal: all advantages 0. Catches: >= in place of one strict >, by which equal rows remove each other."""
        fronts = pareto_fronts(torch.full((6, 2), 0.3), 3)
        assert fronts.tolist() == [0] * 6
        assert torch.equal(group_advantages(-fronts.float(), 3), torch.zeros(6))

    def test_missing_rewards(self) -> None:
        """Compared on the columns both have. Catches: NaN as the worst value, and NaN >= x being False."""
        # row 0 knows column 0 only: beats row 1 there (3 > 2); row 2 knows nothing: front 0; row 3 is below row 1
        rewards = tensor([[3.0, NAN], [2.0, 2.0], [NAN, NAN], [1.0, 1.0]])
        assert pareto_fronts(rewards, 4).tolist() == [0, 1, 0, 2]

    def test_a_cycle_through_missing_rewards_ends(self) -> None:
        """a > b in column 0, b > c in 1, c > a in 2: nobody is undominated. Catches: an endless loop, a front of -1."""
        rewards = tensor([[2.0, NAN, 1.0], [1.0, 2.0, NAN], [NAN, 1.0, 2.0]])
        assert pareto_fronts(rewards, 3).tolist() == [2, 2, 2]

    def test_group_of_one_and_all_nan(self) -> None:
        assert pareto_fronts(random_rewards(3, 2), 1).tolist() == [0, 0, 0]
        assert pareto_fronts(torch.full((4, 2), NAN), 4).tolist() == [0] * 4

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="`rewards` must have 2 dimension"):
            pareto_fronts(torch.zeros(4), 2)
        with pytest.raises(ValueError, match="`rewards` has 4 rows"):
            pareto_fronts(torch.zeros(4, 2), 3)


class TestZeroSignalGroups:
    def test_hand_worked(self) -> None:
        """Catches: any for all, the batch for the group, NaN that hides a difference or makes one."""
        # equal; different; equal among the known; one known; none known
        combined = tensor([1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 3.0, NAN, 3.0, 4.0, NAN, NAN, NAN, NAN, NAN])
        assert zero_signal_groups(combined, 3).tolist() == [True, False, True, True, True]

    def test_decides_on_the_value_that_is_trained_on(self) -> None:
        """Rewards (1, 0) and (0, 1) with unequal weights: the plain sum is constant, GDPO's is not (SkyRL#2104)."""
        rewards = tensor([[1.0, 0.0], [0.0, 1.0]])
        assert zero_signal_groups(rewards.sum(1), 2).tolist() == [True]
        combined = gdpo_terms(rewards, 2, [2.0, 1.0]).combined
        assert zero_signal_groups(combined, 2).tolist() == [False]

    def test_error(self) -> None:
        with pytest.raises(ValueError, match="`combined` has 4 rows"):
            zero_signal_groups(torch.zeros(4), 3)

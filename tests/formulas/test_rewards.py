from __future__ import annotations

import math

import pytest
import torch

from tests.formulas.vectors import Case, assert_matches, tensor, vector_cases
from trl_ext.formulas.advantages import group_advantages
from trl_ext.formulas.rewards import gate_rewards

NAN = math.nan
FLOORS = ("zero", "group_min", "worst")


def random_rewards(size: int = 8, columns: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, columns, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", vector_cases("rewards", "gate_"))
def test_vectors(case: Case) -> None:
    """Catches: the minimum over the batch, over the passing rows only, over the row; the gate column changed."""
    rewards = tensor(case["rewards"])
    actual = gate_rewards(
        rewards, case["num_generations"], case["gate"], case["threshold"], case["gated"], case["floor"]
    )
    assert_matches(actual, case["expected"], case)
    assert_matches(rewards, case["rewards"])


class TestHandWorked:
    # gate in column 1, threshold 0.5: rows 1 and 2 fail; group 1 of column 0 is (3, 5, 4), group 2 is (-3, -1, -2)
    REWARDS = ((3.0, 0.9), (5.0, 0.1), (4.0, NAN), (-3.0, 0.5), (-1.0, 0.4), (-2.0, 0.0))

    @pytest.mark.parametrize(
        ("floor", "column"),
        [
            ("zero", [3.0, 0.0, 0.0, -3.0, 0.0, 0.0]),
            ("group_min", [3.0, 3.0, 3.0, -3.0, -3.0, -3.0]),
            ("worst", [3.0, 0.0, 0.0, -3.0, -3.0, -3.0]),
        ],
    )
    def test_floors(self, floor: str, column: list[float]) -> None:
        """Catches: > for >= (row 3 is at the threshold), NaN that passes, max for min, gate and gated swapped."""
        actual = gate_rewards(tensor(self.REWARDS), 3, 1, 0.5, [0], floor)  # type: ignore[arg-type]
        assert_matches(actual[:, 0], column)
        assert_matches(actual[:, 1], tensor(self.REWARDS)[:, 1])

    def test_worst_is_the_default(self) -> None:
        """Catches: a default of 0, which pays the unsafe row when the rewards are negative."""
        rewards = tensor(self.REWARDS)
        assert_matches(gate_rewards(rewards, 3, 1, 0.5, [0]), gate_rewards(rewards, 3, 1, 0.5, [0], "worst"))

    def test_gradient(self) -> None:
        """Passing rows keep theirs, a failing row has none of its own; the minimum collects those of its floor."""
        # group 1: floor 0, so only row 0 counts; group 2: row 3 passes and is the minimum of rows 4 and 5: 1 + 2
        rewards = tensor(self.REWARDS).requires_grad_()
        gate_rewards(rewards, 3, 1, 0.5, [0], "worst")[:, 0].sum().backward()
        assert_matches(rewards.grad[:, 0], [1.0, 0.0, 0.0, 3.0, 0.0, 0.0])
        assert_matches(rewards.grad[:, 1], [0.0] * 6)


class TestProperties:
    @pytest.mark.parametrize("floor", FLOORS)
    def test_threshold_minus_infinity_changes_no_bit(self, floor: str) -> None:
        """Special case. Catches: any change of a passing row."""
        rewards = random_rewards()
        rewards[2, 1] = NAN
        actual = gate_rewards(rewards, 4, 0, -math.inf, [1, 2], floor)  # type: ignore[arg-type]
        assert_matches(actual, rewards)

    @pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0])
    @pytest.mark.parametrize("floor", ["group_min", "worst"])
    def test_a_failing_row_is_never_better_than_a_passing_one(self, floor: str, offset: float) -> None:
        """Catches: a floor that pays. "zero" does at the offset -5, which is why it is not the default."""
        rewards = random_rewards(40, 2)
        rewards[:, 1] += offset
        passed = (rewards[:, 0] >= 0.3).view(-1, 4)
        gated = gate_rewards(rewards, 4, 0, 0.3, [1], floor)[:, 1].view(-1, 4)  # type: ignore[arg-type]
        best_failing = gated.masked_fill(passed, -math.inf).amax(1)
        worst_passing = gated.masked_fill(~passed, math.inf).amin(1)
        assert (best_failing <= worst_passing).all()

    def test_the_advantage_of_a_failing_row_is_not_positive(self) -> None:
        """Gating before the normalisation. The best raw reward fails. Catches: gating the normalised values."""
        rewards = tensor([[0.0, 9.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
        assert group_advantages(rewards[:, 1], 4)[0] > 1
        assert group_advantages(gate_rewards(rewards, 4, 0, 0.5, [1])[:, 1], 4)[0] < -1

    def test_groups_do_not_see_each_other(self) -> None:
        """Catches: the minimum over the batch."""
        rewards = random_rewards(8, 2)
        together = gate_rewards(rewards, 4, 0, 0.0, [1], "group_min")
        alone = torch.cat([gate_rewards(part, 4, 0, 0.0, [1], "group_min") for part in rewards.split(4)])
        assert torch.equal(together, alone)

    def test_ungated_columns_keep_every_bit(self) -> None:
        rewards = random_rewards()
        actual = gate_rewards(rewards, 4, 1, 0.0, [2])
        assert torch.equal(actual[:, :2], rewards[:, :2])
        assert not torch.equal(actual[:, 2], rewards[:, 2])

    def test_chains_apply_in_order(self) -> None:
        """Gate 0 withholds column 1, which is the gate of column 2. Catches: both gates on the raw matrix."""
        # row 0 fails gate 0: column 1 becomes min(0, 0.8) = 0, fails 0.5, column 2 becomes min(0, 4) = 0
        rewards = tensor([[0.0, 0.9, 5.0], [1.0, 0.8, 4.0]])
        first = gate_rewards(rewards, 2, 0, 0.5, [1])
        assert_matches(gate_rewards(first, 2, 1, 0.5, [2]), [[0.0, 0.0, 0.0], [1.0, 0.8, 4.0]])
        assert_matches(gate_rewards(rewards, 2, 1, 0.5, [2]), rewards)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_dtype_is_kept(self, dtype: torch.dtype) -> None:
        assert gate_rewards(random_rewards().to(dtype), 4, 0, 0.0, [1]).dtype == dtype


class TestMissing:
    @pytest.mark.parametrize("floor", FLOORS)
    def test_a_missing_gate_fails(self, floor: str) -> None:
        """Catches: ~(NaN < threshold), by which an unchecked answer passes."""
        rewards = tensor([[NAN, 7.0], [1.0, 2.0]])
        expected = {"zero": 0.0, "group_min": 2.0, "worst": 0.0}[floor]
        assert_matches(gate_rewards(rewards, 2, 0, 0.5, [1], floor)[:, 1], [expected, 2.0])  # type: ignore[arg-type]

    @pytest.mark.parametrize("floor", FLOORS)
    def test_a_missing_reward_stays_missing_and_is_no_minimum(self, floor: str) -> None:
        """Catches: NaN that becomes 0 or the floor, and a NaN minimum for the whole group."""
        rewards = tensor([[0.0, NAN], [0.0, 7.0], [1.0, 2.0], [0.0, NAN], [0.0, NAN], [1.0, NAN]])
        actual = gate_rewards(rewards, 3, 0, 0.5, [1], floor)  # type: ignore[arg-type]
        expected = {"zero": 0.0, "group_min": 2.0, "worst": 0.0}[floor]
        assert_matches(actual[:, 1], [NAN, expected, 2.0, NAN, NAN, NAN])

    def test_gradient_is_not_broken_by_missing_rewards(self) -> None:
        rewards = tensor([[0.0, NAN], [0.0, 7.0], [1.0, 2.0]]).requires_grad_()
        gate_rewards(rewards, 3, 0, 0.5, [1], "group_min")[1:, 1].sum().backward()
        assert_matches(rewards.grad[:, 1], [0.0, 0.0, 2.0])

    def test_group_of_one(self) -> None:
        """The row's own reward is the minimum. Catches: a failing row that keeps a positive reward by default."""
        rewards = tensor([[0.0, 7.0], [0.0, -7.0], [1.0, 7.0]])
        assert_matches(gate_rewards(rewards, 1, 0, 0.5, [1])[:, 1], [0.0, -7.0, 7.0])

    def test_every_row_fails(self) -> None:
        rewards = tensor([[0.0, 7.0], [0.0, -7.0]])
        assert_matches(gate_rewards(rewards, 2, 0, 0.5, [1])[:, 1], [-7.0, -7.0])


class TestErrors:
    @pytest.mark.parametrize(("gate", "gated", "column"), [(3, [0], 3), (0, [1, 3], 3), (0, [-1], -1), (-1, [0], -1)])
    def test_column_out_of_range(self, gate: int, gated: list[int], column: int) -> None:
        """Catches: -1 as the last column, in silence."""
        with pytest.raises(ValueError, match=f"Column {column} does not exist"):
            gate_rewards(random_rewards(), 4, gate, 0.0, gated)

    def test_gate_among_the_gated(self) -> None:
        with pytest.raises(ValueError, match="cannot gate itself"):
            gate_rewards(random_rewards(), 4, 1, 0.0, [1, 2])

    def test_floor_shape_and_groups(self) -> None:
        with pytest.raises(ValueError, match="'nan'"):
            gate_rewards(random_rewards(), 4, 0, 0.0, [1], "nan")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`rewards` must have 2 dimension"):
            gate_rewards(torch.zeros(4), 2, 0, 0.0, [1])
        with pytest.raises(ValueError, match=r"`rewards` has 8 rows.*num_generations=3"):
            gate_rewards(random_rewards(), 3, 0, 0.0, [1])

    def test_nothing_gated_changes_nothing(self) -> None:
        rewards = random_rewards()
        assert torch.equal(gate_rewards(rewards, 4, 0, 0.0, []), rewards)

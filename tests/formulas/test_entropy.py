from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.formulas.vectors import JUNK, assert_matches, tensor, with_junk
from trl_ext.formulas.entropy import mean_token_entropy, scheduled_coefficient


class TestMeanTokenEntropy:
    def test_hand_worked_value_and_gradient(self) -> None:
        """Catches: the mean of sequence means ((1.5 + 3) / 2 = 2.25), the mean over all entries, the sum."""
        # real tokens 1, 2 and 3: (1 + 2 + 3) / 3 = 2; each real token has the gradient 1/3
        entropies = tensor([[1.0, 2.0], [3.0, 9.0]]).requires_grad_()
        mask = torch.tensor([[1, 1], [1, 0]])
        mean = mean_token_entropy(entropies, mask)
        assert_matches(mean, 2.0)
        mean.backward()
        assert_matches(entropies.grad, [[1 / 3, 1 / 3], [1 / 3, 0.0]])

    @pytest.mark.parametrize("mask_dtype", [torch.long, torch.bool, torch.float32])
    @pytest.mark.parametrize("junk", JUNK)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, junk: float, mask_dtype: torch.dtype) -> None:
        """Catches: entropies * mask (0 * NaN)."""
        torch.manual_seed(0)
        clean = torch.rand(3, 4, dtype=torch.float64).requires_grad_()
        mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).to(mask_dtype)
        dirty = with_junk(clean, mask, junk).requires_grad_()
        values = [mean_token_entropy(entropies, mask) for entropies in (clean, dirty)]
        for value in values:
            value.backward()
        assert torch.equal(values[0], values[1])
        assert torch.equal(clean.grad, dirty.grad)

    def test_one_token(self) -> None:
        assert_matches(mean_token_entropy(tensor([[0.7, 5.0]]), torch.tensor([[1, 0]])), 0.7)

    def test_no_real_token_is_zero_with_gradient_zero(self) -> None:
        """Catches: 0 / 0."""
        entropies = torch.full((2, 3), torch.nan, requires_grad=True)
        mean = mean_token_entropy(entropies, torch.zeros(2, 3))
        mean.backward()
        assert mean.item() == 0.0
        assert torch.equal(entropies.grad, torch.zeros(2, 3))

    @pytest.mark.parametrize(("coefficient", "direction"), [(0.1, 1), (-0.1, -1)])
    def test_positive_coefficient_raises_the_entropy_of_a_policy(self, coefficient: float, direction: int) -> None:
        """Without any other loss, 5 SGD steps. Catches: the wrong sign (trl#5584) and a detached bonus (trl#6140)."""
        torch.manual_seed(0)
        logits = torch.randn(2, 3, 8, requires_grad=True)
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        padded = logits.detach()[1, 2].clone()
        optimizer = torch.optim.SGD([logits], lr=10.0)
        history = []
        for _ in range(6):
            logps = logits.log_softmax(-1)
            mean = mean_token_entropy(-(logps.exp() * logps).sum(-1), mask)
            history.append(mean.item())
            optimizer.zero_grad()
            (-coefficient * mean).backward()
            optimizer.step()
        assert all((after - before) * direction > 0 for before, after in itertools.pairwise(history))
        assert torch.equal(logits.detach()[1, 2], padded)

    def test_half_precision_is_summed_in_float32(self) -> None:
        """Catches: a sum over 300 tokens rounded to bfloat16, and the gradient 1/300 with 3 digits."""
        entropies = torch.linspace(0.5, 3.0, 300).to(torch.bfloat16).view(1, 300)
        mean = mean_token_entropy(entropies, torch.ones(1, 300))
        assert mean.item() == pytest.approx(entropies.double().mean().item(), abs=1e-5)

    def test_shape_error_names_the_mask(self) -> None:
        with pytest.raises(ValueError, match="`mask`"):
            mean_token_entropy(torch.zeros(2, 3), torch.ones(2, 1))


class TestSchedule:
    def test_hand_worked(self) -> None:
        """Catches: start and final exchanged, cos(2 pi p), a cosine without the half."""
        # from 0.4 to 0.1: linear at 1/4: 0.4 - 0.3 / 4 = 0.325
        assert scheduled_coefficient(0.4, 0.1, 0.25, "linear") == pytest.approx(0.325, abs=1e-12)
        # cosine at 1/4: 0.1 + 0.3 * (1 + cos 45 deg) / 2 = 0.1 + 0.3 * 0.85355339 = 0.35606602
        assert scheduled_coefficient(0.4, 0.1, 0.25, "cosine") == pytest.approx(0.3560660171779821, abs=1e-12)
        # cosine at 1/3: cos 60 deg = 1/2: 0.1 + 0.3 * 3/4 = 0.325
        assert scheduled_coefficient(0.4, 0.1, 1 / 3, "cosine") == pytest.approx(0.325, abs=1e-12)

    @pytest.mark.parametrize("schedule", ["linear", "cosine"])
    def test_ends_middle_and_direction(self, schedule: str) -> None:
        """Both meet the ends and the middle; a rise from 0 and a change of sign are allowed."""
        for start, final in ((0.4, 0.1), (0.0, 0.2), (-0.1, 0.1)):
            values = [scheduled_coefficient(start, final, step / 10, schedule) for step in range(11)]  # type: ignore[arg-type]
            assert values[0] == pytest.approx(start, abs=1e-12)
            assert values[10] == pytest.approx(final, abs=1e-12)
            assert values[5] == pytest.approx((start + final) / 2, abs=1e-12)
            sign = math.copysign(1, final - start)
            steps = [(after - before) * sign for before, after in itertools.pairwise(values)]
            assert min(steps) > 0

    @pytest.mark.parametrize("schedule", ["linear", "cosine"])
    def test_progress_is_clipped(self, schedule: str) -> None:
        """Catches: a linear schedule that goes on below its final value, a cosine that comes back."""
        for progress, expected in ((-0.5, 0.4), (1.5, 0.1)):
            value = scheduled_coefficient(0.4, 0.1, progress, schedule)  # type: ignore[arg-type]
            assert value == pytest.approx(expected, abs=1e-12)

    def test_unknown_schedule(self) -> None:
        with pytest.raises(ValueError, match="'step'"):
            scheduled_coefficient(0.4, 0.1, 0.5, "step")  # type: ignore[arg-type]

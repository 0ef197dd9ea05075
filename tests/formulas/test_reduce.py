from __future__ import annotations

import pytest
import torch

from tests.formulas.vectors import JUNK, assert_matches, tensor, with_junk
from trl_ext.formulas.reduce import (
    CONSTANT_LENGTH,
    LOSS_TYPES,
    MEAN_OF_SEQUENCE_MEANS,
    MEAN_OF_SEQUENCE_SUMS,
    MEAN_OVER_TOKENS,
    TOKENS_OF_THE_WINDOW,
    Window,
    reduce_per_token,
    sequence_sums,
)

# Sums over rows or constants only, so the parts of a window add up whatever their token counts.
ADDITIVE = (*MEAN_OF_SEQUENCE_MEANS, *CONSTANT_LENGTH, *TOKENS_OF_THE_WINDOW, *MEAN_OF_SEQUENCE_SUMS)


def window(mask: torch.Tensor | None = None, **changes: float) -> Window:
    """One micro-batch per window and generation on one rank; `mask` gives the number of tokens."""
    tokens = None if mask is None else mask.sum()
    settings = {"max_completion_length": 4, "accumulation": 1, "steps_per_generation": 1, "num_processes": 1}
    return Window(**(settings | changes), num_items_in_batch=tokens)  # type: ignore[arg-type]


def random_batch(equal_lengths: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    per_token = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    lengths = torch.full((8,), 3) if equal_lengths else torch.tensor([4, 1, 2, 3, 4, 4, 1, 2])
    return per_token, (torch.arange(4) < lengths.unsqueeze(1)).long()


class TestHandWorked:
    # rows 1, 2, (3) and 4, 5, 6: sums 3 and 15, means 1.5 and 5, 5 tokens
    PER_TOKEN = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    MASK = ((1, 1, 0), (1, 1, 1))

    @pytest.mark.parametrize(
        ("loss_type", "value", "gradient"),
        [
            *((name, (1.5 + 5) / 2, [[1 / 4, 1 / 4, 0.0], [1 / 6] * 3]) for name in MEAN_OF_SEQUENCE_MEANS),
            *((name, 18 / 5, [[1 / 5, 1 / 5, 0.0], [1 / 5] * 3]) for name in MEAN_OVER_TOKENS),
            *((name, 18 / (2 * 4), [[1 / 8, 1 / 8, 0.0], [1 / 8] * 3]) for name in CONSTANT_LENGTH),
            *((name, 18 / 5, [[1 / 5, 1 / 5, 0.0], [1 / 5] * 3]) for name in TOKENS_OF_THE_WINDOW),
            *((name, (3 + 15) / 2, [[1 / 2, 1 / 2, 0.0], [1 / 2] * 3]) for name in MEAN_OF_SEQUENCE_SUMS),
        ],
    )
    def test_one_micro_batch(self, loss_type: str, value: float, gradient: list[list[float]]) -> None:
        """Catches: T for the constant of Dr. GRPO (18 / 6), a mean over padding, sums and means exchanged."""
        per_token, mask = tensor(self.PER_TOKEN).requires_grad_(), torch.tensor(self.MASK)
        loss = reduce_per_token(per_token, mask, loss_type, window(mask))
        assert_matches(loss, value)
        loss.backward()
        assert_matches(per_token.grad, gradient)

    @pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name not in TOKENS_OF_THE_WINDOW])
    def test_accumulation_divides(self, loss_type: str) -> None:
        """Catches: no division (the trainer does not divide GRPO's loss), a division by steps_per_generation."""
        per_token, mask = tensor(self.PER_TOKEN), torch.tensor(self.MASK)
        once = reduce_per_token(per_token, mask, loss_type, window())
        accumulated = reduce_per_token(per_token, mask, loss_type, window(accumulation=4, steps_per_generation=8))
        assert_matches(accumulated, once / 4)

    @pytest.mark.parametrize("loss_type", TOKENS_OF_THE_WINDOW)
    def test_tokens_of_the_window(self, loss_type: str) -> None:
        """Catches: the tokens of the generation batch, or of the micro-batch, for those of the window; ranks."""
        # generation batch: 40 tokens over 2 ranks in 4 micro-batches, 2 of them per window:
        # 40 / 2 * 2 / 4 = 10 tokens per rank and window; 18 / 10
        settings = Window(
            99, accumulation=2, steps_per_generation=4, num_processes=2, num_items_in_batch=torch.tensor(40)
        )
        assert_matches(reduce_per_token(tensor(self.PER_TOKEN), torch.tensor(self.MASK), loss_type, settings), 1.8)


class TestAccumulation:
    @staticmethod
    def whole_and_parts(
        loss_type: str, per_token: torch.Tensor, mask: torch.Tensor, size: int, **changes: float
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """(value, gradient) of one batch, and of the sum over its micro-batches of `size` rows."""
        parts = len(per_token) // size
        results = []
        for count in (1, parts):
            values = per_token.clone().requires_grad_()
            settings = window(mask, **({"accumulation": count, "steps_per_generation": count} | changes))
            losses = [
                reduce_per_token(part, part_mask, loss_type, settings)
                for part, part_mask in zip(values.chunk(count), mask.chunk(count), strict=True)
            ]
            total = torch.stack(losses).sum()
            (gradient,) = torch.autograd.grad(total, values)
            results.append((total.detach(), gradient))
        return results[0], results[1]

    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("loss_type", ADDITIVE)
    def test_sum_over_the_window_is_the_one_batch_value(self, loss_type: str, size: int) -> None:
        """Unequal lengths: 1 x 8 equals 2 x 4 and 8 x 1. Catches: a normaliser of the micro-batch (trl#2617)."""
        whole, parts = self.whole_and_parts(loss_type, *random_batch(), size)
        assert_matches(parts[0], whole[0])
        assert_matches(parts[1], whole[1])

    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("loss_type", MEAN_OVER_TOKENS)
    def test_bnpo_adds_up_for_equal_token_counts_only(self, loss_type: str, size: int) -> None:
        """It normalises by the micro-batch by definition. Catches: dapo in its place."""
        whole, parts = self.whole_and_parts(loss_type, *random_batch(equal_lengths=True), size)
        assert_matches(parts[0], whole[0])
        assert_matches(parts[1], whole[1])
        whole, parts = self.whole_and_parts(loss_type, *random_batch(), size)
        assert (parts[0] - whole[0]).abs() > 1e-3

    @pytest.mark.parametrize("loss_type", TOKENS_OF_THE_WINDOW)
    def test_several_windows_of_one_generation(self, loss_type: str) -> None:
        """8 rows in 4 micro-batches, 2 per window. Catches: steps_per_generation and accumulation exchanged."""
        per_token, mask = random_batch()
        settings = window(mask, accumulation=2, steps_per_generation=4)
        losses = [
            reduce_per_token(part, part_mask, loss_type, settings)
            for part, part_mask in zip(per_token.chunk(4), mask.chunk(4), strict=True)
        ]
        # each of the two windows is normalised by half of the generation's tokens
        mean_over_windows = torch.stack(losses).sum() / 2
        assert_matches(mean_over_windows, (per_token * mask).sum() / mask.sum())

    @pytest.mark.parametrize("loss_type", ADDITIVE)
    def test_mean_over_ranks_is_the_one_rank_value(self, loss_type: str) -> None:
        """Gradients are averaged over ranks. Catches: num_processes forgotten or squared."""
        per_token, mask = random_batch()
        whole = reduce_per_token(per_token, mask, loss_type, window(mask))
        ranks = [
            reduce_per_token(part, part_mask, loss_type, window(mask, num_processes=2))
            for part, part_mask in zip(per_token.chunk(2), mask.chunk(2), strict=True)
        ]
        assert_matches(torch.stack(ranks).mean(), whole)


class TestEdges:
    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    @pytest.mark.parametrize("junk", JUNK)
    def test_junk_under_mask_changes_neither_value_nor_gradient(self, junk: float, loss_type: str) -> None:
        """Catches: per_token * mask (0 * NaN), as TRL has it."""
        clean, mask = random_batch()
        dirty = with_junk(clean, mask, junk).requires_grad_()
        clean.requires_grad_()
        losses = [reduce_per_token(values, mask, loss_type, window(mask)) for values in (clean, dirty)]
        for loss in losses:
            loss.backward()
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(clean.grad, dirty.grad)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    @pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int32])
    def test_mask_of_any_dtype(self, mask_dtype: torch.dtype, loss_type: str) -> None:
        per_token, mask = random_batch()
        expected = reduce_per_token(per_token, mask, loss_type, window(mask))
        assert_matches(reduce_per_token(per_token, mask.to(mask_dtype), loss_type, window(mask)), expected)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_no_real_token_is_zero_with_gradient_zero(self, loss_type: str) -> None:
        """Catches: 0 / 0."""
        per_token = torch.full((2, 3), torch.nan, requires_grad=True)
        mask = torch.zeros(2, 3, dtype=torch.long)
        loss = reduce_per_token(per_token, mask, loss_type, window(mask))
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(per_token.grad, torch.zeros(2, 3))

    def test_an_empty_row_still_counts_as_a_sequence(self) -> None:
        """As in TRL. Catches: a mean over the non-empty rows (8 instead of 4)."""
        per_token, mask = tensor([[8.0, 8.0], [9.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
        assert_matches(reduce_per_token(per_token, mask, "grpo", window(mask)), 4.0)
        assert_matches(reduce_per_token(per_token, mask, "luspo", window(mask)), 8.0)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_one_token(self, loss_type: str) -> None:
        """All normalisers are 1, or the constant of Dr. GRPO."""
        mask = torch.ones(1, 1)
        loss = reduce_per_token(tensor([[3.0]]), mask, loss_type, window(mask))
        assert_matches(loss, 3.0 / 4 if loss_type == "dr_grpo" else 3.0)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_constant_terms_of_equal_lengths_give_the_constant(self, loss_type: str) -> None:
        """Full rows of a constant: the constant, times T for the sequence sum."""
        mask = torch.ones(3, 4)
        loss = reduce_per_token(torch.full((3, 4), 2.5, dtype=torch.float64), mask, loss_type, window(mask))
        assert_matches(loss, 10.0 if loss_type == "luspo" else 2.5)

    def test_sequence_sums(self) -> None:
        per_token = tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, 6.0], [torch.nan] * 3]).requires_grad_()
        mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
        sums = sequence_sums(per_token, mask)
        assert_matches(sums, [3.0, 10.0, 0.0])
        sums.sum().backward()
        assert_matches(per_token.grad, mask.double())


class TestErrors:
    def test_loss_types_are_listed_once(self) -> None:
        assert len(set(LOSS_TYPES)) == len(LOSS_TYPES) == 8

    def test_unknown_loss_type(self) -> None:
        with pytest.raises(ValueError, match="'ppo'"):
            reduce_per_token(torch.zeros(1, 1), torch.ones(1, 1), "ppo", window())

    @pytest.mark.parametrize("loss_type", TOKENS_OF_THE_WINDOW)
    def test_tokens_of_the_window_are_needed(self, loss_type: str) -> None:
        with pytest.raises(ValueError, match="num_items_in_batch"):
            reduce_per_token(torch.zeros(1, 1), torch.ones(1, 1), loss_type, window())

    def test_shapes(self) -> None:
        """Catches: a term (B, 1) of a sequence-level ratio that broadcasts in silence."""
        with pytest.raises(ValueError, match="`mask`"):
            reduce_per_token(torch.zeros(2, 1), torch.ones(2, 3), "grpo", window())
        with pytest.raises(ValueError, match="`mask`"):
            sequence_sums(torch.zeros(2, 1), torch.ones(2, 3))

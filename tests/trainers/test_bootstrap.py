"""Bootstrap weights: a function of the pair's tokens, the member and the seed, and of nothing else."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from trl_ext.trainers.bootstrap import bootstrap_weights, row_keys

Pair = tuple[list[int], list[int]]
MASK = 2**64 - 1


def random_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Pairs of 1 to 12 tokens; 0, the pad token of `batch`, is among them."""
    generator = torch.Generator().manual_seed(seed)

    def row() -> list[int]:
        length = int(torch.randint(1, 13, (1,), generator=generator))
        return torch.randint(0, 50, (length,), generator=generator).tolist()

    return [(row(), row()) for _ in range(count)]


def batch(pairs: list[Pair], pad: int = 0, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As TRL's collator lays pairs out: the chosen rows, then the rejected ones, padded on the right."""
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def weights(pairs: list[Pair], members: int = 4, seed: int = 7, pad: int = 0, extra: int = 0) -> torch.Tensor:
    return bootstrap_weights(*batch(pairs, pad, extra), members, seed)


def mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def weight_by_hand(pair: Pair, member: int, seed: int) -> int:
    """In Python's integers, which do not overflow."""
    keys = [
        sum((token + 1) * pow(6364136223846793005, place + 1, 2**64) for place, token in enumerate(row)) & MASK
        for row in pair
    ]
    key = (mixed(keys[0]) + mixed((keys[1] + 1) & MASK)) & MASK
    uniform = (mixed(key ^ mixed(member + seed * 2**20)) >> 11) / 2**53
    count, distribution = 0, math.exp(-1)
    while uniform >= distribution:
        count += 1
        distribution += math.exp(-1) / math.factorial(count)
    return count


def test_weights_by_hand() -> None:
    """Catches any change of the sample: a run that is resumed with another version would get other members."""
    pairs = random_pairs(200)
    expected = [[weight_by_hand(pair, member, 7) for member in range(3)] for pair in pairs]
    assert weights(pairs, members=3).tolist() == expected


def test_padding_does_not_matter() -> None:
    """Neither how much nor which token; the same token inside a row counts. Catches a key of the padded row."""
    pairs = random_pairs(50)
    expected = weights(pairs)
    assert torch.equal(weights(pairs, extra=9), expected)
    assert torch.equal(weights(pairs, pad=49, extra=3), expected)
    assert not torch.equal(weights([([*chosen, 0], rejected) for chosen, rejected in pairs]), expected)


def test_batch_order_and_rank_do_not_matter() -> None:
    """Alone, in halves (two ranks), reversed. Catches a generator that is drawn from row by row."""
    pairs = random_pairs(40)
    expected = weights(pairs)
    assert torch.equal(torch.cat([weights([pair]) for pair in pairs]), expected)
    assert torch.equal(
        torch.cat([weights(pairs[0::2]), weights(pairs[1::2])]), expected[[*range(0, 40, 2), *range(1, 40, 2)]]
    )
    assert torch.equal(weights(pairs[::-1]), expected.flip(0))
    torch.manual_seed(123)
    assert torch.equal(weights(pairs), expected)


def test_more_members_leave_the_first_ones_alone() -> None:
    """Catches a stream that is shared by the members."""
    pairs = random_pairs(40)
    assert torch.equal(weights(pairs, members=6)[:, :2], weights(pairs, members=2))


def test_members_and_seeds_are_unrelated() -> None:
    """Correlations below 4 standard errors. Catches one sample for all members, or for runs with nearby seeds."""
    pairs = random_pairs(5000)
    columns = torch.cat([weights(pairs, members=4, seed=7), weights(pairs, members=4, seed=8)], dim=1)
    correlations = torch.corrcoef(columns.T) - torch.eye(8)
    assert correlations.abs().max() < 4 / math.sqrt(5000)


def test_distribution() -> None:
    """Mean 1, variance 1, 36.8 % left out, over pairs that differ in one token only. Catches a weak hash."""
    pairs: list[Pair] = [([5, 6, token], [5, 6]) for token in range(5000)]
    found = weights(pairs, members=4)
    assert found.shape == (5000, 4)
    assert found.dtype == torch.float32
    assert found.mean(0).tolist() == pytest.approx([1.0] * 4, abs=0.06)
    assert found.var(0).tolist() == pytest.approx([1.0] * 4, abs=0.1)
    assert (found == 0).float().mean(0).tolist() == pytest.approx([math.exp(-1)] * 4, abs=0.03)


def test_swapping_the_answers_is_another_pair() -> None:
    """Catches a symmetric key, with which a pair and its opposite are in the same samples."""
    pairs = random_pairs(3000)
    straight, swapped = weights(pairs), weights([(rejected, chosen) for chosen, rejected in pairs])
    correlation = torch.corrcoef(torch.stack([straight.flatten(), swapped.flatten()]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(straight.numel())


def test_every_token_and_its_place_count() -> None:
    """Catches a sum of tokens, a key of the last tokens only, and powers that vanish in long rows."""
    rows = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3], [0], [0, 0]]
    long = [9] * 5000
    ids, mask = batch([(row, row) for row in [*rows, long, [8, *long[1:]], [*long[:-1], 8]]])
    keys = row_keys(ids, mask)
    assert len(set(keys.tolist())) == len(keys) / 2


@pytest.mark.parametrize("seed", [0, 2**31, 2**40, -1])
def test_any_seed_works(seed: int) -> None:
    """Catches an overflow that raises, and a warning of numpy for one that is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weights(random_pairs(20), seed=seed).isfinite().all()

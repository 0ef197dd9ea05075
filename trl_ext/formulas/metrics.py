"""Numbers that describe a reward model, a set of texts, or a win rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

from trl_ext.formulas.checks import check_rank


def expected_calibration_error(margins: torch.Tensor, bins: int = 10) -> torch.Tensor:
    r"""How far a reward model's confidence in its preferences is from how often they are right.

    Guo et al. 2017, "On Calibration of Modern Neural Networks" (arXiv 1706.04599), eq. 3:
    ECE = sum_b n_b / n * |accuracy_b - confidence_b|, over equal bins of the confidence, each open below and closed
    above. Here confidence = max(p, 1 - p) with p = sigmoid(margin), so the bins divide [0.5, 1].

    Args:
        margins: (N,), score of the preferred minus score of the other answer, in logits of the Bradley-Terry model;
            positive = the model agrees with the label. 0 predicts nothing: it counts as half right at confidence 0.5.
        bins: number of bins, at least 1.

    Returns:
        Scalar in [0, 1], float32 or wider; NaN for an empty input.

    When it is wrong: scores that are not on the logit scale (standardised, averaged, clipped) have no confidence to
    calibrate. With few pairs per bin the error is biased upwards; compare models on the same pairs and bins only.

    Raises:
        ValueError: `margins` is not a vector or contains NaN, or `bins` < 1.
    """
    check_rank("margins", margins, 1)
    if bins < 1:
        raise ValueError(f"`bins` must be at least 1, got {bins}.")
    if margins.isnan().any():
        raise ValueError("`margins` contains NaN: drop the pairs that could not be scored, and report how many.")
    margins = margins.to(torch.promote_types(margins.dtype, torch.float32))
    confidence = margins.abs().sigmoid()  # (N,)
    correct = (margins.sign() + 1) / 2  # (N,), 0, 1/2 or 1
    # 2 * confidence - 1 = tanh(|margin| / 2) is the position in [0.5, 1], from 0 to 1.
    index = (torch.tanh(margins.abs() / 2) * bins).ceil().clamp(min=1) - 1
    in_bin = index.unsqueeze(1) == torch.arange(bins, device=margins.device)  # (N, bins)
    gap = torch.where(in_bin, (correct - confidence).unsqueeze(1), torch.zeros_like(confidence).unsqueeze(1))
    # n_b / n * |accuracy_b - confidence_b| = |sum of the gaps in b| / n, which needs no division by empty bins.
    return gap.sum(0).abs().sum() / len(margins)


def distinct_n(texts: Sequence[str], n: int) -> float:
    r"""Share of different n-grams among all n-grams of the texts, pooled; low = repetitive or collapsed.

    After Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models" (arXiv
    1510.03055), who divide by the number of tokens; dividing by the number of n-grams, as is usual now, makes 1 the
    maximum for every n. Words are split at white space, case counts, and no n-gram crosses two texts.

    Args:
        texts: the texts to pool. n: at least 1.

    Returns:
        In [0, 1]; 0 when no text has n words (all answers empty is the worst collapse, not a missing value).

    When it is wrong: the more text, the lower, because the vocabulary is finite: compare equal numbers of texts of
    similar length only. Languages without spaces need another split.

    Raises:
        ValueError: `n` < 1.
    """
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}.")
    words_of = [text.split() for text in texts]
    ngrams = [tuple(words[i : i + n]) for words in words_of for i in range(len(words) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def wilson_interval(wins: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    r"""Confidence interval of a win rate.

    Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference" (JASA 22, pp. 209-212): the
    rates p with |wins/n - p| <= z sqrt(p (1 - p) / n). It stays in [0, 1] and keeps a width at 0 and n wins, where
    the textbook interval has none.

    Args:
        wins: between 0 and n; a tie may count as half.
        n: number of *independent* comparisons. confidence: in (0, 1), two-sided.

    Returns:
        (low, high) as fractions; (0, 1) for n = 0, where nothing is known.

    When it is wrong: several judgements of one prompt are not independent, and the interval is then too narrow. Ties
    counted as half vary less than the formula assumes, so it is then too wide.

    Raises:
        ValueError: `wins` outside [0, n], or `confidence` outside (0, 1).
    """
    if not 0 <= wins <= n:
        raise ValueError(f"`wins` must be between 0 and n={n}, got {wins}.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, got {confidence}.")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, shrink = wins / n, 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    half_width = z / shrink * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # Rounding may leave 0 or 1 by 1e-17.
    return max(0.0, centre - half_width), min(1.0, centre + half_width)

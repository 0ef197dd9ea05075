import math
from statistics import NormalDist

import pytest
import torch

from tests.formulas.vectors import TOLERANCE, assert_matches, tensor, vector_cases
from trl_ext.formulas.metrics import distinct_n, expected_calibration_error, wilson_interval


class TestExpectedCalibrationError:
    @pytest.mark.parametrize("case", vector_cases("evaluation", "ece"))
    def test_vectors(self, case):
        """Catches: bins over [0, 1], bins weighted equally, p instead of max(p, 1 - p), the sign of the margin."""
        assert_matches(expected_calibration_error(tensor(case["margins"]), case["bins"]), case["expected"], case)

    def test_hand_worked(self):
        """Catches: a signed sum over bins (0.15 - 0.15 would cancel) and empty bins counted."""
        # logit(0.6) = 0.405465, logit(0.9) = 2.197225; bins of width 0.25: [0.5, 0.75] and (0.75, 1]
        # bin 1: confidence 0.6, 4 pairs, 3 right: |0.75 - 0.6| = 0.15
        # bin 2: confidence 0.9, 4 pairs, 3 right: |0.75 - 0.9| = 0.15; ECE = 4/8 * 0.15 + 4/8 * 0.15 = 0.15
        low, high = math.log(0.6 / 0.4), math.log(0.9 / 0.1)
        margins = tensor([low, low, low, -low, high, high, high, -high])
        assert_matches(expected_calibration_error(margins, bins=2), 0.15)
        # one bin: accuracy 0.75, mean confidence 0.75: the errors cancel
        assert_matches(expected_calibration_error(margins, bins=1), 0.0)

    def test_bins_weigh_by_their_size(self):
        """Catches: a plain mean over bins."""
        # 3 pairs at confidence 0.6, all right: gap 0.4; 1 pair at 0.9, right: gap 0.1; (3 * 0.4 + 0.1) / 4 = 0.325
        low, high = math.log(0.6 / 0.4), math.log(0.9 / 0.1)
        assert_matches(expected_calibration_error(tensor([low, low, low, high]), bins=2), 0.325)

    def test_one_bin_is_confidence_minus_accuracy(self):
        torch.manual_seed(0)
        margins = torch.randn(500, dtype=torch.float64)
        gap = margins.abs().sigmoid().mean() - (margins > 0).double().mean()
        assert_matches(expected_calibration_error(margins, bins=1), gap.abs())

    def test_a_calibrated_model_has_an_error_near_zero_and_an_overconfident_one_has_not(self):
        torch.manual_seed(1)
        size = 200_000
        confidence_logits = 3 * torch.rand(size, dtype=torch.float64)
        right = torch.rand(size, dtype=torch.float64) < confidence_logits.sigmoid()
        margins = torch.where(right, confidence_logits, -confidence_logits)
        assert expected_calibration_error(margins) < 0.01
        assert expected_calibration_error(5 * margins) > 0.1

    def test_always_wrong_and_certain_is_the_worst(self):
        assert_matches(expected_calibration_error(torch.full((9,), -1e4)), 1.0)
        assert_matches(expected_calibration_error(torch.full((9,), 1e4)), 0.0)
        assert_matches(expected_calibration_error(torch.tensor([math.inf])), 0.0)

    def test_ties_predict_nothing(self):
        """Catches: a margin of 0 counted as wrong, which calls a constant model overconfident by 0.5."""
        assert_matches(expected_calibration_error(torch.zeros(5)), 0.0)

    def test_the_smallest_margin_is_in_the_first_bin(self):
        """Catches: a bin index of -1, which drops the pair. Right at confidence 0.5: a gap of 0.5."""
        assert_matches(expected_calibration_error(torch.full((3,), 1e-45)), 0.5)

    def test_full_confidence_is_in_the_last_bin(self):
        """Catches: floor, which puts confidence 1 outside all bins, or in one of its own."""
        # 4 bins of width 1/8; confidence 1 is in the last one together with 0.9:
        # |(1 - 1) + (0 - 0.9)| / 2 = 0.45
        margins = tensor([1e4, -math.log(0.9 / 0.1)])
        assert_matches(expected_calibration_error(margins, bins=4), 0.45)

    def test_order_does_not_matter_and_half_precision_is_upcast(self):
        torch.manual_seed(2)
        margins = torch.randn(100).bfloat16()
        error = expected_calibration_error(margins)
        assert error.dtype == torch.float32
        assert_matches(expected_calibration_error(margins.float()[torch.randperm(100)]), error)

    def test_edges(self):
        assert expected_calibration_error(torch.zeros(0)).isnan()
        with pytest.raises(ValueError, match="NaN"):
            expected_calibration_error(torch.tensor([1.0, math.nan]))
        with pytest.raises(ValueError, match="`margins`"):
            expected_calibration_error(torch.zeros(2, 2))
        with pytest.raises(ValueError, match="`bins`"):
            expected_calibration_error(torch.zeros(2), bins=0)


class TestDistinctN:
    @pytest.mark.parametrize("case", vector_cases("evaluation", "distinct_n"))
    def test_vectors(self, case):
        """Catches: a mean over texts instead of pooling, n-grams across texts, division by the number of tokens."""
        for n, expected in case["expected"].items():
            assert distinct_n(case["texts"], int(n)) == pytest.approx(expected, abs=TOLERANCE)

    def test_hand_worked(self):
        """Catches: n-grams across the border (b c), tokens in the denominator (2/5), case folding."""
        # "a b a b" has ab, ba, ab; "c" has none: 2 different of 3
        assert distinct_n(["a b a b", "c"], 2) == pytest.approx(2 / 3)
        assert distinct_n(["A a"], 1) == 1.0

    def test_collapse_is_low_and_variety_is_one(self):
        assert distinct_n(["yes"] * 50, 1) == 0.02
        assert distinct_n(["all of these", "words differ here"], 1) == 1.0

    def test_edges(self):
        assert distinct_n([], 1) == 0.0
        assert distinct_n(["", "  "], 1) == 0.0
        assert distinct_n(["one two"], 3) == 0.0
        assert distinct_n([" spaced \n out "], 1) == 1.0
        with pytest.raises(ValueError, match="`n`"):
            distinct_n(["a"], 0)


class TestWilsonInterval:
    @pytest.mark.parametrize("case", vector_cases("evaluation", "wilson"))
    def test_vectors(self, case):
        """Catches: a one-sided z (1.64), the Wald interval [0.4936, 0.7397], a continuity correction."""
        interval = wilson_interval(case["wins"], case["n"], case["confidence"])
        assert interval == pytest.approx(case["expected"], abs=TOLERANCE)

    def test_hand_worked(self):
        """Catches: z^2 / n left out of the denominator, which gives a high end of z^2 / n = 0.384."""
        # 0 of 10, 95 %: z = 1.959964, z^2 = 3.841459; low 0; high (z^2 / n) / (1 + z^2 / n) = 0.3841459 / 1.3841459
        assert wilson_interval(0, 10, 0.95) == pytest.approx((0.0, 0.27753280), abs=TOLERANCE)

    @pytest.mark.parametrize(("wins", "n"), [(1, 7), (37, 60), (49.5, 100), (999, 1000)])
    @pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
    def test_ends_solve_the_equation_of_the_interval(self, wins, n, confidence):
        """The definition: at both ends |wins/n - p| = z sqrt(p (1 - p) / n)."""
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        for end in wilson_interval(wins, n, confidence):
            assert abs(wins / n - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-9)

    def test_symmetry_and_monotony(self):
        low, high = wilson_interval(3, 20)
        assert wilson_interval(17, 20) == pytest.approx((1 - high, 1 - low))
        wider = wilson_interval(3, 20, 0.99)
        assert wider[0] < low < 3 / 20 < high < wider[1]
        assert wilson_interval(300, 2000)[1] < high

    def test_all_or_nothing_keeps_a_width_inside_0_and_1(self):
        """Catches: the Wald interval (no width), and ends that rounding puts at -1e-17 or 1 + 1e-16."""
        for n in range(1, 200):
            low, high = wilson_interval(0, n)
            assert low == pytest.approx(0.0, abs=1e-12) and 0 <= low < high < 1
            low, high = wilson_interval(n, n)
            assert high == pytest.approx(1.0, abs=1e-12) and 0 < low < high <= 1

    def test_edges(self):
        assert wilson_interval(0, 0) == (0.0, 1.0)
        for wins, n in ((-1, 5), (6, 5), (math.nan, 5), (0, -1)):
            with pytest.raises(ValueError, match="`wins`"):
                wilson_interval(wins, n)
        for confidence in (0.0, 1.0, 95.0):
            with pytest.raises(ValueError, match="`confidence`"):
                wilson_interval(1, 5, confidence)


class TestLibraries:
    """The tests that come from libraries mean what the vectors say."""

    @pytest.mark.parametrize("case", vector_cases("evaluation", "paired_t"))
    def test_scipy_paired_t(self, case):
        """Catches: the independent-samples test, ddof 0, b - a."""
        stats = pytest.importorskip("scipy.stats")
        assert stats.ttest_rel(case["a"], case["b"]).statistic == pytest.approx(case["expected_t"], abs=TOLERANCE)

    @pytest.mark.parametrize("case", vector_cases("evaluation", "holm"))
    def test_statsmodels_holm(self, case):
        """Catches: Bonferroni, Holm-Sidak (statsmodels' default), adjusted values that are not monotone."""
        multitest = pytest.importorskip("statsmodels.stats.multitest")
        adjusted = multitest.multipletests(case["p"], method="holm")[1]
        assert adjusted.tolist() == pytest.approx(case["expected"], abs=TOLERANCE)

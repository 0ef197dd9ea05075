import json
import math

import pytest

from tests.formulas.vectors import GOLDEN, SHARED, load_vectors, vector_cases


@pytest.mark.skipif(not SHARED.is_dir(), reason="the original vectors are not here; the golden copies are tested alone")
def test_golden_copies_equal_the_originals():
    """Catches: an edited or outdated copy, and an original that has no copy."""
    originals = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in SHARED.glob("*.json")}
    copies = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in GOLDEN.glob("*.json")}
    assert originals
    assert copies == originals


def test_null_is_nan_at_any_depth():
    cases = load_vectors("preference")["pairs"]["cases"]
    assert math.isnan(cases[1]["scores"][1])
    assert math.isnan(load_vectors("advantages")["gdpo_missing"]["rewards"][1][1])


def test_an_unknown_prefix_is_an_error_and_not_zero_tests():
    with pytest.raises(ValueError, match="nothing_like_this"):
        vector_cases("ppo", "nothing_like_this")

"""The shared test vectors: values computed by an independent float64 program, and helpers to compare with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN = Path(__file__).resolve().parent / "golden"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "vectors"
# The golden copy always, the original where it exists.
SOURCES = {"golden": GOLDEN} | ({"shared": SHARED} if SHARED.is_dir() else {})
TOLERANCE = 1e-6
# What may lie in padding: nothing of it may reach a value or a gradient.
JUNK = [math.nan, math.inf, -math.inf, 1e30]

Case = dict[str, Any]


def load_vectors(name: str, source: str = "golden") -> dict[str, Case]:
    """Cases of one file by name, with `null` as NaN; `name` is the file's stem, `source` a key of `SOURCES`."""
    cases = json.loads((SOURCES[source] / f"{name}.json").read_text(encoding="utf-8"))
    return {case["name"]: _null_to_nan(case) for case in cases}


def vector_cases(name: str, prefix: str = "") -> list[Any]:
    """Parameters for `pytest.mark.parametrize("case", ...)`: each case whose name starts with `prefix`, per source."""
    params = [
        pytest.param(case, id=f"{source}-{case_name}")
        for source in SOURCES
        for case_name, case in load_vectors(name, source).items()
        if case_name.startswith(prefix)
    ]
    if not params:
        raise ValueError(f"No case of {name}.json starts with {prefix!r}.")
    return params


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Tensor of a case's nested list; float64, in which the tolerance of the vectors is stated."""
    return torch.tensor(values, dtype=dtype)


def assert_matches(actual: torch.Tensor, expected: Any, case: Case | None = None) -> None:
    """Equal within 1e-6 (NaN equals NaN), or bit for bit where the case says `exact`."""
    tolerance = 0.0 if case is not None and case.get("exact") else TOLERANCE
    expected = expected if isinstance(expected, torch.Tensor) else tensor(expected, actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance, equal_nan=True)


def with_junk(values: torch.Tensor, mask: torch.Tensor, junk: float) -> torch.Tensor:
    """Copy of `values` with `junk` wherever the mask is 0."""
    return values.detach().masked_fill(mask == 0, junk)


def _null_to_nan(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, list):
        return [_null_to_nan(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _null_to_nan(entry) for key, entry in value.items()}
    return value

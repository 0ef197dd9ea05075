"""One gate of `reward_gates`, from YAML, the command line or Python."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

FLOORS = ("worst", "group_min", "zero")
_KEYS = {"gate", "threshold", "gated", "floor"}


class GateError(ValueError, argparse.ArgumentTypeError):
    """A malformed gate; argparse prints the message of this type instead of hiding it."""


class RewardGate(dict[str, Any]):
    """A validated `{gate, threshold, gated, floor}`; a dict, so that configs stay plain JSON.

    Keys:
        gate (str): name of the reward that must be >= threshold.
        threshold (float): in the units of that reward.
        gated (list[str] or None): names of the rewards withheld from a completion that fails; None = all others.
        floor (str): what it gets instead: "worst" (default) = min(0, group minimum), "group_min", "zero".

    Raises:
        GateError: naming the key, the value and the fix.
    """

    def __init__(self, spec: str | Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        if isinstance(spec, str):
            spec = _parse(spec)
        elif isinstance(spec, Iterable) and not isinstance(spec, Mapping):
            # dataclasses.asdict rebuilds a dict from its pairs; printing a config does that.
            spec = _from_pairs(spec)
        if not isinstance(spec, Mapping):
            raise GateError(f"reward_gates: each gate is a mapping like {_EXAMPLE}, got {spec!r}.")
        unknown = sorted(set(spec) - _KEYS)
        if unknown:
            raise GateError(f"reward_gates: unknown key(s) {unknown} in {dict(spec)!r}. Known: {sorted(_KEYS)}.")
        super().__init__(
            gate=_name(spec.get("gate"), "gate"),
            threshold=_threshold(spec.get("threshold")),
            gated=_gated(spec.get("gated")),
            floor=_floor(spec.get("floor", "worst")),
        )


_EXAMPLE = '{"gate": "safety", "threshold": 0.5, "gated": ["helpfulness"]}'


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GateError(f"reward_gates: {text!r} is not JSON ({error}). Example: '{_EXAMPLE}'.") from None


def _from_pairs(pairs: Any) -> Any:
    pairs = list(pairs)
    try:
        return dict(pairs)
    except (TypeError, ValueError):
        return pairs


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise GateError(f"reward_gates: `{key}` must be the name of a reward function, got {value!r}.")
    return value


def _threshold(value: Any) -> float:
    if isinstance(value, str):  # YAML reads 1e-3, without a point, as text
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise GateError(f"reward_gates: `threshold` must be a finite number, got {value!r}. Example: {_EXAMPLE}.")
    return float(value)


def _gated(value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise GateError(f"reward_gates: `gated` must be a non-empty list of reward names, got {value!r}.")
    return [_name(item, "gated") for item in value]


def _floor(value: Any) -> str:
    if value not in FLOORS:
        raise GateError(f"reward_gates: `floor` must be one of {list(FLOORS)}, got {value!r}.")
    return str(value)

"""The README's table is true: options, tests and recipes exist, and none is missing from it."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from trl_ext import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig
from trl_ext.trainers.dpo_config import PreferenceOptions
from trl_ext.trainers.reward_config import RewardOptions
from trl_ext.trainers.rollout_config import RolloutOptions

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = ROOT / "launch" / "recipes"
CONFIGS = (GRPOConfig, RLOOConfig, DPOConfig, KTOConfig, RewardConfig)
OPTIONS = (RolloutOptions, PreferenceOptions, RewardOptions)
# Options of the command line that belong to no training config.
MODEL_OPTIONS = {"load_in_4bit", "reward_funcs"}


def table() -> list[dict[str, str]]:
    """The rows of THE TABLE."""
    lines = README.split("## The table", 1)[1].split("\n## ", 1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", table(), ids=lambda row: row["idea"])
def test_each_row_is_true(row: dict[str, str]) -> None:
    known = {field.name for config in CONFIGS for field in fields(config)} | MODEL_OPTIONS
    for option in codes(row["option"]):
        assert option.split(":")[0] in known, option
    (test,) = codes(row["test"])
    path, name = test.split("::")
    functions = [
        node.name
        for node in ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert name in functions, test
    (recipe,) = codes(row["recipe"])
    assert (RECIPES / recipe).is_file(), recipe


def test_no_option_and_no_recipe_is_missing() -> None:
    options = {option.split(":")[0] for row in table() for option in codes(row["option"])}
    ours = {field.name for group in OPTIONS for field in fields(group)}
    assert ours <= options, sorted(ours - options)
    recipes = {recipe for row in table() for recipe in codes(row["recipe"])}
    assert {path.name for path in RECIPES.glob("*.yaml")} == recipes


@pytest.mark.parametrize("group", OPTIONS)
def test_every_option_is_documented_beside_its_field(group: type) -> None:
    for field in fields(group):
        assert field.name in (group.__doc__ or ""), field.name
        assert field.metadata["help"], field.name

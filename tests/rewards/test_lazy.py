"""Importing the package must not need, or load, the optional packages."""

import subprocess
import sys

import pytest

from trl_ext import rewards


def test_import_loads_no_optional_package():
    code = (
        "import sys, trl_ext.rewards, trl_ext.rewards.tone, trl_ext.rewards.instructions, trl_ext.rewards.answers\n"
        "print([m for m in ('vaderSentiment', 'if_verifiable', 'nltk', 'torch', 'transformers') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    "name, missing", [("tone_reward", "vaderSentiment.vaderSentiment"), ("instruction_reward", "if_verifiable.ifeval")]
)
def test_a_missing_package_names_the_extra(monkeypatch, name, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    if name == "tone_reward":
        from trl_ext.rewards.tone import _analyzer as cached
    else:
        from trl_ext.rewards.instructions import _ifeval as cached

        monkeypatch.setitem(sys.modules, "if_verifiable.ifeval.instructions_registry", None)
    cached.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'trl-ext\[quickstart\]'"):
        rewards.load_reward(name)(completions=["x"], instruction_id_list=[["punctuation:no_comma"]])


def test_every_ranged_reward_loads_and_is_named_after_itself():
    for name in rewards.REWARD_RANGES:
        assert rewards.load_reward(name).__name__ == name


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="tone"):
        rewards.load_reward("beauty")
    with pytest.raises(AttributeError):
        rewards.beauty  # noqa: B018

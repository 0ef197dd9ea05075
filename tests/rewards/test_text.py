"""The one helper that makes rewards independent of TRL's two completion formats."""

import pytest

from trl_ext.rewards import completion_text


@pytest.mark.parametrize(
    "completion",
    [
        "Hello 你好",
        [{"role": "assistant", "content": "Hello 你好"}],
        [{"role": "user", "content": "ignored"}, {"role": "assistant", "content": "Hello 你好"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "你好"}]}],
    ],
)
def test_every_format_gives_the_same_text(completion):
    assert completion_text(completion) == "Hello 你好"


@pytest.mark.parametrize("completion", ["", [], [{"role": "assistant", "content": None}], [{"role": "assistant"}]])
def test_nothing_is_the_empty_string(completion):
    assert completion_text(completion) == ""


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="int"):
        completion_text(3)

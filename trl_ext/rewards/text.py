"""One helper: the text of a completion, whichever of TRL's two formats it comes in."""

from typing import Any


def completion_text(completion: Any) -> str:
    """The text of one completion (or prompt).

    Args:
        completion: a string (TRL's standard format) or a list of `{"role", "content"}` messages (conversational
            format). Of a list, the last message counts. `content` may be a string, None or a list of
            `{"type": "text", "text": ...}` parts.

    Returns:
        The text; "" for an empty list or missing content.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, dict):
        return _content_text(completion.get("content"))
    if isinstance(completion, list):
        return completion_text(completion[-1]) if completion else ""
    raise TypeError(f"a completion is a string or a list of messages, got {type(completion).__name__}")


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)

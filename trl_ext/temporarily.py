"""Attributes for the duration of a block; a module of its own because importing `seams` takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes for the duration of the block and restore them, also after an exception."""
    previous = {name: getattr(target, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(target, name, value)

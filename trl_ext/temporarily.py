"""Attributes for the duration of a block; a module of its own because importing `seams` takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes for the duration of the block and restore them, also after an exception.

    An attribute that `target` inherited (from its class, or a class from its base) is inherited again afterwards.
    """
    previous = {name: getattr(target, name) for name in attributes}
    inherited = {name for name in attributes if name not in vars(target) and not _is_property(target, name)}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in previous.items():
            if name not in inherited:
                setattr(target, name, value)
            elif name in vars(target):
                delattr(target, name)


def _is_property(target: Any, name: str) -> bool:
    return hasattr(getattr(type(target), name, None), "__set__")

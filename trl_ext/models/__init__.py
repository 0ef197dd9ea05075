"""Models that need no download: the embedded default model, and a tiny random one for tests.

Exports are lazy, so that importing this package does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .embedded import embedded_model_available, prepare_embedded_model, resolve_model
    from .tiny import build_tiny_model

_HOMES = {
    "build_tiny_model": "tiny",
    "embedded_model_available": "embedded",
    "prepare_embedded_model": "embedded",
    "resolve_model": "embedded",
}

__all__ = ["build_tiny_model", "embedded_model_available", "prepare_embedded_model", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

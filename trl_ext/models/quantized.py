"""Right gradients through a 4-bit base on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.logging import get_logger

logger = get_logger(__name__)


def prepare_quantized(arguments: Mapping[str, Any]) -> None:
    """`keep_gradients_of_4bit_on_cpu` when these arguments of a trainer ask for a 4-bit base, or hold one."""
    init_kwargs = getattr(arguments.get("args"), "model_init_kwargs", None) or {}
    quantized = (
        arguments.get("quantization_config") is not None
        or (isinstance(init_kwargs, Mapping) and init_kwargs.get("quantization_config") is not None)
        or getattr(arguments.get("model"), "is_loaded_in_4bit", False)
    )
    if quantized:
        keep_gradients_of_4bit_on_cpu()


def keep_gradients_of_4bit_on_cpu() -> bool:
    """Keep bitsandbytes on its differentiable path on CPUs with AVX512-BF16; call it before a 4-bit model is loaded.

    There, the first forward in evaluation mode (a generation, an evaluation) repacks 4-bit weights for a kernel that
    has no backward pass, and later training silently loses the gradient that flows through the base: about a third of
    it was left in a measurement. The differentiable path is slower at generating text.

    Returns:
        Whether anything had to be changed.
    """
    if torch.accelerator.is_available():
        return False
    try:
        import bitsandbytes.nn.modules as modules
    except ImportError:
        return False  # loading the model says that it is missing
    if not getattr(modules, "has_avx512bf16", lambda: False)():
        return False
    modules.has_avx512bf16 = lambda: False
    logger.warning(
        "4-bit training on this CPU: bitsandbytes' AVX512-BF16 inference kernel, which has no backward pass, is "
        "switched off."
    )
    return True

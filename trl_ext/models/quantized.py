"""Right gradients through a 4-bit base on a CPU.

On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first forward in evaluation mode (a generation, an
evaluation) for a kernel that has no backward pass. Later training silently loses the gradient that flows through the
base: a third of it was left in a measurement. Its other path is slower at generating text, and right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils.logging import get_logger

logger = get_logger(__name__)


def prepare_quantized(arguments: Mapping[str, Any]) -> None:
    """Keep the gradients of a 4-bit base that these arguments of a trainer ask for, or hold.

    Raises:
        ValueError: the model that is given has already lost them.
    """
    model = arguments.get("model")
    if isinstance(model, torch.nn.Module):
        keep_gradients_of_loaded(model)
        return
    init_kwargs = getattr(arguments.get("args"), "model_init_kwargs", None) or {}
    in_kwargs = isinstance(init_kwargs, Mapping) and init_kwargs.get("quantization_config") is not None
    if arguments.get("quantization_config") is not None or in_kwargs:
        keep_gradients_of_4bit_on_cpu()


def keep_gradients_of_4bit_on_cpu() -> bool:
    """Switch the repacking off for 4-bit models that will be loaded; returns whether anything had to be changed."""
    if torch.accelerator.is_available():
        return False
    try:
        import bitsandbytes.nn.modules as modules
    except ImportError:
        return False  # loading the model says that it is missing
    if not modules.has_avx512bf16():
        return False
    modules.has_avx512bf16 = lambda: False
    logger.warning(
        "4-bit training on this CPU: bitsandbytes' AVX512-BF16 kernel, which has no backward pass, is switched off."
    )
    return True


def keep_gradients_of_loaded(model: torch.nn.Module) -> None:
    """Switch the repacking off in a 4-bit model that is loaded already; nothing to do for other models.

    Raises:
        ValueError: its weights are repacked, because it has run in evaluation mode.
    """
    for module in model.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                "This 4-bit model has run in evaluation mode on a CPU with AVX512-BF16: its weights are repacked for a "
                "kernel without a backward pass, so training it would lose most of the gradient. Load it anew, or "
                "give the trainer its name and a quantization_config."
            )
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]

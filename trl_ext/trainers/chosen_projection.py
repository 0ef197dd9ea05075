"""`project_chosen_gradient`: keep an update from making the chosen answers less likely, in gradient space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trl_ext.formulas.preference import projection_coefficient


class ChosenProjection:
    """Gradient of the chosen log-probability over one optimiser step, and the projection of the update on it.

    The gradient is accumulated in one flat float32 buffer over the trainable parameters, beside autograd's own
    `.grad`: no hook of DDP or DeepSpeed sees it. It is summed over micro-batches and ranks, so it belongs to the whole
    batch as the update does.

    Args:
        model: whose trainable parameters, by name, make up the vector.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def add(self, chosen_logps: torch.Tensor) -> None:
        """Add the gradient of sum(chosen_logps), (B,), whose graph is kept for the loss."""
        if self._flat is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            self._flat = torch.zeros(sum(sizes), device=chosen_logps.device)
            self._views = [
                part.view_as(parameter)
                for part, parameter in zip(self._flat.split(sizes), self.parameters, strict=True)
            ]
        gradients = torch.autograd.grad(chosen_logps.sum(), self.parameters, retain_graph=True, allow_unused=True)
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                view.add_(gradient)

    def apply(
        self,
        gradients: Callable[[], Iterable[torch.Tensor | None]],
        write: Callable[[torch.nn.Parameter, torch.Tensor], None] | None,
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, float]:
        """Project the gradients of the step and start over.

        Args:
            gradients: yields the full gradient of each parameter, in order; called twice.
            write: stores a new gradient where `gradients` yields copies; None changes them in place.
            reduce: sum over ranks, in place or not.

        Returns:
            `projection/cosine` between gradient and chosen gradient (> 0 is harmful) and `projection/active`.

        Raises:
            FloatingPointError: a gradient is not finite.
        """
        if self._flat is None:
            return {}
        self._flat.copy_(reduce(self._flat))
        dot, gradient_square, chosen_square = self._products(gradients())
        if not all(map(math.isfinite, (dot, gradient_square, chosen_square))):
            raise FloatingPointError(
                "project_chosen_gradient met a gradient that is not finite: the policy has diverged. Lower "
                "learning_rate, or raise beta."
            )
        coefficient = projection_coefficient(dot, chosen_square)
        if coefficient > 0:
            for parameter, gradient, view in zip(self.parameters, gradients(), self._views, strict=True):
                if gradient is None:
                    continue
                projected = gradient.sub_(view.to(gradient.dtype), alpha=coefficient)
                if write is not None:
                    write(parameter, projected)
        self._flat.zero_()
        size = math.sqrt(gradient_square * chosen_square)
        return {"projection/cosine": dot / size if size else 0.0, "projection/active": float(coefficient > 0)}

    def _products(self, gradients: Iterable[torch.Tensor | None]) -> list[float]:
        """[g . c, g . g, c . c], read from the device once."""
        rows = [
            torch.stack([(gradient.float() * view).sum(), gradient.float().square().sum(), view.square().sum()])
            for gradient, view in zip(gradients, self._views, strict=True)
            if gradient is not None
        ]
        return torch.stack(rows).sum(0).tolist() if rows else [0.0, 0.0, 0.0]


def deepspeed_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterable[Any]:
    """The whole gradient of each parameter of a ZeRO-1/2 engine, between its backward pass and its step."""
    from deepspeed.utils import safe_get_full_grad

    for parameter in parameters:
        yield safe_get_full_grad(parameter)


def write_deepspeed_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Give it back to the engine; each rank keeps its part."""
    from deepspeed.utils import safe_set_full_grad

    safe_set_full_grad(parameter, gradient)

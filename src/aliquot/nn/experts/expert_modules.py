"""Find the modules of a model that are experts, and attach to their weights where an engine wants gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


def weights_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return the two large weights of a module of experts; None for another module."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    return module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj  # type: ignore[return-value]


def has_experts(model: nn.Module) -> bool:
    return any(weights_of(module) is not None for module in model.modules())


def experts_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained large weights of experts that belong to one module alone."""
    pairs = [weights for module in model.modules() if (weights := weights_of(module)) is not None]
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [weight for pair in pairs if all(names[id(w)] == 1 and w.requires_grad for w in pair) for weight in pair]


Passes = Callable[[range], Iterable[int]]

_ATTRIBUTE = "aliquot_expert_gradients"
_PASSES = "aliquot_expert_passes"


class ExpertGradients(Protocol):
    """Receives the gradient of one weight in a backward pass: all blocks in order, or the whole."""

    def begin(self) -> Iterable[tuple[int, int]] | None:
        """Begin a gradient: return experts [a, b) of each block; None if the gradient must come as a whole."""
        ...

    def buffer(self, first: int, last: int) -> Tensor:
        """Return a buffer for the gradient of experts [first, last), in the weight's dtype; `publish` follows."""
        ...

    def publish(self, present: bool) -> None:
        """Publish the filled buffer; it is unfilled if `present` is false, because no expert had a token."""
        ...

    def whole(self, gradient: Tensor) -> None: ...


def send_to(weight: nn.Parameter, gradients: ExpertGradients | None) -> None:
    """Send the gradient of `weight` to `gradients` instead of autograd; None: to autograd again."""
    if gradients is not None:
        setattr(weight, _ATTRIBUTE, gradients)
    elif hasattr(weight, _ATTRIBUTE):
        delattr(weight, _ATTRIBUTE)


def gradients_of(weight: Tensor) -> ExpertGradients | None:
    return getattr(weight, _ATTRIBUTE, None)


def pass_over(module: nn.Module, passes: Passes) -> None:
    """Return the experts to compute, in order; the planner computes two and extrapolates to all."""
    setattr(module, _PASSES, passes)


def passes_of(module: nn.Module) -> Passes:
    passes: Passes = getattr(module, _PASSES, iter)
    return passes

"""Find the modules of a model that are experts, and attach to their weights where an engine wants gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


def weights_of(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """The two large weights of a module of experts that transformers hands to `sorted_experts`; None: it is none."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    return module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj  # type: ignore[return-value]


def has_experts(model: nn.Module) -> bool:
    return any(weights_of(module) is not None for module in model.modules())


def experts_weights(model: nn.Module) -> list[nn.Parameter]:
    """Large weights of experts that learn and belong to one module alone."""
    pairs = [weights for module in model.modules() if (weights := weights_of(module)) is not None]
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [each for pair in pairs if all(names[id(w)] == 1 and w.requires_grad for w in pair) for each in pair]


Passes = Callable[[range], Iterable[int]]

_ATTRIBUTE = "aliquot_expert_gradients"
_PASSES = "aliquot_expert_passes"


class ExpertGradients(Protocol):
    """Of one weight. In a backward pass either all blocks, in order, or the whole."""

    def begin(self) -> Iterable[tuple[int, int]] | None:
        """It is about to come. Experts [a, b) of each block; None: not this weight's turn, it must come as a whole."""
        ...

    def buffer(self, first: int, last: int) -> Tensor:
        """Room for the gradient of experts [first, last), of the weight's dtype; then comes `publish`."""
        ...

    def publish(self, present: bool) -> None:
        """The buffer is filled; not `present`: no expert of it had a token, and it was left as it is."""
        ...

    def whole(self, gradient: Tensor) -> None: ...


def send_to(weight: nn.Parameter, gradients: ExpertGradients | None) -> None:
    """The gradient of `weight` goes there instead of to autograd from now on; None: to autograd."""
    if gradients is not None:
        setattr(weight, _ATTRIBUTE, gradients)
    elif hasattr(weight, _ATTRIBUTE):
        delattr(weight, _ATTRIBUTE)


def gradients_of(weight: Tensor) -> ExpertGradients | None:
    return getattr(weight, _ATTRIBUTE, None)


def pass_over(module: nn.Module, passes: Passes) -> None:
    """Which of its experts are computed, in order: the planner takes two, whose work it counts as that of all."""
    setattr(module, _PASSES, passes)


def passes_of(module: nn.Module) -> Passes:
    found: Passes = getattr(module, _PASSES, iter)
    return found

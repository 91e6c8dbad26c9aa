"""What an engine or the planner tells experts: where the gradient of a weight [E, ., .] goes, expert by expert, where
it is not to exist as a whole, and which of them are run through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

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

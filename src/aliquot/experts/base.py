"""Where the gradient of an experts' weight [E, ., .] goes, expert by expert, where it is not to exist as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

_ATTRIBUTE = "aliquot_expert_gradients"


class ExpertGradients(Protocol):
    """Of one weight. In a backward pass either all blocks, in order, or the whole."""

    def begin(self) -> Sequence[tuple[int, int]] | None:
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

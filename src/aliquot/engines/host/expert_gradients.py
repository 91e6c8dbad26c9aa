"""Gradients of experts on their way into the ring: expert by expert, while backward is at them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from aliquot.engines.host.host_gradients import HostGradients
from aliquot.experts.sorted_experts import weights_of
from aliquot.models.structure import decoder_layers


class RingGradients:
    """Of weight `index` of the engine: see experts/base.py."""

    def __init__(self, gradients: HostGradients, index: int, shape: tuple[int, ...]) -> None:
        self._gradients = gradients
        self._index = index
        self._shape = shape
        self._blocks = tuple(pairwise(gradients.row_edges(index)))
        self._row_numel = shape[1] * shape[2]

    def blocks(self) -> Sequence[tuple[int, int]] | None:
        return self._blocks if self._gradients.begin(self._index) else None

    def buffer(self, first: int, last: int) -> Tensor:
        start, stop = first * self._row_numel, last * self._row_numel
        return self._gradients.buffer(self._index, start, stop).view(-1, *self._shape[1:])

    def publish(self, present: bool) -> None:
        self._gradients.publish(present)

    def whole(self, gradient: Tensor) -> None:
        self._gradients.arrived(self._index, gradient)


def experts_weights(model: nn.Module) -> list[nn.Parameter]:
    """Large weights of experts that learn and belong to one module alone."""
    found = [weights for module in model.modules() if (weights := weights_of(module)) is not None]
    names = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    once = {each for each in names if names.count(each) == 1}
    return [each for pair in found if all(id(w) in once and w.requires_grad for w in pair) for each in pair]


def experts_first(model: nn.Module, order: Sequence[int]) -> list[int]:
    """`order` of weights by index, in which backward comes to them, with the experts' first in each layer.

    What follows them in the module, a norm's weight for one, gets its gradient later than they do.
    """
    parameters = list(model.parameters())
    experts = {id(weight) for weight in experts_weights(model)}
    layer_of = {id(p): at for at, layer in enumerate(decoder_layers(model)) for p in layer.parameters()}
    found: list[int] = []
    for at, index in enumerate(order):
        layer = layer_of.get(id(parameters[index]))
        if id(parameters[index]) not in experts or layer is None:
            found.append(index)
            continue
        # Before the first of its layer that is no expert's.
        place = next(
            (
                i
                for i, before in enumerate(found)
                if layer_of.get(id(parameters[before])) == layer and id(parameters[before]) not in experts
            ),
            at,
        )
        found.insert(place, index)
    return found

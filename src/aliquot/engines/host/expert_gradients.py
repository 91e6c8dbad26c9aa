"""Gradients of experts on their way into the ring: expert by expert, while backward is at them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from aliquot.engines.host.host_gradients import HostGradients
from aliquot.models.structure import decoder_layers
from aliquot.nn.experts.expert_modules import experts_weights


class RingGradients:
    """Of weight `index` of the engine: see nn/experts/expert_modules.py."""

    def __init__(self, gradients: HostGradients, index: int, shape: tuple[int, ...]) -> None:
        self._gradients = gradients
        self._index = index
        self._shape = shape
        self._blocks = tuple(pairwise(gradients.row_edges(index)))
        self._row_numel = shape[1] * shape[2]

    def begin(self) -> Sequence[tuple[int, int]] | None:
        return self._blocks if self._gradients.begin(self._index) else None

    def buffer(self, first: int, last: int) -> Tensor:
        start, stop = first * self._row_numel, last * self._row_numel
        return self._gradients.buffer(self._index, start, stop).view(-1, *self._shape[1:])

    def publish(self, present: bool) -> None:
        self._gradients.publish(present)

    def whole(self, gradient: Tensor) -> None:
        self._gradients.arrived(self._index, gradient)


def experts_first(model: nn.Module, order: Sequence[int]) -> list[int]:
    """`order` of weights by index, in which backward comes to them, with the experts' first in each layer.

    What follows them in the layer, a norm's weight for one, gets its gradient later than they do.
    """
    parameters = list(model.parameters())
    experts = {id(weight) for weight in experts_weights(model)}
    layer_of = {id(p): at for at, layer in enumerate(decoder_layers(model)) for p in layer.parameters()}
    begins: dict[int, int] = {}  # where in `order` a layer does

    def place(at: int, index: int) -> tuple[int, bool]:
        layer = layer_of.get(id(parameters[index]))
        begin = at if layer is None else begins.setdefault(layer, at)
        return begin, id(parameters[index]) not in experts

    places = [(*place(at, index), index) for at, index in enumerate(order)]
    return [index for _, _, index in sorted(places, key=lambda each: each[:2])]

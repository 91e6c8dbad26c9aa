"""The orders in which forward and backward passes use the weights. Every rank follows the same orders.

All orders are lists of indices into the model's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from aliquot.models.structure import decoder_layers
from aliquot.nn.experts.expert_modules import experts_weights


@dataclass(frozen=True)
class GradientOrder:
    """The order in which a rank stages the gradients of a micro-batch: `head`, then `dense`, then `looked_up`.

    Frozen weights are in none of the three. A tied embedding may be in two, because it gets a gradient from each.
    """

    dense: Sequence[int]  # autograd completes these gradients
    head: Sequence[int] = ()  # the fused loss hands over this gradient, before the backward pass
    looked_up: Sequence[int] = ()  # the engine hands over rows of this gradient, after the backward pass

    @classmethod
    def from_model(
        cls, model: nn.Module, head: nn.Parameter | None, looked_up: nn.Parameter | None, packs: bool
    ) -> Self:
        """Derive the order from the model.

        Args:
            head: the weight whose gradient the fused loss computes; None if autograd does.
            looked_up: the embedding whose gradient arrives as rows; None if autograd computes it whole.
            packs: several documents are one call, so that experts hand over their gradients one by one.
        """
        parameters = list(model.parameters())
        heads = [at for at, weight in enumerate(parameters) if weight is head and weight.requires_grad]
        embeddings = [at for at, weight in enumerate(parameters) if weight is looked_up and weight.requires_grad]
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        # A tied embedding that the model itself looks up gets a gradient from autograd, too.
        elsewhere = [] if looked_up is None and head is embedding else [*heads, *embeddings]
        dense = [at for at, weight in enumerate(parameters) if weight.requires_grad and at not in elsewhere][::-1]
        return cls(_experts_first(model, dense) if packs else dense, heads, embeddings)

    @property
    def complete_at_once(self) -> set[int]:
        """Weights whose sum of a micro-batch is complete after one whole gradient.

        The rows of an embedding that is the head, too, travel separately and do not count.
        """
        return set(self.head) ^ set(self.dense)


def _experts_first(model: nn.Module, order: Sequence[int]) -> list[int]:
    """Move the experts of each layer before the layer's other weights in `order`, the order of the backward pass.

    Weights that follow the experts in the layer, such as a norm's, get their gradients after the experts do.
    """
    parameters = list(model.parameters())
    experts = {id(weight) for weight in experts_weights(model)}
    layer_of = {id(p): at for at, layer in enumerate(decoder_layers(model)) for p in layer.parameters()}
    layer_starts: dict[int, int] = {}  # the place in `order` of a layer's first weight

    def place(at: int, index: int) -> tuple[int, bool]:
        layer = layer_of.get(id(parameters[index]))
        start = at if layer is None else layer_starts.setdefault(layer, at)
        return start, id(parameters[index]) not in experts

    places = [(*place(at, index), index) for at, index in enumerate(order)]
    return [index for _, _, index in sorted(places, key=lambda entry: entry[:2])]


class ForwardOrder:
    """The order in which a forward pass uses the weights: `first`, those of each of the `layers`, then the head."""

    def __init__(self, model: nn.Module, head: nn.Parameter | None) -> None:
        """`head`: the weight that the fused loss uses after the model; None if the model itself uses it."""
        index = {id(parameter): at for at, parameter in enumerate(model.parameters())}
        self.layers = [
            (layer, [index[id(parameter)] for parameter in layer.parameters()]) for layer in decoder_layers(model)
        ]
        in_layers = dict.fromkeys(at for _, indices in self.layers for at in indices)
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        last = [] if head is None or head is embedding else [index[id(head)]]
        self.first = [at for at in index.values() if at not in in_layers and at not in last]
        self.all = [*self.first, *in_layers, *last]

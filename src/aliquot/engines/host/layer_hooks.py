"""Hooks that get the weights of a decoder layer ready before each use, in forward and backward passes.

Recomputation in the backward pass uses the weights that its layer already has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aliquot.engines.engine_plan import streamed_layers
from aliquot.models.structure import decoder_layers

Layers = Sequence[tuple[nn.Module, Sequence[int]]]  # the module of a layer, and indices of some of its weights


def spread_layers(model: nn.Module, count: int, indices: Mapping[int, int]) -> Layers:
    """Return `count` layers, evenly spread, with those of their weights that no other layer uses.

    `indices`: the weights to choose from, as {id of the parameter: index of the weight}.
    """
    layers = decoder_layers(model)
    users = Counter(id(parameter) for layer in layers for parameter in set(layer.parameters()))
    alone = {parameter: index for parameter, index in indices.items() if users[parameter] == 1}
    chosen = [layers[at] for at in streamed_layers(len(layers), count)]
    return [(layer, [alone[id(weight)] for weight in layer.parameters() if id(weight) in alone]) for layer in chosen]


class LayerHooks(ABC):
    """Calls `_use` with the number of a layer before each use. All ranks of a host use layers in the same order."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._hooks: list[RemovableHandle] = []
        self._has_backward = [False] * len(modules)  # whether the last forward pass of a layer has a backward pass

    @abstractmethod
    def _use(self, layer: int) -> None:
        """Get the weights of a layer ready."""

    def _use_in_backward(self, layer: int) -> None:
        """Get the weights of a layer ready for its backward pass."""
        self._use(layer)

    def attach(self) -> None:
        """Register the layers' hooks. Hooks that wait for updated weights must be registered earlier, to run first."""
        self._hooks = [hook for layer, module in enumerate(self._modules) for hook in self._register(layer, module)]

    def pass_through(self) -> None:
        """Use the layers like a forward pass, on a rank without a micro-batch, because other ranks need its ranges."""
        for layer in range(len(self._modules)):
            self._use(layer)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _register(self, layer: int, module: nn.Module) -> list[RemovableHandle]:
        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._has_backward[layer] = isinstance(hidden, Tensor) and hidden.requires_grad
            if self._has_backward[layer]:
                # The layer's backward pass begins when the gradient of its output is known.
                hidden.register_hook(lambda _: self._use_in_backward(layer))

        return [
            module.register_forward_pre_hook(lambda *_: self._use(layer)), module.register_forward_hook(after)
        ]  # fmt: skip


class LayerSlots(LayerHooks):
    """Layers whose weights take turns in a few slots of memory: layer i uses slot i modulo the number of slots."""

    def __init__(self, modules: Sequence[nn.Module], slots: int) -> None:
        super().__init__(modules)
        self._layer_in = [-1] * slots  # -1: no layer
        self._current = -1

    def _use(self, layer: int) -> None:
        if layer != self._current:
            self._end_use()
            self._current = layer
            self._fetch(layer)

    @abstractmethod
    def _end_use(self) -> None:
        """Note that the use of the current layer, if there is one, is over."""

    def _fetch(self, layer: int) -> None:
        """Begin to get the weights of a layer into its slot, unless they are there."""
        slot = layer % len(self._layer_in)
        if self._layer_in[slot] != layer:
            before, self._layer_in[slot] = self._layer_in[slot], layer
            self._fill(layer, slot, before)

    @abstractmethod
    def _fill(self, layer: int, slot: int, before: int) -> None:
        """Replace the weights of layer `before` in a slot."""

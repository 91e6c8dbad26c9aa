"""The shape of a model for the planner: weights by group, and kinds of decoder layers. Numbers only, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers, at `positions`, with weights of the same shapes and the same attention window."""

    weights: tuple[Shape, ...]
    learned: tuple[Shape, ...]  # weights that are trained
    window: int | None
    positions: tuple[int, ...]

    @property
    def frozen(self) -> list[Shape]:
        return list((Counter(self.weights) - Counter(self.learned)).elements())


@dataclass(frozen=True)
class ModelShape:
    """Shapes of all weights. Layers, `embedding`, `head` and `rest` make up `weights`; a tied head counts once."""

    name: str  # of the model's class
    weights: tuple[Shape, ...]  # in the model's order
    learned: tuple[Shape, ...]  # weights that are trained
    kinds: tuple[LayerKind, ...]
    embedding: Shape
    head: Shape | None  # None: tied to the embedding
    rest: tuple[Shape, ...]  # final norm and the like
    embedding_learns: bool
    head_learns: bool
    rest_learns: bool
    embedding_is_added_to: bool  # engine host adds rows of tokens to its gradient, or a look-up next to a head
    dtype_bytes: int  # bytes of an element in the source files
    packs: bool = True  # whether a call takes several documents

    @cached_property
    def numel(self) -> int:
        return sum(map(numel, self.weights))

    @cached_property
    def learned_numel(self) -> int:
        return sum(map(numel, self.learned))

    @cached_property
    def alike(self) -> Counter[Shape]:
        """Number of trained weights of each shape."""
        return Counter(self.learned)

    @property
    def vocabulary(self) -> int:
        return self.embedding[0]

    @property
    def width(self) -> int:
        return self.embedding[1]

    @property
    def layers(self) -> int:
        return sum(len(kind.positions) for kind in self.kinds)

    def padded_groups(self, ranks: int) -> list[int]:
        """Return the elements of each group that engine fsdp gathers, with weights padded to equal parts.

        The groups are the root, and then the layers and the head in the order of the forward pass.
        """
        head = [] if self.head is None else [_padded([self.head], ranks)]
        layers = self._by_layer([_padded(kind.weights, ranks) for kind in self.kinds])
        return [_padded([self.embedding, *self.rest], ranks), *layers, *head]

    def learned_padded_groups(self, ranks: int) -> list[int]:
        """Return the trained elements of each group of `padded_groups`."""
        head = [] if self.head is None else [_padded([self.head] if self.head_learns else [], ranks)]
        layers = self._by_layer([_padded(kind.learned, ranks) for kind in self.kinds])
        embedding = [self.embedding] if self.embedding_learns else []
        return [_padded([*embedding, *(self.rest if self.rest_learns else ())], ranks), *layers, *head]

    def _by_layer(self, kind_values: Sequence[int]) -> list[int]:
        """Return values of layers in order, from values of their kinds."""
        layer_values = {at: value for kind, value in zip(self.kinds, kind_values, strict=True) for at in kind.positions}
        return [layer_values[at] for at in sorted(layer_values)]


def numel(shape: Shape) -> int:
    return math.prod(shape)


def padded_share(shape: Shape, ranks: int) -> int:
    """Return the elements of the largest part of a weight, ceil(rows / ranks) rows."""
    return -(-(shape[0] if shape else 1) // ranks) * math.prod(shape[1:])


def _padded(weights: Iterable[Shape], ranks: int) -> int:
    return sum(padded_share(weight, ranks) * ranks for weight in weights)

"""What a model is, for the planner: its weights by group, and its kinds of decoder layers. Numbers alone, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers, at `positions`, that have weights of the same shapes and attend as far back."""

    weights: tuple[Shape, ...]
    learned: tuple[Shape, ...]  # of them
    window: int | None
    positions: tuple[int, ...]

    @property
    def frozen(self) -> list[Shape]:
        return list((Counter(self.weights) - Counter(self.learned)).elements())


@dataclass(frozen=True)
class ModelShape:
    """`layers`, `embedding` and `head` together with `rest` are all `weights`, each once; a tied head has none."""

    name: str  # of the model's class
    weights: tuple[Shape, ...]  # in the model's order
    learned: tuple[Shape, ...]  # of them, without what is frozen
    kinds: tuple[LayerKind, ...]
    embedding: Shape
    head: Shape | None  # None: tied to the embedding
    rest: tuple[Shape, ...]  # final norm and the like
    embedding_learns: bool
    head_learns: bool
    rest_learns: bool
    embedding_is_added_to: bool  # by rows of tokens, or by a look-up beside the head: in engine host
    dtype_bytes: int  # an element of the weights as they are stored
    packs: bool = True  # several documents in a call

    @cached_property
    def numel(self) -> int:
        return sum(map(numel, self.weights))

    @cached_property
    def learned_numel(self) -> int:
        return sum(map(numel, self.learned))

    @cached_property
    def alike(self) -> Counter[Shape]:
        """How many weights of each shape learn."""
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
        """Elements of what engine fsdp gathers together, weights padded to equal parts: of the root, and of each layer
        and the head in the order of the forward pass."""
        head = [] if self.head is None else [_padded([self.head], ranks)]
        layers = self._by_layer([_padded(kind.weights, ranks) for kind in self.kinds])
        return [_padded([self.embedding, *self.rest], ranks), *layers, *head]

    def learned_padded_groups(self, ranks: int) -> list[int]:
        """Of each of them what learns."""
        head = [] if self.head is None else [_padded([self.head] if self.head_learns else [], ranks)]
        layers = self._by_layer([_padded(kind.learned, ranks) for kind in self.kinds])
        embedding = [self.embedding] if self.embedding_learns else []
        return [_padded([*embedding, *(self.rest if self.rest_learns else ())], ranks), *layers, *head]

    def _by_layer(self, of_kinds: Sequence[int]) -> list[int]:
        """The layers' values in their order, of those of their kinds."""
        found = {at: value for kind, value in zip(self.kinds, of_kinds, strict=True) for at in kind.positions}
        return [found[at] for at in sorted(found)]


def numel(shape: Shape) -> int:
    return math.prod(shape)


def padded_share(shape: Shape, ranks: int) -> int:
    """Elements of the largest part of a weight by the dim-0 rule: ceil(rows / ranks) rows."""
    return -(-(shape[0] if shape else 1) // ranks) * math.prod(shape[1:])


def _padded(weights: Iterable[Shape], ranks: int) -> int:
    return sum(padded_share(weight, ranks) * ranks for weight in weights)

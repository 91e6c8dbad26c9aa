"""What a model is, for the planner: its weights by group, and its kinds of decoder layers. Numbers alone, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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
    dtype_bytes: int  # an element of the weights as they are stored

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

    def groups(self) -> list[list[Shape]]:
        """What engine fsdp gathers together, in the order of the forward pass after the root: root, layers, head."""
        of_layer = {position: list(kind.weights) for kind in self.kinds for position in kind.positions}
        layers = [of_layer[position] for position in sorted(of_layer)]
        head = [] if self.head is None else [[self.head]]
        return [[self.embedding, *self.rest], *layers, *head]

    def learned_groups(self) -> list[list[Shape]]:
        """Of each of them what learns."""
        of_layer = {position: list(kind.learned) for kind in self.kinds for position in kind.positions}
        layers = [of_layer[position] for position in sorted(of_layer)]
        head = [] if self.head is None else [[self.head] if self.head_learns else []]
        embedding = [self.embedding] if self.embedding_learns else []
        return [[*embedding, *(self.rest if self.rest_learns else ())], *layers, *head]


def numel(shape: Shape) -> int:
    return math.prod(shape)


def padded_share(shape: Shape, ranks: int) -> int:
    """Elements of the largest part of a weight by the dim-0 rule: ceil(rows / ranks) rows."""
    return -(-(shape[0] if shape else 1) // ranks) * math.prod(shape[1:])


def padded_groups(groups: Sequence[Sequence[Shape]], ranks: int) -> list[int]:
    """Elements of each group, its weights padded to equal parts."""
    return [sum(padded_share(weight, ranks) * ranks for weight in group) for group in groups]

"""What of a model's states lies on disk while it trains: what a plan decides and an engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Counts = tuple[tuple[Shape, int], ...]


@dataclass(frozen=True)
class OnDisk:
    """Of each shape, how many weights, the first of the model, have it there."""

    states: Counts = ()  # moments, and what the masters have beyond bf16: used once a step
    gradients: Counts = ()  # their sums: used once a micro-batch. A weight that is here is in `states`, too. Those of
    # the input embedding stay in memory: a look-up adds to rows that lie anywhere.
    layers: int = 0  # decoder layers, evenly spread, whose weights are there and read for each use: those in `states`,
    frozen: tuple[Shape, ...] = ()  # and of what learns nothing those of these shapes

    def __bool__(self) -> bool:
        return bool(self.states or self.layers)


def streamed_layers(layers: int, count: int) -> list[int]:
    """Which `count` of so many, evenly spread: while one is read, others compute."""
    return [at for at in range(layers) if (at + 1) * count // layers > at * count // layers]


def first_of(shapes: Sequence[Shape | None], counts: Counts, never: int | None = None) -> list[int]:
    """Which of `shapes`, a model's in its order, are meant, leaving `never` out; None: of one that learns nothing."""
    left = dict(counts)
    found = []
    for index, shape in enumerate(shapes):
        if shape is not None and index != never and left.get(shape, 0):
            left[shape] -= 1
            found.append(index)
    return found


@dataclass(frozen=True)
class Unsharded:
    weights: bool = False  # in the compute dtype, from the first forward pass of a step until its last backward pass
    gradients: bool = False  # their sums in fp32, until the last micro-batch: reduced once a step

    def __bool__(self) -> bool:
        return self.weights or self.gradients

    @property
    def words(self) -> str:
        """For people."""
        kept = [name for name, whole in (("weights", self.weights), ("gradients", self.gradients)) if whole]
        return " and ".join(kept)


SHARDED = Unsharded()

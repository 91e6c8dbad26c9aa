"""Where a run keeps its state: on disk, or whole on every rank. The plan decides, the engine follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Counts = tuple[tuple[Shape, int], ...]


@dataclass(frozen=True)
class OnDisk:
    """The weights with state on disk: by shape the number of weights, counted from the model's first."""

    states: Counts = ()  # moments, and the low halves of masters: used once a step
    # Gradient sums, used once a micro-batch, of weights that are in `states`, too. The sums of the input embedding stay
    # in memory, because a look-up adds to rows anywhere in it.
    gradients: Counts = ()
    # Decoder layers, evenly spread, whose weights lie on disk and are read for every use: the weights in `states`, and
    # frozen weights of the shapes in `frozen`.
    layers: int = 0
    frozen: tuple[Shape, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.states or self.layers)


def streamed_layers(layers: int, count: int) -> list[int]:
    """Return `count` of `layers` layers, evenly spread, so that others compute while one is read."""
    return [at for at in range(layers) if (at + 1) * count // layers > at * count // layers]


def first_of(shapes: Sequence[Shape | None], counts: Counts, never: int | None = None) -> list[int]:
    """Return the indices of the weights that `counts` selects.

    Args:
        shapes: of the model's weights, in order; None for a frozen weight.
        never: a weight that is not selected.
    """
    left = dict(counts)
    selected = []
    for index, shape in enumerate(shapes):
        if shape is not None and index != never and left.get(shape, 0):
            left[shape] -= 1
            selected.append(index)
    return selected


@dataclass(frozen=True)
class Unsharded:
    """The state that engine fsdp holds whole on every rank within an optimizer step, to communicate less."""

    weights: bool = False  # in the compute dtype, from the first forward to the last backward pass of a step
    gradients: bool = False  # fp32 sums, which are reduced only after the last micro-batch of a step

    def __bool__(self) -> bool:
        return self.weights or self.gradients

    @property
    def words(self) -> str:
        """The state, for people."""
        return " and ".join(name for name, whole in (("weights", self.weights), ("gradients", self.gradients)) if whole)


SHARDED = Unsharded()

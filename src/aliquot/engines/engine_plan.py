"""The plan of an engine: how much memory it needs, and where its state lies. Imports no torch.

The plan decides, the engine follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Counts = tuple[tuple[Shape, int], ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes that an engine needs on its largest rank, except for the two fields of a host.

    Each engine's `*_memory.py` computes them, without torch, so that a laptop can plan for engines it cannot run.
    """

    weights: int  # private
    gradients: int
    gradients_from_start: bool  # otherwise from the first backward pass on
    moments: int
    update: int  # in addition, during an update
    forward: int = 0  # gathered weights, in addition to activations
    backward: int = 0
    evaluation: int = 0
    shared_weights: int = 0  # of a host
    buffers: int = 0  # of a host
    own_gradients: int = 0  # the part of `gradients` that this rank owns
    holes: int = 0  # unused heap between large blocks that are allocated anew in every step
    streamed: int = 0  # in addition, during an update, in mappings that return to the kernel afterwards


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
    """Return the indices of the weights that `counts` selects, but for `never`. A frozen weight has the shape None."""
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

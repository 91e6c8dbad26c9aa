"""The plan of an engine: how much memory the engine needs, and where its state is stored. Imports no torch.

The planner makes these decisions, and the engine follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aliquot.config.schema import RunConfig

Shape = tuple[int, ...]
Counts = tuple[tuple[Shape, int], ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes that an engine needs on its largest rank. Only `shared_weights` and `buffers` are per host.

    Each engine's `*_memory.py` computes these bytes without torch, so that a laptop can plan for any engine.
    """

    weights: int  # private to the rank
    gradients: int
    gradients_from_start: bool  # allocated at the start; otherwise in the first backward pass
    moments: int
    update: int  # additional memory during an update
    forward: int = 0  # gathered weights, in addition to activations
    backward: int = 0
    evaluation: int = 0
    shared_weights: int = 0  # per host
    buffers: int = 0  # per host
    own_gradients: int = 0  # the part of `gradients` that this rank owns
    holes: int = 0  # fragmentation: unused heap between large blocks that every step allocates anew
    streamed: int = 0  # additional memory during an update, in mappings that return to the kernel after it


@dataclass(frozen=True)
class OnDisk:
    """The state to keep on disk. A pair (shape, n) selects the first n weights of that shape in the model."""

    states: Counts = ()  # moments and low halves of master weights, used once per optimizer step
    # Gradient sums, used once per micro-batch. Every weight selected here is also in `states`. The sums of the input
    # embedding stay in memory, because token look-ups add to rows anywhere in the embedding.
    gradients: Counts = ()
    # Number of streamed decoder layers, evenly spread over the model. Their weights are on disk and are read for every
    # use: the weights in `states`, and frozen weights with a shape in `frozen`.
    layers: int = 0
    frozen: tuple[Shape, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.states or self.layers)


def streamed_layers(layers: int, count: int) -> list[int]:
    """Choose `count` of `layers` layers to stream, evenly spread, so that other layers compute during a read."""
    return [at for at in range(layers) if (at + 1) * count // layers > at * count // layers]


def first_of(shapes: Sequence[Shape | None], counts: Counts, never: int | None = None) -> list[int]:
    """Return the indices of the weights that `counts` selects, without `never`. Frozen weights have the shape None."""
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
        """The names of the unsharded state, for messages."""
        return " and ".join(name for name, whole in (("weights", self.weights), ("gradients", self.gradients)) if whole)


SHARDED = Unsharded()


def is_single_gpu(config: RunConfig, device: str, ranks: int) -> bool:
    """Whether engine fsdp keeps all states whole on a single GPU, without FSDP2, which decodes a compressed base."""
    return device == "cuda" and ranks == 1 and config.shard.offload == "none" and config.base == "bf16"

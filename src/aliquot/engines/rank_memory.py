"""The memory that an engine needs on its largest rank. Each engine's `*_memory.py` computes it for the planner.

Those files import no torch, so that a laptop can plan for engines that it cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank, except for the two fields of a host."""

    weights: int  # private
    gradients: int
    gradients_from_start: bool  # otherwise from the first backward pass on
    moments: int
    update: int  # in addition, during an update
    forward: int  # gathered weights, in addition to activations
    backward: int
    evaluation: int
    shared_weights: int  # of a host
    buffers: int  # of a host
    own_gradients: int = 0  # the part of `gradients` that this rank owns
    holes: int = 0  # unused heap between large blocks that are allocated anew in every step
    streamed: int = 0  # in addition, during an update, in mappings that return to the kernel afterwards

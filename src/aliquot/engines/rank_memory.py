"""What an engine holds on its largest rank. Each engine says it in its `*_memory.py`, which the planner reads.

Those files import nothing that computes: a laptop plans for engines that it cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Bytes."""

    weights: int  # private
    gradients: int  # from the start, or from the first backward pass on
    gradients_from_start: bool
    moments: int
    update: int  # more while an update is made
    forward: int  # gathered, beside activations
    backward: int
    evaluation: int
    shared_weights: int  # of a host
    buffers: int  # of a host
    own_gradients: int = 0  # of gradients, what this rank itself owns, where others' parts are among them
    holes: int = 0  # of the heap, in the course of steps: large blocks that are made anew beside what stays
    streamed: int = 0  # more while an update is made, in mappings that the kernel has back after it

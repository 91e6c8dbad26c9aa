"""Sizes of optimizer state, for the optimizer and the planner. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import Literal

States = Literal["fp32", "bf16", "int8"]

BLOCK = 1 << 18  # elements of a shard that are updated at a time: 1 MiB of fp32
SCRATCH_ROWS = 4  # scratch blocks of an update: weights, gradient and both moments
SCRATCH_BYTES = SCRATCH_ROWS * 4 * BLOCK
_LONGEST_SCALED, _SHORTEST_SCALED = 256, 32


def moment_bytes(states: States, numel: int, row_numel: int) -> int:
    """Return the bytes of `numel` elements of a moment whose tensor has rows of `row_numel` (moments.py)."""
    if states == "fp32" or row_numel == 1:
        return 4 * numel
    return 2 * numel if states == "bf16" else numel + 4 * (numel // block_numel(row_numel))


def low_bytes(numel: int) -> int:
    """Return the bytes of the low halves of `numel` split master weights (master_weights.py)."""
    return 4 * -(-numel // 2)


def update_block(states: States, row_numel: int) -> int:
    """Return the number of elements to update at a time: a multiple of the block size of int8 moments."""
    unit = block_numel(row_numel) if states == "int8" and row_numel > 1 else 1
    return max(unit, BLOCK // unit * unit)


@cache
def block_numel(row_numel: int) -> int:
    """Return how many elements of an int8 moment share a scale: the largest divisor of a row's length up to 256.

    If this divisor is below 32, the whole row shares a scale.
    """
    best = max(size for size in range(1, min(row_numel, _LONGEST_SCALED) + 1) if row_numel % size == 0)
    return best if best >= _SHORTEST_SCALED else row_numel

"""Sizes of the buffers that ranks exchange; without torch, because the planner computes with them."""

from __future__ import annotations

BLOCK = 1 << 18  # weights: so many that some forty calls of numpy hardly count, and half a MiB each to work on
CODE_BYTES = 1 / 4  # of each weight, in a block with one that has changed
ALIGN_BYTES = 64  # a cache line: tensors of two ranks never share one


def aligned(size_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES

"""Sizes of frozen weights in 8 or 4 bits (weight_codes.py), for the engine and the planner. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

CompressedFormat = Literal["bf16", "int8", "nf4", "nf4_single"]  # bf16: not compressed

NF4_BLOCK = 64  # elements that share a scale, as in QLoRA
SCALE_GROUP = 256  # scales of nf4 that share an fp32 scale


def is_compressible(shape: tuple[int, ...]) -> bool:
    """Return whether any range of whole rows of a weight consists of whole nf4 blocks and whole int8 rows."""
    return len(shape) >= 2 and math.prod(shape[1:]) % NF4_BLOCK == 0


def code_bytes(name: CompressedFormat, shape: tuple[int, ...], shards: int = 1) -> int:
    """Return the bytes of a compressed weight, or of one of its `shards`."""
    return sum(code_fields(name, shape, shards))


def code_fields(name: CompressedFormat, shape: tuple[int, ...], shards: int = 1) -> list[int]:
    """Return the bytes of a shard's codes, of values that decode the scales of all shards, and of the shard's scales.

    A shard has ceil(rows / shards) rows, of which the last shards may use fewer.
    """
    scales = scale_count(name, shape, shards)
    numel = -(-shape[0] // shards) * math.prod(shape[1:])
    groups = -(-scale_count(name, shape) // SCALE_GROUP)
    if name == "nf4":
        return [numel // 2, 4 * (groups + 1), scales]
    return [numel if name == "int8" else numel // 2, 0, 4 * scales]


def scale_count(name: CompressedFormat, shape: tuple[int, ...], shards: int = 1) -> int:
    """Return the number of scales of a shard: one for each row of int8, one for each block of nf4."""
    return -(-shape[0] // shards) * math.prod(shape[1:]) // scale_unit(name, shape)


def scale_unit(name: CompressedFormat, shape: tuple[int, ...]) -> int:
    """Return the number of elements that have one scale."""
    return shape[-1] if name == "int8" else NF4_BLOCK

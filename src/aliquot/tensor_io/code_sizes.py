"""Sizes of frozen weights in 8 or 4 bits (weight_codes.py), for the engine and the planner. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

BaseFormat = Literal["int8", "nf4", "nf4_single"]
CompressedFormat = BaseFormat | Literal["bf16"]

NF4_BLOCK = 64  # elements that share a scale, as in QLoRA
SCALE_GROUP = 256  # scales of nf4 that share an fp32 scale


def is_compressible(shape: tuple[int, ...]) -> bool:
    """Return whether any range of whole rows of a weight consists of whole nf4 blocks and whole int8 rows."""
    return len(shape) >= 2 and math.prod(shape[1:]) % NF4_BLOCK == 0


def code_bytes(name: BaseFormat, shape: tuple[int, ...]) -> int:
    """Return the bytes of a compressed weight."""
    numel = math.prod(shape)
    if name == "int8":
        return numel + 4 * scale_count(name, shape)
    scales = scale_count(name, shape)
    return numel // 2 + (4 * scales if name == "nf4_single" else scales + 4 * (1 + -(-scales // SCALE_GROUP)))


def scale_count(name: BaseFormat, shape: tuple[int, ...]) -> int:
    """Return the number of scales: one for each row of int8, one for each block of nf4."""
    return math.prod(shape) // (shape[-1] if name == "int8" else NF4_BLOCK)

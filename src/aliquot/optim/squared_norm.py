"""Sums of squares of gradients: precise enough for a norm that every world size agrees on, at the speed of memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 1 << 16


def squared_norm(flat: Tensor) -> float:
    """Sum of squares of a flat tensor: in fp32 within blocks of 65,536 elements, exactly between them.

    On a GPU one reduction in fp64 does all of it: each block's sum would have to be fetched, and waited for, by itself.
    """
    if flat.device.type != "cpu":
        return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    return math.fsum(block_squares(flat))


def block_squares(flat: Tensor) -> list[float]:
    """The sum of squares of each block of a flat CPU tensor."""
    blocks = (flat[start : start + BLOCK] for start in range(0, flat.numel(), BLOCK))
    return [float(torch.linalg.vector_norm(block, dtype=torch.float32)) ** 2 for block in blocks]

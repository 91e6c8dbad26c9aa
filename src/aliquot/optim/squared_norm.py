"""Sums of squares of gradients: precise enough for a norm that every world size agrees on, at the speed of memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 1 << 16


def squared_norm(flat: Tensor) -> float:
    """Sum of squares of a flat tensor: in fp32 within blocks of 65,536 elements, exactly between them.

    On a GPU one reduction in fp64 does all of it: each block's sum would have to be fetched, and waited for, by itself.
    """
    if flat.device.type != "cpu":
        return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    blocks = (flat[start : start + _BLOCK] for start in range(0, flat.numel(), _BLOCK))
    return math.fsum(float(torch.linalg.vector_norm(block, dtype=torch.float32)) ** 2 for block in blocks)

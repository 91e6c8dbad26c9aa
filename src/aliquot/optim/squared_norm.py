"""Sums of squares of gradients: precise enough for a norm that every world size agrees on, at the speed of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 16


def squared_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Sum of squares of each: in fp32 within blocks of 65,536 elements, exactly between them.

    On a GPU in fp64, and all are fetched at once: each number would be waited for by itself.
    """
    if tensors and tensors[0].device.type != "cpu":
        return on_device(tensors)
    return [math.fsum(block_squares(tensor.view(-1))) for tensor in tensors]


def on_device(tensors: Sequence[Tensor]) -> list[float]:
    """Sums of squares of tensors of one device, none of them empty or all, with one wait."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return [norm**2 for norm in torch.stack(norms).tolist()]


def block_squares(flat: Tensor) -> list[float]:
    """The sum of squares of each block of a flat CPU tensor."""
    blocks = (flat[start : start + BLOCK] for start in range(0, flat.numel(), BLOCK))
    return [float(torch.linalg.vector_norm(block, dtype=torch.float32)) ** 2 for block in blocks]

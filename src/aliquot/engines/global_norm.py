"""Combine the gradients of all ranks to the global gradient norm, on the host or on the GPU.

The sums of squares are so precise that the norm does not depend on the world size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aliquot.distributed.ranks import gather

NORM_BLOCK = 1 << 16


def squared_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the sum of squares of each CPU tensor. fp32 sums of blocks of 65,536 elements are added exactly."""
    return [math.fsum(block_squares(tensor.view(-1))) for tensor in tensors]


def block_squares(flat: Tensor) -> list[float]:
    """Return the sum of squares of each block of a flat CPU tensor."""
    blocks = (flat[start : start + NORM_BLOCK] for start in range(0, flat.numel(), NORM_BLOCK))
    return [float(torch.linalg.vector_norm(block, dtype=torch.float32)) ** 2 for block in blocks]


def global_norm(squares: Sequence[float]) -> float:
    """Return the global gradient norm, the same on every rank; NaN if a gradient is not finite. Collective.

    `squares`: for each weight, the sum of squares of this rank's gradients.
    """
    totals = gather(math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan)
    # fsum is exact, so that the order of ranks does not matter.
    return math.sqrt(math.fsum(totals)) if all(map(math.isfinite, totals)) else math.nan


def global_norm_on_device(gradients: Sequence[Tensor]) -> Tensor:
    """Return the global norm of the gradients of all ranks, fp64 [], without waiting for their device. Collective.

    The norm is the same on every rank, and is not finite if a gradient is not finite. The gradients may be empty.
    """
    local = torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float64)).square().sum()
    squares = local.new_empty(dist.get_world_size())
    dist.all_gather_single(squares, local[None])
    return squares.sum().sqrt()

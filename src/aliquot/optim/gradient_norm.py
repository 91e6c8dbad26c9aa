"""Compute the sums of squares for the gradient norm, and the factor that clips gradients to a maximum norm.

The sums are so precise that the norm does not depend on the world size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NORM_BLOCK = 1 << 16


def squared_norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the sum of squares of each tensor. On CPU, fp32 sums of blocks of 65,536 elements are added exactly.

    On a GPU, the sums are fp64, and one transfer copies all of them, because each transfer waits for the GPU.
    """
    if tensors and tensors[0].device.type != "cpu":
        return squared_norms_on_device(tensors)
    return [math.fsum(block_squares(tensor.view(-1))) for tensor in tensors]


def squared_norms_on_device(tensors: Sequence[Tensor]) -> list[float]:
    """Return the sum of squares of each tensor, with a single wait for the device. The tensors may be empty."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return [norm**2 for norm in torch.stack(norms).tolist()]


def block_squares(flat: Tensor) -> list[float]:
    """Return the sum of squares of each block of a flat CPU tensor."""
    blocks = (flat[start : start + NORM_BLOCK] for start in range(0, flat.numel(), NORM_BLOCK))
    return [float(torch.linalg.vector_norm(block, dtype=torch.float32)) ** 2 for block in blocks]


def clip_coefficient(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return the factor for gradients of norm `grad_norm`, clamped to 1 as in torch.nn.utils.clip_grad_norm_."""
    if max_grad_norm is not None and grad_norm + 1e-6 > max_grad_norm:
        return max_grad_norm / (grad_norm + 1e-6)
    return 1.0

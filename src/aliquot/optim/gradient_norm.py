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
    """Return the sum of squares of each CPU tensor. fp32 sums of blocks of 65,536 elements are added exactly."""
    return [math.fsum(block_squares(tensor.view(-1))) for tensor in tensors]


def clip_on_device(grad_norm: Tensor, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Return `clip_coefficient` in fp32, and whether the norm is finite, without waiting for the device."""
    return (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0).float(), grad_norm.isfinite()


def block_squares(flat: Tensor) -> list[float]:
    """Return the sum of squares of each block of a flat CPU tensor."""
    blocks = (flat[start : start + NORM_BLOCK] for start in range(0, flat.numel(), NORM_BLOCK))
    return [float(torch.linalg.vector_norm(block, dtype=torch.float32)) ** 2 for block in blocks]


def clip_coefficient(grad_norm: float, max_grad_norm: float) -> float:
    """Return the factor for gradients of norm `grad_norm`, clamped to 1 as in torch.nn.utils.clip_grad_norm_."""
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))

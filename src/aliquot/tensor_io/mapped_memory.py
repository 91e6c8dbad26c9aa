"""Allocate temporary buffers outside the heap.

In the heap such buffers would lie between the blocks of a training step and fragment it: the process would grow with
every checkpoint.
"""

from __future__ import annotations

import mmap

import torch


def mapped_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros [numel] in a separate mapping, which returns to the kernel with the tensor."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)

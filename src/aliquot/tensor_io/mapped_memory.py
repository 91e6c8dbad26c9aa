"""Memory for buffers that come and go beside training, apart from the heap.

In the heap they lie among the blocks of a step: once they are gone those do not find their places again, and a process
grows with every checkpoint.
"""

from __future__ import annotations

import mmap

import torch


def mapped_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [numel] in a mapping of their own, which the kernel gets back with the tensor."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)

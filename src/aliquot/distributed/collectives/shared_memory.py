"""Memory that processes of one host share; without a name, so the kernel frees it when the last process ends.

The size of /dev/shm (64 MiB in a pod) does not limit a memfd, and the control group counts it like other memory.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

_MADV_REMOVE = 9  # from Linux; Python only has the name if its build had the header


class SharedMemory:
    """`size_bytes` of shared zeros, mapped in this process; peers map the memory by its `descriptor`."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, max(1, size_bytes))

    @classmethod
    def create(cls, size_bytes: int) -> SharedMemory:
        """Create shared memory; the first process to touch a page places it on its NUMA node. Raises OSError."""
        descriptor = os.memfd_create("aliquot", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size_bytes))
        return cls(descriptor, size_bytes)

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of the memory, which lives as long as the view."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        # Every tensor comes from its own frombuffer: views of a common base would share a version counter, and autograd
        # would take a write to one view for a write to all.
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes).view(shape)

    def release_pages(self, offset_bytes: int, size_bytes: int) -> None:
        """Return pages to the kernel in all processes that map them; they read as zeros afterwards.

        Both arguments are multiples of the page size.
        """
        self._map.madvise(_MADV_REMOVE, offset_bytes, size_bytes)

    def close_descriptor(self) -> None:
        """Close the descriptor after every peer has mapped the memory. The mapping stays."""
        os.close(self.descriptor)

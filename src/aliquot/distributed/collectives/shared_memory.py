"""Memory that the processes of one host share: no name, nothing to unlink, gone when the last of them is.

A memfd is not bound by the size of /dev/shm (64 MiB in a pod) and is counted by the control group like other memory.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

_MADV_REMOVE = 9  # of Linux; Python names it only where it was built with a header that does


class Memory:
    """`size_bytes` of zeros, mapped here; `descriptor` is what a peer maps it by."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, max(1, size_bytes))

    @classmethod
    def create(cls, size_bytes: int) -> Memory:
        """Pages are placed on the NUMA node of whoever touches them first. Raises OSError."""
        descriptor = os.memfd_create("aliquot", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size_bytes))
        return cls(descriptor, size_bytes)

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the memory, which lives as long as the view does."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        # One frombuffer a tensor: views of a common base would share its version counter, and autograd would take a
        # write to one for a write to all.
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes).view(shape)

    def give_back(self, offset_bytes: int, size_bytes: int) -> None:
        """The kernel gets these pages back, of every process that maps them: they are zeros when they are next touched.

        Both are multiples of a page.
        """
        self._map.madvise(_MADV_REMOVE, offset_bytes, size_bytes)

    def close_descriptor(self) -> None:
        """When every peer has mapped it. The mapping stays."""
        os.close(self.descriptor)

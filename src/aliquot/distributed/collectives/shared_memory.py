"""Shared memory of the processes of one host, and progress counters in shared memory.

The memory is a memfd, which has no name, so the kernel frees the memory when the last process ends. The size of
/dev/shm (64 MiB in a pod) does not limit a memfd. The control group counts a memfd like other memory.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aliquot.distributed.collectives.peers import Peers

POLL_S = 2e-4  # a waiting rank sleeps between two reads of a counter, because other ranks need its core
_MADV_REMOVE = 9  # the value on Linux; mmap.MADV_REMOVE exists only if Python was built with the right header


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
        """Return a tensor view of the memory; the memory lives at least as long as the view."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        # Every tensor comes from a separate frombuffer call. Views of a common base would share a version counter, and
        # autograd would take a write to one view for a write to all views.
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes).view(shape)

    def release_pages(self, offset_bytes: int, size_bytes: int) -> None:
        """Return pages to the kernel, for all processes that map the pages; the pages read as zeros afterwards.

        Both arguments are multiples of the page size.
        """
        self._map.madvise(_MADV_REMOVE, offset_bytes, size_bytes)


class ProgressCounters:
    """Lock-free counters by which the ranks of a host tell each other their progress; every rank has `count` counters.

    All counters start at 0 and only grow. Only the rank that owns a counter writes to it. A rank first writes shared
    data (the weights of a layer), then publishes a count that announces the data. A rank that has seen the count may
    read the data. The reverse direction works in the same way: a rank publishes that it has finished reading, and the
    owner of the data may then overwrite the data.

    Why no reader sees the count before the data:

    1. A counter is an aligned int64 in memory that all ranks map. x86-64 and AArch64 load and store an aligned int64 as
       a whole, so a reader sees the old count or the new count, never a mixture.
    2. The writer makes two torch calls: the first stores the data, the second stores the count. The reader makes two
       torch calls: the first loads the count, the second loads the data. No compiler reorders across torch calls.
    3. x86-64 keeps the order of a core's stores, and the order of a core's loads (TSO).
    4. AArch64 by itself keeps neither order, but CPython's global interpreter lock (GIL) does. A torch call acquires
       the GIL when the call returns, and the next torch call releases the GIL when it begins. So two critical sections
       of the GIL's mutex lie between the two torch calls. The end of the first section is a release: no earlier access
       can move behind it. The beginning of the second section is an acquire: no later access can move before it.

    Step 4 assumes an interpreter with a GIL. On a free-threaded AArch64 build, `publish` and `have_reached` would need
    explicit memory fences.
    """

    def __init__(self, peers: Peers, count: int = 1) -> None:
        self._of_ranks = [memory.tensor(0, (count,), torch.int64) for memory in peers.share(8 * count)]
        self._local = self._of_ranks[peers.index]

    def publish(self, value: int, counter: int = 0) -> None:
        """Set this rank's counter to `value`. Call this after writing the data that `value` announces."""
        self._local[counter] = value

    def local(self, counter: int = 0) -> int:
        """Return the value that this rank has published last, in any of its threads."""
        return int(self._local[counter])

    def have_reached(self, value: int, counter: int = 0) -> bool:
        """Whether every rank of the host has published at least `value`."""
        return all(int(counters[counter]) >= value for counters in self._of_ranks)

    def wait(self, value: int, counter: int = 0, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return when every rank of the host has published at least `value`.

        `meanwhile` is called between two polls. It may do work for which another rank waits, or raise an error.
        """
        while not self.have_reached(value, counter):
            meanwhile()
            time.sleep(POLL_S)

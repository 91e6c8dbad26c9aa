"""Memory that processes of one host share, and counters in it.

The memory has no name, so the kernel frees it when the last process ends. The size of /dev/shm (64 MiB in a pod) does
not limit a memfd, and the control group counts it like other memory.
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

POLL_S = 2e-4  # a rank sleeps between two looks at a counter, because the ranks that it waits for need the cores
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


class ProgressCounters:
    """Counters with which the ranks of a host tell each other how far they are, without a lock: `count` of every rank.

    All are 0 at first. Each counter has one writer, the rank that owns it, and only ever grows. A rank first writes
    shared data (the weights of a layer), then publishes a count that says so; a rank that has seen the count may read
    the data. The reverse direction works alike: a rank publishes that it has finished reading, and the owner of the
    data may then replace it.

    Why no reader sees the count before the data:

    1. A counter is an aligned int64 in memory that all ranks map, which x86-64 and AArch64 load and store as a whole: a
       reader sees an old count or the new one, never a mixture.
    2. The writer makes two torch calls, one that stores the data and one that stores the count; the reader makes two
       that load the count and then the data. No compiler looks across them, so their order is that of the program.
    3. x86-64 keeps the order of a core's stores, and the order of its loads (TSO).
    4. AArch64 keeps neither by itself. There CPython's global lock orders both: every torch call takes that lock when
       it returns, and gives it away when the next call begins. Between the two calls lie hence two critical sections of
       one mutex: the end of the first is a release, after which no access before it can move, and the beginning of the
       second an acquire, before which no access after it can move.

    Step 4 assumes an interpreter with a global lock. On an AArch64 build without one (free threading) `publish` and
    `have_reached` would need fences of their own.
    """

    def __init__(self, peers: Peers, count: int = 1) -> None:
        self._of_ranks = [memory.tensor(0, (count,), torch.int64) for memory in peers.share(8 * count)]
        self._local = self._of_ranks[peers.index]

    def publish(self, value: int, counter: int = 0) -> None:
        """Set this rank's counter, after the data that the value speaks of."""
        self._local[counter] = value

    def local(self, counter: int = 0) -> int:
        """Return the value that this rank has published last, in any of its threads."""
        return int(self._local[counter])

    def have_reached(self, value: int, counter: int = 0) -> bool:
        """Whether every rank of the host has published at least `value`."""
        return all(int(counters[counter]) >= value for counters in self._of_ranks)

    def wait(self, value: int, counter: int = 0, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return when every rank of the host has published at least `value`.

        `meanwhile` is called between two looks, to do work for which another rank may be waiting, or to raise.
        """
        while not self.have_reached(value, counter):
            meanwhile()
            time.sleep(POLL_S)

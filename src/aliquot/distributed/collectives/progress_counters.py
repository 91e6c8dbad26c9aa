"""Counters in shared memory with which the ranks of a host tell each other how far they are, without a lock.

Each counter has one writer, the rank that owns it, and only ever grows. A rank first writes shared data (the weights of
a layer), then publishes a count that says so; a rank that has seen the count may read the data. The reverse direction
works alike: a rank publishes that it has finished reading, and the owner of the data may then replace it.

Why no reader sees the count before the data:

1. A counter is an aligned int64 in memory that all ranks map, which x86-64 and AArch64 load and store as a whole: a
   reader sees an old count or the new one, never a mixture.
2. The writer makes two torch calls, one that stores the data and one that stores the count; the reader makes two that
   load the count and then the data. No compiler looks across them, so their order is that of the program.
3. x86-64 keeps the order of a core's stores, and the order of its loads (TSO).
4. AArch64 keeps neither by itself. There CPython's global lock orders both: every torch call takes that lock when it
   returns, and gives it away when the next call begins. Between the two calls lie hence two critical sections of one
   mutex of the process: the end of the first is a release, after which no access before it can move, and the beginning
   of the second an acquire, before which no access after it can move.

Step 4 assumes an interpreter with a global lock. On an AArch64 build without one (free threading) `publish` and
`have_reached` would need fences of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from aliquot.distributed.collectives.peers import Peers

POLL_S = 2e-4  # a rank sleeps between two looks, because the ranks that it waits for need the cores


class ProgressCounters:
    """`count` counters of every rank of the host, all 0 at first."""

    def __init__(self, peers: Peers, count: int = 1) -> None:
        """Collective over the host."""
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

        Args:
            meanwhile: called between two looks, to do work for which another rank may be waiting, or to raise.
        """
        while not self.have_reached(value, counter):
            meanwhile()
            time.sleep(POLL_S)

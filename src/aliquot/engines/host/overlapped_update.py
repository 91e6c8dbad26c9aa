"""An update from and to a disk, in a thread of its own, while the next forward pass begins.

Weights are updated in the order in which a forward pass wants them. A layer waits until all ranks of the host have
updated its own: while it computes, states of the next come from the disk and those of the ones before go there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from aliquot.distributed.collectives.peers import Peers

_POLL_S = 2e-4


class LateUpdate:
    def __init__(self, peers: Peers, order: Sequence[int], serve: Callable[[], None]) -> None:
        """`order`: of the weights that are updated. `serve` is called while this rank waits for others, which may wait
        for what it does. Collective over the host."""
        self._serve = serve
        self._count = len(order)
        self._places = {index: place for place, index in enumerate(order)}
        # Counters are written by one rank and read by all; the interpreter's lock, taken on both sides between them and
        # the weights that they speak of, orders memory.
        self._counters = [memory.tensor(0, (1,), torch.int64) for memory in peers.share(8)]
        self._own = self._counters[peers.index]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-update")
        self._running: Future[None] | None = None
        self._before = 0  # weights of earlier updates
        self._usable = self._count  # of this one's, updated by all ranks of this host, as far as this one knows
        self.waited_s = 0.0

    def begin(self, update: Callable[[], None]) -> None:
        """Nobody computes any more on this host, and what was begun before has been needed as a whole. `update` updates
        all weights in their order, and calls `updated` after each."""
        if self._running is not None:
            self._before += self._count
        self._usable = 0

        end = self._before + self._count  # by the time that `update` returns the next may have begun

        def run() -> None:
            update()
            self._own[0] = end  # those of which this rank has no row, too

        self._running = self._thread.submit(run)

    def updated(self, index: int) -> None:
        """Within `update`: this rank's rows are as they will be used, or on their way to the disk."""
        self._own[0] = self._before + self._places[index] + 1

    def need(self, indices: Sequence[int]) -> None:
        """These weights are about to be used: all ranks of this host come here. Raises what the update has raised."""
        count = self._place_behind(indices)
        if count <= self._usable:
            return
        begun = time.perf_counter()
        while any(int(counter[0]) < self._before + count for counter in self._counters):
            self._check()
            self._serve()
            time.sleep(_POLL_S)
        self._usable = count
        self.waited_s += time.perf_counter() - begun

    def need_own(self, indices: Sequence[int]) -> None:
        """As `need`, of this rank's rows alone, in any thread."""
        count = 0 if self._running is None else self._place_behind(indices)
        while int(self._own[0]) < self._before + count:
            self._check()
            time.sleep(_POLL_S)

    def settle(self) -> None:
        """This rank has updated all of its rows. In any thread. Raises what the update has raised."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _place_behind(self, indices: Sequence[int]) -> int:
        return 1 + max((self._places.get(index, -1) for index in indices), default=-1)

    def _check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()

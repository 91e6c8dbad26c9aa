"""The next batch is laid out in a thread while the current one is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from aliquot.data.batches import Batches, StepBatch


class BatchesAhead:
    """This rank's batches of steps [first, stop), taken in order. A context: its thread ends with it."""

    def __init__(self, batches: Batches, rank: int, world_size: int, first: int, stop: int) -> None:
        self._batches = batches
        self._rank, self._world_size = rank, world_size
        self._stop = stop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-batches")
        self._next: Future[StepBatch] | None = self._begin(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> StepBatch:
        """The batch of `step`, and the one after it is begun. Raises what laying it out raised."""
        assert self._next is not None
        batch = self._next.result()
        self._next = self._begin(step + 1)
        return batch

    def _begin(self, step: int) -> Future[StepBatch] | None:
        if step >= self._stop:
            return None
        return self._thread.submit(self._batches.step_batch, step, self._rank, self._world_size)

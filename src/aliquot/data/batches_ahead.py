"""The next batch is laid out, and sent where it is computed, in a thread while the current one is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from aliquot.data.batches import Batches, StepBatch
from aliquot.data.batches_to_gpu import Sent, ToGpu


class BatchesAhead:
    """This rank's batches of steps [first, stop), taken in order. A context: its thread ends with it."""

    def __init__(
        self, batches: Batches, rank: int, world_size: int, first: int, stop: int, to_gpu: ToGpu | None = None
    ) -> None:
        """`to_gpu`: None on CPUs, whose batches are where they are computed."""
        self._batches = batches
        self._rank, self._world_size = rank, world_size
        self._stop = stop
        self._to_gpu = to_gpu
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-batches")
        self._next: Future[StepBatch | Sent] | None = self._begin(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> StepBatch:
        """The batch of `step`, and the one after it is begun. Raises what laying it out raised."""
        assert self._next is not None
        found = self._next.result()
        self._next = self._begin(step + 1)
        if isinstance(found, StepBatch):
            return found
        assert self._to_gpu is not None
        return self._to_gpu.receive(found)

    def _begin(self, step: int) -> Future[StepBatch | Sent] | None:
        return None if step >= self._stop else self._thread.submit(self._lay_out, step)

    def _lay_out(self, step: int) -> StepBatch | Sent:
        batch = self._batches.step_batch(step, self._rank, self._world_size)
        return batch if self._to_gpu is None else self._to_gpu.send(batch)

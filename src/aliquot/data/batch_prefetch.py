"""Prefetch the batches of optimizer steps: prepare them one step ahead and copy them to a GPU, in a thread.

The thread builds the batch of the next step while the current step runs. On a GPU, the thread also starts the copy of
the batch, on a stream of its own, so that the copy overlaps with kernels. The training thread then waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from aliquot.core.errors import UserError
from aliquot.data.batches import Batches, StepBatch
from aliquot.machine.device_copies import on_this_gpu
from aliquot.models.micro_batch import tensors_in

_POLL_S = 0.1


class BatchCopier:
    """Copy batches to the current GPU: the prefetch thread calls `send`, the training thread calls `receive`."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, batch: StepBatch) -> tuple[StepBatch, Any]:
        """Start an asynchronous copy of a batch from pinned memory to the GPU; return it and the event of its end."""
        with torch.cuda.stream(self._stream):
            micro_batches = [
                None if micro_batch is None else micro_batch.with_equal_calls().to(self._device)
                for micro_batch in batch.micro_batches
            ]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return replace(batch, micro_batches=micro_batches), arrived

    def receive(self, batch: StepBatch, arrived: Any) -> None:
        """Make later kernels wait for the copy, and hold the memory of the batch until these kernels have finished.

        The allocator knows only the stream of the copy. `record_stream` names the stream of the kernels, because the
        allocator would otherwise reuse the memory while kernels still read the batch.
        """
        stream = torch.cuda.current_stream()
        stream.wait_event(arrived)
        for micro_batch in batch.micro_batches:
            for tensor in tensors_in(micro_batch):
                tensor.record_stream(stream)


class BatchPrefetcher(AbstractContextManager["BatchPrefetcher"]):
    """Prepare this rank's batches of steps [first, stop) one step ahead, in a thread.

    The thread ends when the `with` block ends.
    """

    def __init__(
        self, batches: Batches, rank: int, world_size: int, first: int, stop: int, gpu_copier: BatchCopier | None = None
    ) -> None:
        """Start to prepare the batch of step `first`.

        Args:
            first, stop: the steps that the run takes, counted from 0; `stop` is the step after the last one.
            gpu_copier: None on CPUs, where batches need no copy.
        """
        self._batches, self._rank, self._world_size, self._stop = batches, rank, world_size, stop
        self._gpu_copier = gpu_copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-batches")
        self._next: Future[tuple[StepBatch, Any]] | None = self._begin(first)

    def __exit__(self, *_: object) -> None:
        self._batches.close()  # the thread may wait for data
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> StepBatch:
        """Return the batch of `step`, and start to prepare the next batch. Raises any exception of the preparation."""
        assert self._next is not None
        batch, arrived = self._next.result()
        self._next = self._begin(step + 1)
        if self._gpu_copier is not None:
            self._gpu_copier.receive(batch, arrived)
        return batch

    def failure(self, waits: Callable[[], bool]) -> UserError | None:
        """Return the error for which there is no next batch, if it is known; wait for the batch while `waits()`."""
        while self._next is not None and not self._next.done() and waits():
            wait([self._next], _POLL_S)
        error = self._next.exception() if self._next is not None and self._next.done() else None
        return error if isinstance(error, UserError) else None

    def _begin(self, step: int) -> Future[tuple[StepBatch, Any]] | None:
        return None if step >= self._stop else self._thread.submit(on_this_gpu(self._lay_out), step)

    def _lay_out(self, step: int) -> tuple[StepBatch, Any]:
        """Build the batch of `step`, and start its copy to the GPU; return the event of its end. Runs in the thread."""
        batch = self._batches.step_batch(step, self._rank, self._world_size)
        return (batch, None) if self._gpu_copier is None else self._gpu_copier.send(batch)

"""Prepare the next batch in a thread, and copy it to a GPU, while the model computes the current batch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from aliquot.data.batches import Batches, StepBatch


@dataclass(frozen=True)
class CopiedBatch:
    batch: StepBatch
    arrived: Any  # a CUDA event


class GpuCopier:
    """Copy batches to the current GPU: `send` in the preparing thread, `receive` where kernels are launched."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, batch: StepBatch) -> CopiedBatch:
        """Begin to copy a batch from pinned memory, without waiting for the copy."""
        with torch.cuda.stream(self._stream):
            micro_batches = [
                None if micro_batch is None else micro_batch.with_equal_calls().to(self._device)
                for micro_batch in batch.micro_batches
            ]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return CopiedBatch(replace(batch, micro_batches=micro_batches), arrived)

    def receive(self, sent: CopiedBatch) -> StepBatch:
        """Make later kernels wait for the copy, and keep its memory until these kernels have used it."""
        stream = torch.cuda.current_stream()
        stream.wait_event(sent.arrived)
        for micro_batch in sent.batch.micro_batches:
            for tensor in () if micro_batch is None else micro_batch.tensors():
                tensor.record_stream(stream)
        return sent.batch


class BatchPrefetcher:
    """Prepare this rank's batches of steps [first, stop) one step ahead.

    A context manager, because it owns a thread.
    """

    def __init__(
        self, batches: Batches, rank: int, world_size: int, first: int, stop: int, gpu_copier: GpuCopier | None = None
    ) -> None:
        """Begin with the batch of step `first`. `gpu_copier` is None on CPUs, where batches need no copy."""
        self._batches = batches
        self._rank, self._world_size = rank, world_size
        self._stop = stop
        self._gpu_copier = gpu_copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-batches")
        self._next: Future[StepBatch | CopiedBatch] | None = self._begin(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> StepBatch:
        """Return the batch of `step` and begin the next one. Raises whatever the preparation raised."""
        assert self._next is not None
        prepared = self._next.result()
        self._next = self._begin(step + 1)
        if isinstance(prepared, StepBatch):
            return prepared
        assert self._gpu_copier is not None
        return self._gpu_copier.receive(prepared)

    def _begin(self, step: int) -> Future[StepBatch | CopiedBatch] | None:
        return None if step >= self._stop else self._thread.submit(self._lay_out, step)

    def _lay_out(self, step: int) -> StepBatch | CopiedBatch:
        batch = self._batches.step_batch(step, self._rank, self._world_size)
        return batch if self._gpu_copier is None else self._gpu_copier.send(batch)

"""Prepare the next batch in a thread, and copy it to a GPU, while the model computes the current batch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from aliquot.data.batches import Batches, StepBatch


@dataclass(frozen=True)
class Sent:
    batch: StepBatch
    arrived: Any  # an event


class ToGpu:
    """`send` in the thread that lays batches out, `receive` in the one that launches kernels, on its device."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, batch: StepBatch) -> Sent:
        """Pins and copies it; nothing is waited for."""
        with torch.cuda.stream(self._stream):
            there = [None if each is None else each.with_equal_calls().to(self._device) for each in batch.micro_batches]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Sent(replace(batch, micro_batches=there), arrived)

    def receive(self, sent: Sent) -> StepBatch:
        """What is launched from now on finds it there, and its memory is not another's before that is done with it."""
        stream = torch.cuda.current_stream()
        stream.wait_event(sent.arrived)
        for micro_batch in sent.batch.micro_batches:
            for tensor in () if micro_batch is None else micro_batch.tensors():
                tensor.record_stream(stream)
        return sent.batch


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

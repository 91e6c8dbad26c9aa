"""Batches of the next step are copied to a GPU while it computes the current one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from aliquot.data.batches import StepBatch


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

"""How parts that are being saved come into the host's memory while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from aliquot.tensor_io.mapped_memory import mapped_tensor

_MAPPED_NUMEL = 1 << 16  # smaller copies find room between others in the heap


class Copies(Protocol):
    """Of the values that there are when it is made. Any thread may use it."""

    def copying(self) -> AbstractContextManager[object]:
        """What is copied within is in the host's memory when the copy returns."""
        ...

    def room(self, numel: int) -> Tensor:
        """fp32 [numel] in the host's memory."""
        ...


class FromHost:
    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def room(self, numel: int) -> Tensor:
        return mapped_tensor(numel, torch.float32) if numel >= _MAPPED_NUMEL else torch.empty(numel)


class FromGpu:
    """Copies in a stream of their own, behind what had been launched when this was made and beside all that comes
    later: a thread that copies waits for its own copies alone, where in the stream of the kernels it would wait for
    these, and they for it."""

    def __init__(self) -> None:
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_event(before)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)  # and its device, in a thread that has chosen none

    def room(self, numel: int) -> Tensor:
        return torch.empty(numel, pin_memory=True)


def copies_from(device: str) -> Callable[[], Copies]:
    """For a rank that computes on `device`."""
    return FromGpu if device == "cuda" else FromHost

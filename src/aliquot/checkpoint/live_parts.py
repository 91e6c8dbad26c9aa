"""Parts that are being saved while training goes on: read live until the next update, from copies after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from aliquot.checkpoint.directories import STEMS
from aliquot.core.errors import TrainingError
from aliquot.machine.allocator import give_back
from aliquot.tensor_io.mapped_memory import mapped_tensor
from aliquot.tensor_io.parts import Part, PartSource

_MAPPED_NUMEL = 1 << 16  # smaller copies find room between others in the heap


class LiveParts:
    """A store to drain in another thread. Weights and moments change only in an update: `release` comes before it.

    One thread drains; another calls `release`, which returns when the live values are needed no more: what has not been
    read yet is copied within `buffer_bytes` and waited for beyond that.
    """

    def __init__(self, store: PartSource, buffer_bytes: int, copies: Copies) -> None:
        self._store = store
        self._made = copies
        self._room_bytes = buffer_bytes
        self._parts = sorted(store.parts(), key=lambda part: STEMS[part.kind])  # as the drain goes: by file
        self._left = set(self._parts)
        self._copies: dict[Part, Tensor] = {}
        self._reading = 0  # reads of live values that are under way
        self._stopped = False
        self._changed = threading.Condition()

    def parts(self) -> Sequence[Part]:
        return self._parts

    def read(self, part: Part, start: int, out: Tensor) -> None:
        with self._changed:
            if self._stopped:
                raise TrainingError("this checkpoint was given up")
            copy = self._copies.get(part)
            self._reading += copy is None
        if copy is not None:
            out.copy_(copy[start - part.start : start - part.start + out.numel()])
        else:
            with self._made.copying():
                self._store.read(part, start, out)
        with self._changed:
            self._reading -= copy is None
            if start + out.numel() == part.stop:
                self._left.discard(part)
                self._copies.pop(part, None)
            self._changed.notify_all()

    def release(self, timeout_s: float | None = None) -> bool:
        """Return when the live values may change: True, or False if that is not so after `timeout_s`."""
        with self._changed:
            # The drain goes through them in order: those it will come to last are copied, so that the wait is short.
            left = [part for part in self._parts if part in self._left]
            if left and not self._copies:
                give_back()  # what activations have left, in whose place copies come
            for part in reversed(left):
                if 4 * part.numel <= self._room_bytes and part not in self._copies:
                    self._room_bytes -= 4 * part.numel
                    self._copies[part] = self._made.room(part.numel)
                    with self._made.copying():
                        self._store.read(part, part.start, self._copies[part])
            return self._changed.wait_for(
                lambda: self._stopped or (not self._reading and self._left <= self._copies.keys()), timeout_s
            )

    def stop(self) -> None:
        """Nothing will be read any more: a drain that is under way fails at its next piece."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


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

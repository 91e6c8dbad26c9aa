"""Read weights and moments for a checkpoint while training continues.

A thread reads the live values until the next optimizer step. Before that step, the remaining values are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from aliquot.checkpoint.directories import STEMS
from aliquot.core.errors import TrainingError
from aliquot.machine.allocator import release_free_memory
from aliquot.tensor_io.parts import Part, PartSource
from aliquot.tensor_io.range_io import mapped_tensor

_MAPPED_NUMEL = 1 << 16  # smaller copies are allocated on the heap, larger ones by mmap


class CpuCopier:
    """Copies weights and moments of an engine on the CPU into host memory. Any thread may use a copier."""

    def copies(self) -> AbstractContextManager[object]:
        """Return a context in which a call that copies into host memory returns only after the copy is complete."""
        return nullcontext()

    def buffer(self, numel: int) -> Tensor:
        """Allocate fp32 [numel] in host memory."""
        return mapped_tensor(numel, torch.float32) if numel >= _MAPPED_NUMEL else torch.empty(numel)


class GpuCopier(CpuCopier):
    """Copies weights and moments from a GPU into host memory, in a separate CUDA stream.

    The stream waits for all kernels that were launched before the copier was created, so that copies have the results
    of these kernels. The copying thread waits only for its copies. In the stream of the training kernels, copies and
    later kernels would wait for each other.
    """

    def __init__(self) -> None:
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_event(launched)

    def copies(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)  # also selects the GPU of the stream, in a thread that has selected none

    def buffer(self, numel: int) -> Tensor:
        return torch.empty(numel, pin_memory=True)


def copier_for(device: str) -> type[CpuCopier]:
    """Return the copier class of a rank that computes on `device`."""
    return GpuCopier if device == "cuda" else CpuCopier


class LiveParts:
    """A source of parts for the thread that writes a checkpoint while training continues.

    Weights and moments change only when the optimizer updates them. Before the update, the training thread calls
    `release`, which copies unread parts into at most `buffer_bytes` of memory. `release` then waits until the writing
    thread has read all parts that were not copied.
    """

    def __init__(self, store: PartSource, buffer_bytes: int, copier: CpuCopier) -> None:
        self._store = store
        self._copier = copier
        self._free_bytes = buffer_bytes
        self._parts = sorted(store.parts(), key=lambda part: STEMS[part.kind])  # in the order of writing: by file name
        self._unread = set(self._parts)
        self._copies: dict[Part, Tensor] = {}
        self._live_reads = 0  # reads of live values that are in progress
        self._stopped = False
        self._changed = threading.Condition()

    def parts(self) -> Sequence[Part]:
        return self._parts

    def read(self, part: Part, start: int, out: Tensor) -> None:
        with self._changed:
            if self._stopped:
                raise TrainingError("this checkpoint was abandoned")
            copy = self._copies.get(part)
            self._live_reads += copy is None
        if copy is not None:
            out.copy_(copy[start - part.start : start - part.start + out.numel()])
        else:
            with self._copier.copies():
                self._store.read(part, start, out)
        with self._changed:
            self._live_reads -= copy is None
            if start + out.numel() == part.stop:
                self._unread.discard(part)
                self._copies.pop(part, None)
            self._changed.notify_all()

    def release(self, timeout_s: float | None = None) -> bool:
        """Wait until the live values may change; return False if they still may not after `timeout_s`."""
        with self._changed:
            # The writing thread reads the parts in order. Copying the last unread parts makes the wait shortest.
            unread = [part for part in self._parts if part in self._unread]
            if unread and not self._copies:
                release_free_memory()  # return the memory of freed activations to the system, for the copies
            for part in reversed(unread):
                if 4 * part.numel <= self._free_bytes and part not in self._copies:
                    self._free_bytes -= 4 * part.numel
                    self._copies[part] = self._copier.buffer(part.numel)
                    with self._copier.copies():
                        self._store.read(part, part.start, self._copies[part])
            return self._changed.wait_for(
                lambda: self._stopped or (not self._live_reads and self._unread <= self._copies.keys()), timeout_s
            )

    def stop(self) -> None:
        """Abandon the checkpoint: the writing thread gets an error at its next read."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

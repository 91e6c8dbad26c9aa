"""Use a rank's GPU: copies that do not wait for other work of the GPU, and threads that use the same GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, SupportsFloat, TypeVar

import torch
from torch import Tensor

from aliquot.core.errors import DeviceError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Fill = Callable[[Tensor], object]  # begins to fill a tensor on a device from pinned memory


def on_this_gpu(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `work` for another thread, in which it uses the GPU that the calling thread uses.

    A new thread uses GPU 0. Its first pinned tensor would create a context there, of about 0.5 GiB for every rank.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    gpu = torch.cuda.current_device()

    def on_gpu(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        torch.cuda.set_device(gpu)
        return work(*args, **kwargs)

    return on_gpu


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for a GPU; a copy from memory that is not pinned would wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def read_early(value: Tensor) -> SupportsFloat:
    """Begin to copy a scalar to the host. `float()` of the result waits until the GPU has computed the scalar.

    `float(value)` would wait for all work that is queued at the time of the call. On CPU, the result is `value`.
    Other tensors than scalars are returned, too.
    """
    return Download(value, torch.cuda.current_stream(value.device)) if value.is_cuda and value.ndim == 0 else value


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream for copies that overlap with kernels; None if `device` is no GPU, which copies at once."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Uploads:
    """Copies of host memory to a device, in a stream of their own, which overlap with kernels of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = copy_stream(device)  # None: copies are made at once

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that occurs when the device has run all kernels that were launched before."""
        if self.stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()  # type: ignore[no-any-return]

    def wait_for_kernels(self) -> None:
        """Begin later copies only after all kernels that were launched before."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def begin(self, copies: Sequence[tuple[Tensor, Fill]], after: torch.cuda.Event | None = None) -> None:
        """Begin to call each function with its target on the device, not before the event `after`."""
        if self.stream is not None and after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream), torch.no_grad():
            for target, fill in copies:
                fill(target)

    def wait_for_copies(self) -> None:
        """Run kernels that are launched later only after all copies that were begun before."""
        if self.stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)


class Download:
    """A copy of a device's tensor to pinned host memory, which begins when the device has computed the tensor."""

    def __init__(self, values: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Begin to copy `values`, in `stream`. Without a stream, `wait` copies."""
        self.nbytes = values.nbytes
        self._values = values  # the device may reuse this memory only after the copy
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=stream is not None)
        self._copied: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(stream):
                self._host.copy_(values, non_blocking=True)
                self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                self._copied.record()

    def wait(self) -> Tensor:
        """Wait for the copy and return it. Other threads may use the core in the meantime."""
        if self._copied is None:
            self._host.copy_(self._values)
        else:
            self._copied.synchronize()
        return self._host

    def __float__(self) -> float:
        return float(self.wait())


def pin(memory: Tensor) -> None:
    """Lock the pages of host memory, so that a GPU copies from them without waiting. Raises DeviceError."""
    _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0), memory)  # type: ignore[no-untyped-call]


def unpin(memory: Tensor) -> None:
    """Undo `pin`, before the memory is freed. Raises DeviceError."""
    _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()), memory)  # type: ignore[no-untyped-call]


def _check(status: int, memory: Tensor) -> None:
    try:
        torch.cuda.check_error(status)
    except RuntimeError as error:
        raise DeviceError(
            f"CUDA cannot lock {memory.nbytes:,} bytes of host memory for copies to the GPU ({error}): set"
            " shard.engine: fsdp"
        ) from error

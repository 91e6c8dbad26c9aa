"""Use a rank's GPU: copies that do not wait for other work of the GPU, and threads that use the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, SupportsFloat, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
    return _OnItsWay(value) if value.is_cuda and value.ndim == 0 else value


class _OnItsWay:
    def __init__(self, value: Tensor) -> None:
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._host)

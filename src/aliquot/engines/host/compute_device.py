"""Compute on a GPU with the host engine: the GPU has a copy of the weights, and gradients go to host memory.

The state of the engine stays in host memory, as on CPUs. All exchange between ranks and hosts works on host memory,
too. Between host memory and the GPU, a rank copies only:

1. Updated weights, once per optimizer step. The copy of a layer begins when the forward pass is about to launch the
   layer's kernels. Python launches kernels ahead of the GPU, so that the copy overlaps with earlier layers.
2. Gradients, once per micro-batch. The copy of a gradient begins when the backward pass has computed it. The rank adds
   the gradient to the sums while the GPU computes earlier layers.

Tests use the CPU as the device. Its copies of gradients are made as late as possible, so that code which does not wait
for a copy reads uninitialized memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.host_memory import IN_FLIGHT_BYTES
from aliquot.engines.host.shared_weights import SharedWeights, Weight
from aliquot.machine.device_copies import Download, copy_stream, pin, unpin
from aliquot.models.structure import replace_tensors
from aliquot.nn.head_loss import GradientRows


class DeviceWeights:
    """The weights on the device, which follow the weights in shared memory."""

    def __init__(self, shared: SharedWeights, device: torch.device) -> None:
        """Allocate the weights on the device, uninitialized. Raises DeviceError."""
        self._host = shared.views()
        self.tensors = [torch.empty_like(values, device=device) for values in self._host]
        self._outdated = set(range(len(self.tensors)))
        self._device = device
        self._stream = copy_stream(device)
        self._pinned = shared.memory if self._stream is not None else None
        if self._pinned is not None:
            pin(self._pinned)

    @property
    def size_bytes(self) -> int:
        return sum(values.nbytes for values in self.tensors)

    def place_buffers(self, model: nn.Module) -> None:
        """Move the buffers of the model to the device."""
        replace_tensors(model, {name: buffer.to(self._device) for name, buffer in model.named_buffers()})

    def outdate(self, indices: Iterable[int]) -> None:
        """Note that these weights change in shared memory. Kernels that were launched before still use the old ones."""
        self._outdated.update(indices)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def refresh(self, indices: Iterable[int]) -> None:
        """Copy those of these weights that have changed. Kernels that are launched later wait for the copies."""
        changed = [index for index in indices if index in self._outdated]
        if not changed:
            return
        self._outdated.difference_update(changed)
        with torch.cuda.stream(self._stream), torch.no_grad():
            for index in changed:
                self.tensors[index].copy_(self._host[index], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        if self._pinned is not None:
            torch.cuda.synchronize(self._device)
            unpin(self._pinned)


class DeviceGradients:
    """Copies gradients of the device to host memory, and then stages them like gradients of a CPU."""

    def __init__(self, gradients: HostGradients, weights: Sequence[Weight], device: torch.device) -> None:
        self._gradients = gradients
        self._weights = weights
        self._device = device
        self._stream = copy_stream(device)
        self._downloads: deque[tuple[Download, Callable[[Tensor], None]]] = deque()
        self._bytes = 0  # in `_downloads`

    def stage(self, index: int, gradient: Tensor) -> None:
        """Begin to copy the complete gradient of a weight. HostGradients gets it after earlier gradients."""
        self._begin(gradient, partial(self._gradients.stage, index))

    def head_rows(self, index: int) -> GradientRows:
        """Return the receiver of the head's gradient, whose blocks are computed on the device."""
        host, weight = self._gradients.head_rows(index), self._weights[index]
        filled: list[tuple[int, int, Tensor]] = []

        def buffer(first: int, last: int) -> Tensor:
            block = torch.empty(last - first, *weight.shape[1:], dtype=weight.dtype, device=self._device)
            filled.append((first, last, block))
            return block

        def publish() -> None:
            first, last, values = filled.pop()
            self._begin(values, partial(stage, first, last))

        def stage(first: int, last: int, values: Tensor) -> None:
            host.buffer(first, last).copy_(values)
            host.publish()

        return GradientRows(host.edges, buffer, publish)

    def end_micro_batch(self) -> None:
        """Stage all gradients of the micro-batch. Afterwards, the device has computed the micro-batch."""
        while self._downloads:
            self._end_oldest()
        self._gradients.end_micro_batch()

    def add_rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        """Stage the gradient of an embedding look-up, after `end_micro_batch`."""
        self._gradients.add_rows(index, ids.cpu(), rows.cpu())

    def _begin(self, values: Tensor, stage: Callable[[Tensor], None]) -> None:
        # Staging takes the CPU some time. The GPU has work meanwhile, because its kernels are launched ahead.
        while self._downloads and self._bytes + values.nbytes > IN_FLIGHT_BYTES:
            self._end_oldest()
        self._downloads.append((Download(values, self._stream), stage))
        self._bytes += values.nbytes

    def _end_oldest(self) -> None:
        download, stage = self._downloads.popleft()
        self._bytes -= download.nbytes
        stage(download.wait())

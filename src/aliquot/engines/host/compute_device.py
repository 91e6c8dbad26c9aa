"""Compute on a GPU with the host engine: the GPU has a copy of the weights, and gradients go to host memory.

The state of the engine stays in host memory, as on CPUs. All exchange between ranks and hosts works on host memory,
too. Between host memory and the GPU, a rank copies only:

1. Updated weights, once per optimizer step. The copy of a layer begins when the forward pass is about to launch the
   layer's kernels. Python launches kernels ahead of the GPU, so that the copy overlaps with earlier layers.
2. Weights of copied layers, if the GPU has no room for all layers. These layers share a few slots, and each forward and
   backward pass copies them again. A copy into a slot waits until the slot's previous layer has been computed. The last
   layers of a forward pass are still in the slots when the backward pass begins, and so are the first layers after it.
3. Gradients, once per micro-batch. The copy of a gradient begins when the backward pass has computed it. The rank adds
   the gradient to the sums while the GPU computes earlier layers.

Tests use the CPU as the device. Its copies of gradients are made as late as possible, so that code which does not wait
for a copy reads uninitialized memory. Tests delay copies of weights in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.engines.host.compressed_layers import CompressedLayers
from aliquot.engines.host.host_gradients import HostGradients
from aliquot.engines.host.host_memory import COPY_SLOTS, IN_FLIGHT_BYTES
from aliquot.engines.host.layer_hooks import Layers, LayerSlots
from aliquot.engines.host.shared_weights import SharedWeights, Weight
from aliquot.machine.device_copies import Download, Fill, Uploads, copy_stream, pin, unpin
from aliquot.nn.head_loss import GradientRows
from aliquot.tensor_io.weight_codes import Codes, codes_in


class DeviceWeights(LayerSlots):
    """The weights on the device, which follow the weights in shared memory. Copied layers share COPY_SLOTS slots."""

    def __init__(self, shared: SharedWeights, device: torch.device, copied: Layers = ()) -> None:
        """Allocate the weights on the device, uninitialized. Raises DeviceError.

        `copied`: the layers whose weights are on the device only around each use.
        """
        slots = min(COPY_SLOTS, len(copied))
        super().__init__([module for module, _ in copied], slots)
        self._host = shared.views()
        self._layers = [indices for _, indices in copied]
        self._in_slots = frozenset(index for indices in self._layers for index in indices)
        sizes = [sum(align(self._host[index].nbytes) for index in indices) for indices in self._layers]
        buffers = [torch.empty(max(sizes[slot::slots]), dtype=torch.uint8, device=device) for slot in range(slots)]
        tensors: dict[int, Tensor] = {}
        for layer, indices in enumerate(self._layers):
            at = 0
            for index in indices:
                memory = buffers[layer % slots][at : at + self._host[index].nbytes]
                tensors[index] = memory.view(self._host[index].dtype).view(self._host[index].shape)
                at += align(memory.nbytes)
        resident = {
            index: torch.empty_like(values, device=device)
            for index, values in enumerate(self._host)
            if index not in self._in_slots
        }
        self.tensors = [(resident | tensors)[index] for index in range(len(self._host))]
        self.size_bytes = sum(memory.nbytes for memory in (*buffers, *resident.values()))
        self.copied_bytes = 0
        self._sizes = [values.nbytes for values in self._host]  # of copies
        self._fills: list[Fill] = [partial(_copy, values) for values in self._host]
        # Without version counters, because copies may replace a weight that autograd has saved: the copies before its
        # backward pass restore it.
        self._targets = [values.data for values in self.tensors]
        self._outdated = set(range(len(self.tensors)))
        self._ends: list[torch.cuda.Event | None] = [None] * slots  # of the last use of each slot
        self._device = device
        self._uploads = Uploads(device)
        self._pinned: list[Tensor] = []
        self._pin(shared.memory)

    def decode(self, compressed: CompressedLayers) -> None:
        """Copy compressed weights in their codes, which the device decodes."""
        largest = max(codes.nbytes for codes in compressed.codes.values())
        buffer = torch.empty(largest, dtype=torch.uint8, device=self._device)
        self.size_bytes += buffer.nbytes
        self._pin(compressed.memory)
        for index, codes in compressed.codes.items():
            place = buffer[: codes.nbytes]
            on_device = codes_in(place, compressed.base, tuple(self._host[index].shape))
            self._sizes[index] = codes.nbytes
            self._fills[index] = partial(_copy_and_decode, codes, place, on_device)

    def _pin(self, memory: Tensor) -> None:
        if self._uploads.stream is not None:
            pin(memory)
            self._pinned.append(memory)

    def outdate(self, indices: Iterable[int]) -> None:
        """Note that these weights change in shared memory. Kernels that were launched before still use the old ones."""
        self._outdated.update(indices)
        self._current = -1
        self._uploads.wait_for_kernels()

    def refresh(self, indices: Iterable[int]) -> None:
        """Copy those of these weights that have changed. Kernels that are launched later wait for the copies.

        Weights of copied layers are copied when a layer is used.
        """
        if self._copy([index for index in indices if index not in self._in_slots]):
            self._uploads.wait_for_copies()

    def pass_through(self) -> None:
        """Do nothing: other ranks do not need the weights on this device."""

    def close(self) -> None:
        super().close()
        if self._pinned:
            torch.cuda.synchronize(self._device)
        for memory in self._pinned:
            unpin(memory)

    def _use(self, layer: int) -> None:
        super()._use(layer)
        self._uploads.wait_for_copies()

    def _use_in_backward(self, layer: int) -> None:
        self._use(layer)
        # Begin the next copy now, because Python may wait for gradients of this layer before it launches the next one.
        if layer and self._has_backward[layer - 1]:
            self._fetch(layer - 1)

    def _end_use(self) -> None:
        if self._current >= 0:
            self._ends[self._current % len(self._ends)] = self._uploads.mark()

    def _fetch(self, layer: int) -> None:
        super()._fetch(layer)
        self._copy(self._layers[layer], self._ends[layer % len(self._ends)])

    def _fill(self, layer: int, slot: int, before: int) -> None:
        if before >= 0:
            self._outdated.update(self._layers[before])

    def _copy(self, indices: Sequence[int], after: torch.cuda.Event | None = None) -> bool:
        """Begin to copy those of these weights that have changed. Return whether there are any."""
        changed = [index for index in indices if index in self._outdated]
        self._outdated.difference_update(changed)
        if changed:
            self._uploads.begin([(self._targets[index], self._fills[index]) for index in changed], after)
            self.copied_bytes += sum(self._sizes[index] for index in changed)
        return bool(changed)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_and_decode(codes: Tensor, place: Tensor, on_device: Codes, target: Tensor) -> None:
    place.copy_(codes, non_blocking=True)
    on_device.decode(0, target.view(-1))


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

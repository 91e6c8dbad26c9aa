"""Stream decoder layers from disk: a layer's weights are in shared memory only around its use.

All ranks of the host use the same layers in the same order, in forward and backward passes. Each rank therefore knows
without a message which layer comes next and which layer to evict. While a layer computes, each rank reads its own
ranges of the next layer. A rank may use a layer when all ranks have read their ranges. The pages of a layer are
released when all ranks use another layer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import nn

from aliquot.core.errors import EngineError
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import POLL_S, ProgressCounters
from aliquot.engines.base import EngineSpec
from aliquot.engines.engine_plan import first_of
from aliquot.engines.host.host_disk import HostDisk
from aliquot.engines.host.host_memory import RESIDENT_LAYERS
from aliquot.engines.host.layer_hooks import LayerHooks, Layers, spread_layers
from aliquot.engines.host.shared_weights import WeightShard
from aliquot.offload.scratch_file import Move, ScratchStream
from aliquot.offload.windows import paged

_READ, _USED = 0, 1  # counters of a rank: finished reads of layers, and started uses of layers


def choose_streamed(model: nn.Module, spec: EngineSpec, several_hosts: bool) -> Layers:
    """Return the layers that `spec.on_disk` selects for streaming, without weights that several layers share.

    Raises EngineError if `spec` asks for streamed layers, but this run does not support them.
    """
    if spec.on_disk is None or not spec.on_disk.layers:
        return []
    obstacles = {
        "several hosts": several_hosts,
        "GPUs": spec.copies_weights,
        "a model that takes one document per call": not spec.packs,
    }
    if why := next((obstacle for obstacle, applies in obstacles.items() if applies), None):
        raise EngineError(f"shard.offload: disk keeps no weights there with {why}, and the rest does not fit")
    names, parameters = zip(*model.named_parameters(), strict=True)
    shapes = [tuple(parameter.shape) if parameter.requires_grad else None for parameter in parameters]
    on_disk = first_of(shapes, spec.on_disk.states)
    on_disk += [
        at for at, weight in enumerate(parameters)
        if shapes[at] is None and weight.shape in spec.on_disk.frozen and names[at] not in spec.exact
    ]  # fmt: skip
    return spread_layers(model, spec.on_disk.layers, {id(parameters[at]): at for at in on_disk})


@dataclass
class _Resident:
    """A layer that is in memory or being read."""

    reading: int  # the number of the read that loads the layer, counted from 1
    last_use: int


class StreamedLayers(LayerHooks):
    """Reads streamed layers ahead of their use. `attach` registers the hooks on the model."""

    def __init__(
        self,
        peers: Peers,
        serve: Callable[[], None],
        disk: HostDisk,
        shards: Sequence[WeightShard],
        layers: Layers,
        wait_updated: Callable[[Sequence[int]], None] | None,
    ) -> None:
        """Share the counters. Collective over the host.

        `serve` is called while this rank waits for other ranks, because they may wait until this rank reads its ring
        buffer. `wait_updated` waits, in any thread, until this rank's ranges of weights are updated and written.
        """
        super().__init__([module for module, _ in layers])
        self._serve = serve
        self._wait_updated = wait_updated
        self._disk = disk
        self._shards = shards
        self._layers = [indices for _, indices in layers]
        self.weights = frozenset(index for _, indices in layers for index in indices)
        self._progress = ProgressCounters(peers, 2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-layers")
        self._reading: Future[None] | None = None
        self._resident: OrderedDict[int, _Resident] = OrderedDict()  # the most recently used layer is the last
        self._readings = self._uses = 0
        self._last_two: tuple[int, int] = (-1, -1)  # the two layers that were used last
        self._successor: dict[tuple[int, int], int] = {}  # (two layers in a row) -> the layer used next

    @property
    def absent_bytes(self) -> int:
        """Bytes of this rank's ranges of layers that are not in memory: all but the RESIDENT_LAYERS largest."""
        sizes = sorted(sum(self._shards[at].copies[0].nbytes for at in indices) for indices in self._layers)
        return sum(sizes[:-RESIDENT_LAYERS])

    def evict_all(self) -> None:
        """Release all layers before their weights change. Call this only while no rank computes."""
        self._finish_reading()
        for layer in self._resident:
            self._release(layer)
        self._resident.clear()

    def close(self) -> None:
        super().close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _use(self, layer: int) -> None:
        if layer == self._last_two[1] and layer in self._resident:
            return
        self._uses += 1
        self._progress.publish(self._uses, _USED)  # tells other ranks that earlier uses are over
        self._successor[self._last_two] = layer
        self._last_two = (self._last_two[1], layer)
        if layer not in self._resident:
            self._start_reading(layer, keep=layer)
        self._resident[layer].last_use = self._uses
        self._resident.move_to_end(layer)
        reading = self._resident[layer].reading
        if self._progress.local(_READ) < reading:
            self._finish_reading()
        self._progress.wait(reading, _READ, self._serve)  # until all ranks have finished it
        following = self._successor.get(self._last_two)
        if following is not None and following not in self._resident:
            self._start_reading(following, keep=layer)

    def _start_reading(self, layer: int, keep: int) -> None:
        """Start to read a layer. If memory is full, evict the least recently used layer other than `keep`."""
        self._finish_reading()
        evicted: tuple[int, int] | None = None
        if len(self._resident) >= RESIDENT_LAYERS:
            oldest = next(resident for resident in self._resident if resident != keep)
            evicted = (oldest, self._resident.pop(oldest).last_use)
        self._readings += 1
        self._resident[layer] = _Resident(self._readings, self._uses)
        self._resident.move_to_end(layer, last=layer == keep)
        self._reading = self._thread.submit(self._replace, layer, self._readings, evicted)

    def _replace(self, layer: int, reading: int, evicted: tuple[int, int] | None) -> None:
        """Release one layer and read another. Runs in the read thread, which must not exchange messages."""
        if evicted is not None:
            self._progress.wait(evicted[1] + 1, _USED)
            self._release(evicted[0])
        if self._wait_updated is not None:
            self._wait_updated(self._layers[layer])
        places = [(index, window) for index in self._layers[layer] for window in self._disk.windows[index]]
        records = [(window.record.offset, *window.record.fields["compute"]) for _, window in places]
        moves = [Move(offset + at, paged(size), None) for offset, at, size in records]
        for (index, window), buffer in zip(places, ScratchStream(self._disk.scratch, moves), strict=True):
            for copy in self._shards[index].copies:
                target = copy[window.start : window.stop]
                target.copy_(buffer[: target.nbytes].view(target.dtype))
        self._progress.publish(reading, _READ)

    def _release(self, layer: int) -> None:
        for index in self._layers[layer]:
            self._shards[index].release_pages()

    def _finish_reading(self) -> None:
        """Wait until this rank's current read is finished. Raises the error of the read."""
        if self._reading is not None:
            while not self._reading.done():
                self._serve()
                time.sleep(POLL_S)
            self._reading.result()
            self._reading = None

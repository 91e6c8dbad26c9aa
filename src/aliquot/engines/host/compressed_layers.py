"""Frozen weights of decoder layers in 8 or 4 bits, decoded into shared memory for each use of a layer.

There is one compressed copy per NUMA node; the ranks of each host load all of it. Two buffers of a layer's size hold
decoded weights: of the layer that computes, and of the layer that other ranks may still use. The ranks of a NUMA node
divide the decoding of a layer, so that each weight is decoded once for all of them. Forward and backward passes each
decode a layer once; recomputation in the backward pass uses the same decoded weights. A GPU decodes the codes itself
(compute_device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from aliquot.core.errors import EngineError
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.shared_memory import ProgressCounters
from aliquot.engines.base import EngineSpec
from aliquot.engines.host.layer_hooks import Layers, LayerSlots
from aliquot.engines.host.shared_weights import SharedWeights, Weight
from aliquot.models.structure import decoder_layers
from aliquot.offload.windows import paged
from aliquot.tensor_io.code_sizes import code_bytes, scale_count
from aliquot.tensor_io.weight_codes import Codes, CompressedRange, codes_in

_DECODED, _USED = 0, 1  # counters of a rank: decoded layers, and started uses of layers
_BUFFERS = 2


def choose_compressed(model: nn.Module, spec: EngineSpec) -> Layers:
    """Return each decoder layer that has weights in `spec.compressed`, and the indices of these weights.

    Raises EngineError if this run does not support compressed weights.
    """
    indices = {
        id(weight): at for at, (name, weight) in enumerate(model.named_parameters())
        if name in spec.compressed and not weight.requires_grad  # all weights of a start-up proof are trained
    }  # fmt: skip
    if indices and not spec.packs:
        raise EngineError(
            f"adapter.base: {spec.base} needs shard.engine: fsdp with a model that takes one document per call"
        )
    return [
        (layer, [indices[id(weight)] for weight in layer.parameters() if id(weight) in indices])
        for layer in decoder_layers(model)
        if any(id(weight) in indices for weight in layer.parameters())
    ]


class CompressedLayers(LayerSlots):
    """The compressed weights of all layers, and the hooks that decode a layer when it is used on CPUs."""

    def __init__(
        self,
        hosts: Hosts,
        spec: EngineSpec,
        weights: Sequence[Weight],
        layers: Layers,
        shared: SharedWeights,
        serve: Callable[[], None],
    ) -> None:
        """Share the memory. Collective over the host.

        `shared` has the buffers for decoded weights. `serve` is called while this rank waits for other ranks, because
        they may wait until this rank reads its ring buffer.
        """
        super().__init__([module for module, _ in layers], _BUFFERS)
        self._serve = serve
        self._peers = hosts.peers
        self._layers = [indices for _, indices in layers]
        self.weights = frozenset(index for indices in self._layers for index in indices)
        shapes = {index: weights[index].shape for index in sorted(self.weights)}
        code_sizes = [align(code_bytes(spec.base, shape)) for shape in shapes.values()]
        scale_sizes = [align(4 * scale_count(spec.base, shape)) for shape in shapes.values()]
        local, remote = hosts.share_per_numa_node(sum(code_sizes))
        self.size_bytes, self.base = local.size_bytes, spec.base
        self.memory = local.tensor(0, (local.size_bytes,), torch.uint8)  # this NUMA node's codes
        self.codes: dict[int, Tensor] = {}  # by weight, slices of `memory`
        self._scales_memory = self._peers.share(paged(sum(scale_sizes)) if self._peers.index == 0 else 0)[0]
        self._copies: dict[int, list[Codes]] = {}
        self._scales: dict[int, Tensor] = {}
        offsets = zip(accumulate(code_sizes, initial=0), accumulate(scale_sizes, initial=0), strict=True)
        for (index, shape), (offset, scales_offset) in zip(shapes.items(), offsets, strict=False):
            places = offset, (code_bytes(spec.base, shape),), torch.uint8
            self.codes[index] = local.tensor(*places)
            self._copies[index] = [codes_in(memory.tensor(*places), spec.base, shape) for memory in (local, *remote)]
            self._scales[index] = self._scales_memory.tensor(
                scales_offset, (scale_count(spec.base, shape),), torch.float32
            )
        node = hosts.numa_nodes[self._peers.index]
        # This rank's place among the ranks of its NUMA node, and their number.
        first, self._members = hosts.numa_nodes[: self._peers.index].count(node), hosts.numa_nodes.count(node)
        self._parts = (first, first + 1)
        self._shared = shared
        self._progress = ProgressCounters(self._peers, 2)
        self._last_use = [0] * _BUFFERS  # of each buffer
        self._uses = self._decoded = 0

    def shard(self, index: int, start: int) -> CompressedRange:
        """Return the range of a weight that begins at element `start`."""
        return CompressedRange(self._copies[index], self._scales[index], start)

    def finish(self) -> None:
        """Compress the scales, after all ranks have stored their ranges. Collective over the host."""
        for number, (index, scales) in enumerate(self._scales.items()):
            # Released pages hold zeros: nothing was stored since the last call.
            if number % self._peers.size == self._peers.index and bool(scales.any()):
                for codes in self._copies[index]:
                    codes.set_scales(scales)
        self._peers.barrier()
        if self._peers.index == 0:
            self._scales_memory.release_pages(0, self._scales_memory.size_bytes)
        self._peers.barrier()
        self._layer_in, self._current = [-1] * _BUFFERS, -1

    def _end_use(self) -> None:
        if self._current >= 0:
            self._last_use[self._current % _BUFFERS] = self._uses
        self._uses += 1
        self._progress.publish(self._uses, _USED)  # tells other ranks that earlier uses are over

    def _fill(self, layer: int, slot: int, before: int) -> None:
        # All ranks must have begun another use after the last use of this buffer.
        self._progress.wait(self._last_use[slot] + 1, _USED, self._serve)
        for index in self._layers[layer]:
            codes, out = self._copies[index][0], self._shared.view(index).view(-1)
            edges = [out.numel() // codes.unit * part // self._members * codes.unit for part in self._parts]
            codes.decode(edges[0], out[slice(*edges)])
        self._decoded += 1
        self._progress.publish(self._decoded, _DECODED)
        self._progress.wait(self._decoded, _DECODED, self._serve)

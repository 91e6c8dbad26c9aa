"""Decoder layers whose weights lie on disk: each is in shared memory while it computes, the next one being read.

All ranks of the host use the same layers in the same order, forward and backward, so each knows without being told
which layer is wanted next and which goes for it. Each reads its own ranges. A layer may be used when all have read
theirs; its pages are given back when all have gone on to another.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aliquot.core.errors import EngineError
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.progress_counters import POLL_S, ProgressCounters
from aliquot.engines.base import EngineSpec
from aliquot.engines.host.host_disk import HostDisk
from aliquot.engines.host.host_memory import RESIDENT_LAYERS
from aliquot.engines.host.shared_weights import Owned
from aliquot.engines.state_placement import first_of, streamed_layers
from aliquot.models.structure import decoder_layers
from aliquot.offload.stream import Move, Stream
from aliquot.offload.windows import paged

_READ, _USED = 0, 1  # counters of a rank in shared memory


Layers = Sequence[tuple[nn.Module, Sequence[int]]]  # of each the module, and which of the model's weights lie on disk


def layers_on_disk(model: nn.Module, spec: EngineSpec, several_hosts: bool) -> Layers:
    """Not what other layers have, too. Raises EngineError where there would be some and cannot."""
    if spec.on_disk is None or not spec.on_disk.layers:
        return []
    for stands, why in (
        (several_hosts, "several hosts"),
        (not spec.packs, "a model of which each document is a call"),
    ):
        if stands:
            raise EngineError(f"shard.offload: disk keeps no weights there with {why}, and the rest does not fit")
    names, parameters = zip(*model.named_parameters(), strict=True)
    shapes = [tuple(parameter.shape) if parameter.requires_grad else None for parameter in parameters]
    there = first_of(shapes, spec.on_disk.states)
    there += [
        at for at, each in enumerate(parameters)
        if shapes[at] is None and each.shape in spec.on_disk.frozen and names[at] not in spec.exact
    ]  # fmt: skip
    layers = decoder_layers(model)
    users = Counter(id(parameter) for layer in layers for parameter in set(layer.parameters()))
    index = {id(parameters[at]): at for at in there if users[id(parameters[at])] == 1}
    chosen = [layers[at] for at in streamed_layers(len(layers), spec.on_disk.layers)]
    return [(layer, [index[id(each)] for each in layer.parameters() if id(each) in index]) for layer in chosen]


@dataclass
class _Resident:
    number: int  # of its reading, counted from 1
    last_use: int


class StreamedLayers:
    def __init__(
        self,
        peers: Peers,
        serve: Callable[[], None],
        disk: HostDisk,
        owned: Sequence[Owned],
        layers: Layers,
        need_own: Callable[[Sequence[int]], None] | None,
    ) -> None:
        """`serve` is called while this rank waits for others, which may wait for what it does. `need_own` waits, in any
        thread, until what this rank owns of weights has been updated and is written. Collective over the host.
        """
        self._serve = serve
        self._need_own = need_own
        self._disk = disk
        self._owned = owned
        self.layers = [indices for _, indices in layers]  # the weights of each
        self.weights = frozenset(index for _, indices in layers for index in indices)
        self._progress = ProgressCounters(peers, 2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-layers")
        self._reading: Future[None] | None = None
        self._resident: OrderedDict[int, _Resident] = OrderedDict()  # the one that was used last is the last
        self._readings = 0
        self._uses = 0
        self._before: tuple[int, int] = (-1, -1)  # the layers used last
        self._follower: dict[tuple[int, int], int] = {}  # which layer came after those two
        self.waited_s = 0.0
        self._hooks = [hook for at, (module, _) in enumerate(layers) for hook in self._listen(at, module)]

    @property
    def absent_bytes(self) -> int:
        """Of this rank's ranges, at least so many are not in memory."""
        sizes = sorted(sum(self._owned[at].copies[0].nbytes for at in indices) for indices in self.layers)
        return sum(sizes[:-RESIDENT_LAYERS])

    def pass_through(self) -> None:
        """What a forward pass would use, by a rank that has nothing to compute."""
        for layer in range(len(self.layers)):
            self._use(layer)

    def forget(self) -> None:
        """The weights are about to change. Called where no rank computes."""
        self._settle()
        for layer in self._resident:
            self._give_back(layer)
        self._resident.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _listen(self, layer: int, module: nn.Module) -> list[RemovableHandle]:
        def before(*_: Any) -> None:
            self._use(layer)

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                # When its gradient is known the layer's backward pass begins.
                hidden.register_hook(before)  # type: ignore[no-untyped-call]

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _use(self, layer: int) -> None:
        if layer == self._before[1] and layer in self._resident:
            return
        self._uses += 1
        self._progress.publish(self._uses, _USED)  # those before are done with
        self._follower[self._before] = layer
        self._before = (self._before[1], layer)
        if layer not in self._resident:
            self._read(layer, keep=layer)
        self._resident[layer].last_use = self._uses
        self._resident.move_to_end(layer)
        begun = time.perf_counter()
        self._wait(_READ, self._resident[layer].number)
        self.waited_s += time.perf_counter() - begun
        following = self._follower.get(self._before)
        if following is not None and following not in self._resident:
            self._read(following, keep=layer)

    def _read(self, layer: int, keep: int) -> None:
        """Begin to read it, in place of the layer that was used longest ago, but not of `keep`."""
        self._settle()
        gone: tuple[int, int] | None = None
        if len(self._resident) >= RESIDENT_LAYERS:
            oldest = next(each for each in self._resident if each != keep)
            gone = (oldest, self._resident.pop(oldest).last_use)
        self._readings += 1
        self._resident[layer] = _Resident(self._readings, self._uses)
        self._resident.move_to_end(layer, last=layer == keep)
        self._reading = self._thread.submit(self._exchange, layer, self._readings, gone)

    def _exchange(self, layer: int, number: int, gone: tuple[int, int] | None) -> None:
        """In a thread of its own: it neither sends nor receives."""
        if gone is not None:
            self._progress.wait(gone[1] + 1, _USED)
            self._give_back(gone[0])
        if self._need_own is not None:
            self._need_own(self.layers[layer])
        places = [(index, window) for index in self.layers[layer] for window in self._disk.windows[index]]
        moves = []
        for _, window in places:
            at, size = window.record.fields["compute"]
            moves.append(Move(window.record.offset + at, paged(size), None))
        for (index, window), buffer in zip(places, Stream(self._disk.scratch, moves), strict=True):
            for copy in self._owned[index].copies:
                target = copy[window.start : window.stop]
                target.copy_(buffer[: target.nbytes].view(target.dtype))
        self._progress.publish(number, _READ)

    def _give_back(self, layer: int) -> None:
        for index in self.layers[layer]:
            self._owned[index].give_back()

    def _settle(self) -> None:
        """Nothing is being read. Raises what reading has raised."""
        if self._reading is not None:
            while not self._reading.done():
                self._serve()
                time.sleep(POLL_S)
            self._reading.result()
            self._reading = None

    def _wait(self, counter: int, count: int) -> None:
        if self._progress.local(counter) < count:
            self._settle()
        self._progress.wait(count, counter, self._serve)

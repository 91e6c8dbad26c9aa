"""What owners make of their weights, on its way to the other hosts while the next forward pass begins.

Messages go in the order in which a forward pass wants weights. A message holds the changed bits of a piece of a weight
(distributed/collectives/weight_patch.py). Every rank receives what its counterparts own, and applies it when a
layer is about to use it: no thread takes cores from those that compute. A layer waits until all ranks of its host have
done so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aliquot.distributed.collectives.buffer_sizes import BLOCK
from aliquot.distributed.collectives.messages import Rooms
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.progress_counters import POLL_S, ProgressCounters
from aliquot.distributed.collectives.weight_patch import WeightPatches, check, checksums, most_bytes
from aliquot.distributed.collectives.wire import Wire
from aliquot.engines.host.host_memory import EXCHANGE_BYTES, PUBLISHED_NUMEL
from aliquot.engines.host.shared_weights import Weight
from aliquot.models.structure import decoder_layers

RangeOf = Callable[[int, int], list[Tensor]]  # of a weight and a rank: what it owns, flat, in every shared copy


@dataclass
class _Expected:
    """A piece of a weight: what has changed in it, or, where `room` is None, its weights where they lie."""

    index: int
    host: int
    start: int  # in what that host's rank owns
    stop: int
    room: Tensor | None
    checksums: Tensor | None
    arrival: Future[None]  # of its last message


class ForwardOrder:
    """The model's parameters, by index, as a forward pass wants them."""

    def __init__(self, model: nn.Module, head: nn.Parameter | None) -> None:
        """`head`: a parameter that is not used by the model itself, but after it."""
        index = {id(parameter): at for at, parameter in enumerate(model.parameters())}
        self.layers = [
            (layer, [index[id(parameter)] for parameter in layer.parameters()]) for layer in decoder_layers(model)
        ]
        in_layers = dict.fromkeys(at for _, indices in self.layers for at in indices)
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        last = [] if head is None or head is embedding else [index[id(head)]]
        self.first = [at for at in index.values() if at not in in_layers and at not in last]
        self.all = [*self.first, *in_layers, *last]


class Publication:
    def __init__(
        self,
        wire: Wire,
        peers: Peers,
        owners: Sequence[int],
        weights: Sequence[Weight],
        range_of: RangeOf,
        serve: Callable[[], None],
    ) -> None:
        """`serve` is called while this rank waits for others of its host. Collective over the host."""
        self._wire = wire
        self._weights = weights
        self._owners = owners
        self._order: Sequence[int] = ()
        self._places: dict[int, int] = {}
        self._range_of = range_of
        self._serve = serve
        self._patches = WeightPatches()
        self._old: Tensor | None = None
        self._scratch = torch.empty(most_bytes(PUBLISHED_NUMEL), dtype=torch.uint8)
        self._raw = True
        self._progress = ProgressCounters(peers)
        self._done = 0  # weights of earlier publications
        self._arrived = 0  # of this publication's, how many are what their owners made of them
        self._usable = 0  # and on all ranks of this host, as far as this one knows
        self._to_expect: Iterator[tuple[int, int, int, int]] = iter(())
        self._expected: deque[_Expected] = deque()
        self._expected_bytes = 0
        self._leaving: deque[Future[None]] = deque()
        self._rooms = Rooms(torch.uint8, EXCHANGE_BYTES)
        self.waited_s = 0.0  # for ranks of this host

    def begin(self, order: Sequence[int], raw: bool) -> None:
        """Nobody computes any more, on any host. `order`: of weights, in which they are updated and wanted. `raw`: they
        travel as they are, not what has changed in them."""
        assert self._arrived == len(self._order), "weights were to be used before they are replaced"
        self._raw = raw
        self._done += len(self._order)
        self._order = order
        self._places = {index: place for place, index in enumerate(order)}
        self._arrived = self._usable = 0
        self._to_expect = (
            (index, host, start, stop)
            for index in self._order
            for host in self._wire.others
            for start, stop in _cuts(self._weights[index].numel_of(self._owners[host]))
        )
        self._expect()

    def changes(self, index: int) -> None:
        """This rank is about to update what it owns of a weight."""
        if not self._raw:
            self._old = self._range_of(index, self._owners[self._wire.own])[0].clone()

    def updated(self, index: int) -> None:
        """It has been. Does not wait: others may be where they take nothing."""
        own = self._range_of(index, self._owners[self._wire.own])[0]
        for start, stop in _cuts(own.numel()):
            values = own[start:stop]
            if self._raw:
                messages = [values, checksums(values)]
            else:
                assert self._old is not None
                size = self._patches.encode(self._old[start:stop], values, self._scratch)
                messages = [self._scratch[:size].clone()]
            self._leaving += [self._wire.send(message, host) for message in messages for host in self._wire.others]
        self._old = None
        self._settle()

    def need(self, indices: Sequence[int]) -> None:
        """These weights, of which some may not be on their way, are about to be used: all ranks of this host come here.

        Raises what the transfers raise, and SelfTestError where weights are not what was sent."""
        count = 1 + max((self._places.get(index, -1) for index in indices), default=-1)
        if count <= self._usable:
            return
        while self._arrived < count:
            self._wire.wait(self._expected[0].arrival)
            self._take_in()
        self._progress.publish(self._done + self._arrived)
        begun = time.perf_counter()

        def meanwhile() -> None:
            self._serve()
            self._settle()

        self._progress.wait(self._done + count, meanwhile=meanwhile)
        self.waited_s += time.perf_counter() - begun
        self._usable = count

    def _settle(self) -> None:
        """Whatever is over by now. Nobody uses, yet, what comes in."""
        while self._expected and self._expected[0].arrival.done():
            self._take_in()
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().result()

    def _take_in(self) -> None:
        """The oldest of what is expected, which has arrived."""
        expected = self._expected.popleft()
        expected.arrival.result()
        index, owner = expected.index, self._owners[expected.host]
        first, *others = [copy[expected.start : expected.stop] for copy in self._range_of(index, owner)]
        who = f"weights of {self._weights[index].name} that rank {owner} has updated"
        if expected.room is not None:
            self._patches.decode(expected.room, first, who)
            self._expected_bytes -= expected.room.nbytes
            self._rooms.give(expected.room)
        elif expected.checksums is not None:
            check(first, expected.checksums, who)
        for copy in others:
            copy.copy_(first)
        self._expect()

    def _expect(self) -> None:
        """Post receives as far as there is room for them; where weights lie there is."""
        while self._expected_bytes < EXCHANGE_BYTES and (piece := next(self._to_expect, None)) is not None:
            index, host, start, stop = piece
            if self._raw:
                own = torch.empty(-(-(stop - start) // BLOCK), dtype=torch.int64)
                self._wire.receive(self._range_of(index, self._owners[host])[0][start:stop], host)
                self._expected.append(_Expected(*piece, None, own, self._wire.receive(own, host)))
                continue
            size = most_bytes(stop - start)
            room = self._rooms.take(size)
            self._expected.append(_Expected(*piece, room, None, self._wire.receive(room, host)))
            self._expected_bytes += size
        self._arrived = self._places[self._expected[0].index] if self._expected else len(self._order)


def _cuts(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PUBLISHED_NUMEL, numel)) for start in range(0, numel, PUBLISHED_NUMEL))


class LateUpdate:
    def __init__(self, peers: Peers, order: Sequence[int], serve: Callable[[], None]) -> None:
        """`order`: of the weights that are updated. `serve` is called while this rank waits for others, which may wait
        for what it does. Collective over the host."""
        self._serve = serve
        self._count = len(order)
        self._places = {index: place for place, index in enumerate(order)}
        self._progress = ProgressCounters(peers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-update")
        self._running: Future[None] | None = None
        self._before = 0  # weights of earlier updates
        self._usable = self._count  # of this one's, updated by all ranks of this host, as far as this one knows
        self.waited_s = 0.0

    def begin(self, update: Callable[[], None]) -> None:
        """Nobody computes any more on this host, and what was begun before has been needed as a whole. `update` updates
        all weights in their order, and calls `updated` after each."""
        if self._running is not None:
            self._before += self._count
        self._usable = 0

        end = self._before + self._count  # by the time that `update` returns the next may have begun

        def run() -> None:
            update()
            self._progress.publish(end)  # those of which this rank has no row, too

        self._running = self._thread.submit(run)

    def updated(self, index: int) -> None:
        """Within `update`: this rank's rows are as they will be used, or on their way to the disk."""
        self._progress.publish(self._before + self._places[index] + 1)

    def need(self, indices: Sequence[int]) -> None:
        """These weights are about to be used: all ranks of this host come here. Raises what the update has raised."""
        count = self._place_behind(indices)
        if count <= self._usable:
            return
        begun = time.perf_counter()

        def meanwhile() -> None:
            self._check()
            self._serve()

        self._progress.wait(self._before + count, meanwhile=meanwhile)
        self._usable = count
        self.waited_s += time.perf_counter() - begun

    def need_own(self, indices: Sequence[int]) -> None:
        """As `need`, of this rank's rows alone, in any thread."""
        count = 0 if self._running is None else self._place_behind(indices)
        while self._progress.local() < self._before + count:
            self._check()
            time.sleep(POLL_S)

    def settle(self) -> None:
        """This rank has updated all of its rows. In any thread. Raises what the update has raised."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _place_behind(self, indices: Sequence[int]) -> int:
        return 1 + max((self._places.get(index, -1) for index in indices), default=-1)

    def _check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()

"""Deliver updated weights to the layers that use them, while the next forward pass already begins.

Owners update weights in the order in which a forward pass uses the weights. A layer waits only for its own weights.

On one host with optimizer state on disk or with GPUs (`OverlappedUpdate`), the update runs in a thread. While a layer
computes, the thread updates the next layers, reads their states from disk and writes the states of the previous layers.

On several hosts (`WeightPublication`), each rank sends its updated weights to the other hosts. A message holds the
changed bits of pieces of weights (distributed/collectives/weight_patch.py), so that the number of messages follows from
bytes, not from weights. Every rank receives the ranges of its counterparts. The rank applies the changes when a layer
is about to use the weights, so that no thread takes a core from computing ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from heapq import merge

import torch
from torch import Tensor

from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import POLL_S, ProgressCounters
from aliquot.distributed.collectives.weight_patch import WeightPatches, max_patch_bytes
from aliquot.distributed.collectives.wire import BufferPool, Wire
from aliquot.engines.host.host_memory import MESSAGE_BYTES, PUBLISHED_NUMEL, exchange_bytes
from aliquot.engines.host.shared_weights import Counterparts, SharedWeights, Weight


class PendingUpdate:
    """An update whose weights become usable one after another, in an order that all ranks of the host know.

    The progress counter of a rank counts the weights that the rank has completed, over all updates.
    """

    def __init__(self, peers: Peers, serve: Callable[[], None]) -> None:
        """Share the counters. Collective over the host.

        `serve` is called while this rank waits for other ranks, because they may wait until this rank reads its ring
        buffer.
        """
        self._serve = serve
        self._places: dict[int, int] = {}
        self._progress = ProgressCounters(peers)
        self._count_before = 0  # number of weights in all earlier updates
        self._usable = 0  # weights of this update that, as far as this rank knows, all ranks of the host have completed
        self.waited_s = 0.0  # time spent waiting for ranks of this host

    def _count_up_to(self, indices: Sequence[int]) -> int:
        return 1 + max((self._places.get(index, -1) for index in indices), default=-1)

    def _wait_for_ranks(self, count: int, poll: Callable[[], None]) -> None:
        """Wait until all ranks of the host have completed the first `count` weights of this update."""
        begun = time.perf_counter()

        def meanwhile() -> None:
            poll()
            self._serve()

        self._progress.wait(self._count_before + count, meanwhile=meanwhile)
        self._usable = count
        self.waited_s += time.perf_counter() - begun


class OverlappedUpdate(PendingUpdate):
    """An optimizer update that runs in a thread, and always updates the weights in the same order."""

    def __init__(self, peers: Peers, order: Sequence[int], serve: Callable[[], None]) -> None:
        super().__init__(peers, serve)
        self._count = self._usable = len(order)
        self._places = {index: place for place, index in enumerate(order)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aliquot-update")
        self._running: Future[None] | None = None

    def begin(self, update: Callable[[], None]) -> None:
        """Start `update`, which updates all weights in order and calls `mark_updated` after each weight.

        Call this when no rank of the host computes any more, and all weights of the previous update were waited for.
        """
        if self._running is not None:
            self._count_before += self._count
        self._usable = 0

        end = self._count_before + self._count  # computed now, because `begin` changes `_count_before`

        def run() -> None:
            update()
            self._progress.publish(end)  # includes weights of which this rank owns no rows

        self._running = self._thread.submit(run)

    def mark_updated(self, index: int) -> None:
        """Tell the other ranks that this rank's range of a weight is updated. Called within `update`."""
        self._progress.publish(self._count_before + self._places[index] + 1)

    def wait_usable(self, indices: Sequence[int]) -> None:
        """Wait until all ranks of the host have updated these weights. Raises an error of this rank's update."""
        count = self._count_up_to(indices)
        if count > self._usable:
            self._wait_for_ranks(count, self._raise_failure)

    def wait_updated_here(self, indices: Sequence[int]) -> None:
        """Wait, in any thread, until this rank has updated its ranges of these weights. Raises like `wait_usable`."""
        count = 0 if self._running is None else self._count_up_to(indices)
        while self._progress.local() < self._count_before + count:
            self._raise_failure()
            time.sleep(POLL_S)

    def join(self) -> None:
        """Wait, in any thread, until this rank has updated all its ranges. Raises like `wait_usable`."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _raise_failure(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()


@dataclass(frozen=True)
class WeightMessage:
    """The pieces of weights in one message from the rank on `host`."""

    host: int
    pieces: Sequence[tuple[int, int, int]]  # (weight, start, stop), counted from the rank's first element of the weight
    most_bytes: int


class WeightPublication(PendingUpdate):
    """Exchange updated weights between hosts. A weight is complete when all its pieces are received and applied."""

    def __init__(
        self,
        wire: Wire,
        peers: Peers,
        counterparts: Counterparts,
        weights: Sequence[Weight],
        shared: SharedWeights,
        serve: Callable[[], None],
    ) -> None:
        super().__init__(peers, serve)
        self._wire = wire
        self._weights = weights
        self._counterparts = counterparts
        self._order: Sequence[int] = ()
        self._shared = shared
        self._patches = WeightPatches()
        self._old: Tensor | None = None  # this rank's range before its update
        self._raw = True
        self._to_send: Iterator[WeightMessage] = iter(())
        self._open: tuple[WeightMessage, Tensor, int] | None = None  # the next message, its buffer, bytes written
        self._departures: deque[tuple[list[Future[None]], int]] = deque()  # sends to all hosts, bytes of the message
        self._departing_bytes = 0
        self._arrived = 0  # weights of this publication that are complete on this rank
        self._to_receive: Iterator[WeightMessage] = iter(())
        self._arrivals: deque[tuple[WeightMessage, Tensor, Future[None]]] = deque()
        self._arriving_bytes = 0
        self._limit_bytes = exchange_bytes(len(wire.peer_hosts))
        self._pool = BufferPool(torch.uint8, self._limit_bytes)

    def begin(self, order: Sequence[int], raw: bool) -> None:
        """Begin to publish weights, in the `order` in which ranks update and use the weights.

        Call this when no rank of any host computes any more. `raw`: send whole weights, not their changed bits.
        """
        assert self._arrived == len(self._order), "every weight must be used before it is replaced"
        self._raw = raw
        self._count_before += len(self._order)
        self._order = order
        self._places = {index: place for place, index in enumerate(order)}
        self._arrived = self._usable = 0
        self._to_send = self._messages(self._wire.host)
        # In the order in which layers need the first weight of each message.
        messages = map(self._messages, self._wire.peer_hosts)
        self._to_receive = merge(*messages, key=lambda message: self._places[message.pieces[0][0]])
        self._post_receives()

    def before_update(self, index: int) -> None:
        """Copy this rank's range of a weight before its update, to find the bits that the update changes."""
        if not self._raw:
            self._old = self._copies(index, self._wire.host)[0].clone()

    def mark_updated(self, index: int) -> None:
        """Write this rank's updated range of a weight into messages, and send each message that is complete.

        Changed bits never wait for space, because the receivers may compute until they need weights of this rank.
        """
        updated = self._copies(index, self._wire.host)[0]
        for start, stop in _pieces(updated.numel()):
            if self._open is None:
                message = next(self._to_send)
                self._open = message, torch.empty(message.most_bytes, dtype=torch.uint8), 0
            message, buffer, size = self._open
            old = None if self._old is None else self._old[start:stop]
            size += self._patches.encode(old, updated[start:stop], buffer[size:])
            self._open = message, buffer, size
            if message.pieces[-1] == (index, start, stop):
                self._open = None
                self._send(buffer if size == message.most_bytes else buffer[:size].clone())
        self._old = None
        self._poll()

    def _send(self, message: Tensor) -> None:
        self._departures.append(([self._wire.send(message, host) for host in self._wire.peer_hosts], message.nbytes))
        self._departing_bytes += message.nbytes
        since = time.monotonic()
        while self._raw and self._departing_bytes > self._limit_bytes:
            wait(self._departures[0][0], POLL_S)
            self._poll()
            self._wire.probe(since)

    def wait_usable(self, indices: Sequence[int]) -> None:
        """Wait until these weights are complete on all ranks of the host. All ranks of the host must call this.

        Raises SelfTestError if received weights differ from the sent ones, PeerLost if another host has ended.
        """
        count = self._count_up_to(indices)
        if count <= self._usable:
            return
        while self._arrived < count:
            self._wire.wait(self._arrivals[0][2])
            self._apply()
        self._progress.publish(self._count_before + self._arrived)
        self._wait_for_ranks(count, self._poll)

    def _copies(self, index: int, host: int) -> list[Tensor]:
        """Return the range of a weight that the rank of `host` owns, flat, in every shared copy."""
        return self._shared.shard(index, self._counterparts.ranks[host]).copies

    def _messages(self, host: int) -> Iterator[WeightMessage]:
        """Yield the messages of the rank on `host`, in order. A message ends at MESSAGE_BYTES."""
        pieces: list[tuple[int, int, int]] = []
        size_bytes = most_bytes = 0
        for index in self._order:
            weight = self._weights[index]
            for start, stop in _pieces(weight.shard_numel(self._counterparts.ranks[host])):
                pieces.append((index, start, stop))
                size_bytes += (stop - start) * weight.dtype.itemsize
                most_bytes += max_patch_bytes(stop - start, weight.dtype.itemsize)
                if size_bytes >= MESSAGE_BYTES:
                    yield WeightMessage(host, pieces, most_bytes)
                    pieces, size_bytes, most_bytes = [], 0, 0
        if pieces:
            yield WeightMessage(host, pieces, most_bytes)

    def _poll(self) -> None:
        """Apply received messages and release finished sends without waiting. No rank uses the applied weights yet."""
        while self._arrivals and self._arrivals[0][2].done():
            self._apply()
        while self._departures and all(transfer.done() for transfer in self._departures[0][0]):
            transfers, size_bytes = self._departures.popleft()
            self._departing_bytes -= size_bytes
            for transfer in transfers:
                transfer.result()

    def _apply(self) -> None:
        """Apply the oldest received message, whose transfer is finished, to every shared copy of its weights."""
        message, buffer, transfer = self._arrivals.popleft()
        transfer.result()
        owner, at = self._counterparts.ranks[message.host], 0
        for index, start, stop in message.pieces:
            first, *others = [copy[start:stop] for copy in self._copies(index, message.host)]
            sender = f"weights of {self._weights[index].name} that rank {owner} has updated"
            at += self._patches.decode(buffer[at:], first, sender)
            for copy in others:
                copy.copy_(first)
        self._arriving_bytes -= buffer.nbytes
        self._pool.give(buffer)
        self._post_receives()

    def _post_receives(self) -> None:
        """Post receives while their buffers fit into the limit."""
        while self._arriving_bytes < self._limit_bytes and (message := next(self._to_receive, None)) is not None:
            buffer = self._pool.take(message.most_bytes)
            self._arrivals.append((message, buffer, self._wire.receive(buffer, message.host)))
            self._arriving_bytes += message.most_bytes
        self._arrived = self._places[self._arrivals[0][0].pieces[0][0]] if self._arrivals else len(self._order)


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PUBLISHED_NUMEL, numel)) for start in range(0, numel, PUBLISHED_NUMEL))

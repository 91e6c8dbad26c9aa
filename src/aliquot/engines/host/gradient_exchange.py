"""Gradient sums between hosts, piece by piece while the last backward pass of a step still computes.

Every rank completes the same pieces in the same order (host_gradients.py). What of one belongs to another host's owner
leaves at once. What comes in is added to this rank's own sums, in the order of the hosts, when both are there: looked
for whenever a piece is completed, waited for only when all are. Then each host tells the others the checksum of all
that it has sent them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from aliquot.collectives.message_checksums import Tally
from aliquot.collectives.rooms import Rooms
from aliquot.collectives.wire import Wire, add_hosts
from aliquot.engines.host.host_memory import EXCHANGE_BYTES
from aliquot.engines.host.host_sums import HostSums
from aliquot.engines.host.sent_rows import decode_rows, encode_rows, message_in, most_bytes
from aliquot.engines.host.weight import Weight
from aliquot.errors import SelfTestError

_POLL_S = 1e-3

Piece = tuple[int, int, int]  # weight, first element, element after the last


@dataclass
class _Expected:
    """A piece of what this rank owns, and what other hosts have for it."""

    piece: Piece
    rooms: dict[int, Tensor]
    arrivals: list[Future[None]]


class GradientExchange:
    def __init__(
        self,
        wire: Wire,
        weights: Sequence[Weight],
        sums: HostSums,
        owners: Sequence[int],
        pieces: Sequence[Piece],
        looked_up: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """`pieces`: as every rank completes them. What lies on disk is not among them. `looked_up[weight][host]`: bool,
        the rows of that host's owner outside of which sums are zero."""
        self._wire = wire
        self._weights = weights
        self._sums = sums
        self._owners = owners
        self._pieces = pieces
        self._looked_up = looked_up
        sums.room = self.room
        self._own_pieces = [own for piece in pieces if (own := self._part(piece, wire.own)) is not None]
        self._completed = 0
        self._own_completed = 0
        self._to_expect: Iterator[Piece] = iter(())
        self._expected: deque[_Expected] = deque()
        self._expected_bytes = 0
        self._added = 0
        self._leaving: deque[tuple[Future[None], Tensor, bool]] = deque()  # the last: in a room of ours
        self._leaving_bytes = 0
        self._rooms = Rooms(sums.sent_dtype, EXCHANGE_BYTES)
        self._sent: dict[int, Tally] = {}
        self._received: dict[int, Tally] = {}

    def begin(self) -> None:
        """The last micro-batch of the step begins."""
        self._completed = self._own_completed = self._added = 0
        self._to_expect = iter(self._own_pieces)
        self._sent, self._received = ({host: Tally() for host in self._wire.others} for _ in range(2))
        self._expect()

    def completed(self, piece: Piece) -> None:
        """This host's sums of a piece are what they will be."""
        if piece != self._pieces[self._completed]:
            name = self._weights[piece[0]].name
            raise SelfTestError(f"a gradient of {name} was complete before its turn: hosts would sum different weights")
        self._completed += 1
        self._own_completed += self._part(piece, self._wire.own) is not None
        for host in self._wire.others:
            if (part := self._part(piece, host)) is not None:
                values = self._sums.leaving(host, *part)
                if part[0] in self._looked_up:
                    width = self._weights[part[0]].row_numel
                    rows = self._looked_up[part[0]][host][part[1] // width : part[2] // width]
                    values = encode_rows(values.view(-1, width), rows)
                self._sent[host].add(values)
                self._leaving.append((self._wire.send(values, host), values, self._sums.passes(host, part[0])))
                self._leaving_bytes += values.nbytes
        self.settle()

    def room(self, numel: int) -> Tensor:
        """For sums of a piece on its way to another host, where none are kept. Waits while too much is under way."""
        oldest, since = None, 0.0
        while self._leaving_bytes > EXCHANGE_BYTES:
            if oldest is not self._leaving[0][0]:
                oldest, since = self._leaving[0][0], time.monotonic()
            # Others may wait for what this rank does before they take it.
            wait([oldest], _POLL_S)
            self.settle()
            self._wire.ask(since)
        return self._rooms.take(numel)

    def settle(self) -> None:
        """Whatever can be done without waiting."""
        while (
            self._expected
            and self._added < self._own_completed
            and all(arrival.done() for arrival in self._expected[0].arrivals)
        ):
            self._add(self._expected.popleft())
        while self._leaving and self._leaving[0][0].done():
            self._left()

    def finish(self) -> None:
        """All of this rank's own sums are sums over all hosts. Raises SelfTestError where they cannot be."""
        while self._added < len(self._own_pieces):
            self._add(self._expected.popleft())
        while self._leaving:
            self._wire.wait(self._leaving[0][0])
            self._left()
        self._wire.compare(self._sent, self._received)

    def _part(self, piece: Piece, host: int) -> Piece | None:
        """What the owner on `host` has of a piece, counted from its first element."""
        index, start, stop = piece
        low, high = self._weights[index].ranges[self._owners[host]]
        first, last = max(start, low), min(stop, high)
        return (index, first - low, last - low) if first < last else None

    def _expect(self) -> None:
        """Post receives as far as there is room for them."""
        while self._expected_bytes < EXCHANGE_BYTES and (piece := next(self._to_expect, None)) is not None:
            rooms = {host: self._room_for(piece) for host in self._wire.others}
            arrivals = [self._wire.receive(room, host) for host, room in rooms.items()]
            self._expected.append(_Expected(piece, rooms, arrivals))
            self._expected_bytes += sum(room.nbytes for room in rooms.values())

    def _add(self, expected: _Expected) -> None:
        for arrival in expected.arrivals:
            self._wire.wait(arrival)
        index, start, stop = expected.piece
        received = {host: self._taken_in(room, host, index, stop - start) for host, room in expected.rooms.items()}
        add_hosts(self._sums.in_memory(self._wire.own, index)[start:stop], self._wire.own, received)
        self._added += 1
        for room in expected.rooms.values():
            self._expected_bytes -= room.nbytes
            if index not in self._looked_up:
                self._rooms.give(room)
        self._expect()

    def _taken_in(self, room: Tensor, host: int, index: int, numel: int) -> Tensor:
        """What has come into a room, flat."""
        if index not in self._looked_up:
            self._received[host].add(room)
            return room
        width, dtype = self._weights[index].row_numel, self._sums.sent_dtype
        who = self._wire.gradients_of(host)
        message = message_in(room, numel // width, width, dtype.itemsize, who)
        self._received[host].add(message)
        return decode_rows(message, numel // width, width, dtype, who)

    def _left(self) -> None:
        transfer, values, in_room = self._leaving.popleft()
        transfer.result()
        self._leaving_bytes -= values.nbytes
        if in_room:
            self._rooms.give(values)

    def _room_for(self, piece: Piece) -> Tensor:
        index, start, stop = piece
        if index not in self._looked_up:
            return self._rooms.take(stop - start)
        width = self._weights[index].row_numel
        size = most_bytes((stop - start) // width, width, self._sums.sent_dtype.itemsize)
        return torch.empty(size, dtype=torch.uint8)  # of which as much is touched as comes

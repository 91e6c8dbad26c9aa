"""Gradient sums between hosts, piece by piece while the last backward pass of a step still computes.

Every rank completes the same pieces in the same order (host_gradients.py). What of one belongs to another host's owner
leaves at once. What comes in is added to this rank's own sums, in the order of the hosts, when both are there: looked
for whenever a piece is completed, waited for only when all are. Then each host tells the others the checksum of all
that it has sent them. A tied embedding travels twice: first of all weights, when what it gets as the head is complete,
and last the rows that tokens have looked up in the last micro-batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.messages import Rooms, Tally
from aliquot.distributed.collectives.wire import Wire, add_hosts
from aliquot.engines.host.host_memory import EXCHANGE_BYTES
from aliquot.engines.host.host_sums import HostSums
from aliquot.engines.host.shared_weights import Weight
from aliquot.engines.host.sparse_rows_codec import (
    Rows,
    decode_found,
    decode_rows,
    encode_found,
    encode_rows,
    message_in,
    most_bytes,
    sum_rows,
)

_POLL_S = 1e-3


@dataclass(frozen=True)
class SentPiece:
    """Elements [start, stop) of a weight; `rows_follow`: rows that are added to sums which have travelled before."""

    index: int
    start: int
    stop: int
    rows_follow: bool = False


@dataclass
class _Expected:
    """A piece of what this rank owns, and what other hosts have for it."""

    piece: SentPiece
    rooms: dict[int, Tensor]
    arrivals: list[Future[None]]


class GradientExchange:
    def __init__(
        self,
        wire: Wire,
        weights: Sequence[Weight],
        sums: HostSums,
        owners: Sequence[int],
        pieces: Sequence[SentPiece],
        looked_up: Mapping[int, Sequence[Tensor]],
        most_rows: int,
    ) -> None:
        """`pieces`: as every rank completes them. What lies on disk is not among them. `looked_up[weight][host]`: bool,
        the rows of that host's owner outside of which sums are zero. `most_rows`: that follow from a host."""
        self._wire = wire
        self._weights = weights
        self._sums = sums
        self._owners = owners
        self._pieces = pieces
        self._looked_up = looked_up
        self._most_rows = most_rows
        self._own_rows: dict[int, Rows] = {}  # that follow
        sums.room = self.room
        self._own_pieces = [own for piece in pieces if (own := self._part(piece, wire.own)) is not None]
        self._completed = 0
        self._own_completed = 0
        self._to_expect: Iterator[SentPiece] = iter(())
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

    def completed(self, piece: SentPiece) -> None:
        """This host's sums of a piece are what they will be, but for rows that follow."""
        self._take_turn(piece)
        for host in self._wire.others:
            if (part := self._part(piece, host)) is not None:
                values = self._sums.leaving(host, part.index, part.start, part.stop)
                if part.index in self._looked_up:
                    self._make_way()  # for a copy
                    width = self._weights[part.index].row_numel
                    rows = self._looked_up[part.index][host][part.start // width : part.stop // width]
                    values = encode_rows(values.view(-1, width), rows)
                self._leave(values, host, self._sums.passes(host, part.index))
        self.settle()

    def rows_completed(self, index: int, of_hosts: Sequence[Rows]) -> None:
        """The rows that follow, fp32, of what each host's owner has of a weight."""
        piece = SentPiece(index, 0, self._weights[index].numel, rows_follow=True)
        self._take_turn(piece)
        self._own_rows[index] = of_hosts[self._wire.own]
        for host in self._wire.others:
            if self._part(piece, host) is not None:
                numbers, values = of_hosts[host]
                self._leave(encode_found((numbers, values.to(self._sums.sent_dtype))), host, in_room=False)
        self.settle()

    def _take_turn(self, piece: SentPiece) -> None:
        if piece != self._pieces[self._completed]:
            name = self._weights[piece.index].name
            raise SelfTestError(f"a gradient of {name} was complete before its turn: hosts would sum different weights")
        self._completed += 1
        self._own_completed += self._part(piece, self._wire.own) is not None

    def _leave(self, values: Tensor, host: int, in_room: bool) -> None:
        self._sent[host].add(values)
        self._leaving.append((self._wire.send(values, host), values, in_room))
        self._leaving_bytes += values.nbytes

    def room(self, numel: int) -> Tensor:
        """For sums of a piece on its way to another host, where none are kept."""
        self._make_way()
        return self._rooms.take(numel)

    def _make_way(self) -> None:
        """Waits while too much is under way."""
        oldest, since = None, 0.0
        while self._leaving_bytes > EXCHANGE_BYTES:
            if oldest is not self._leaving[0][0]:
                oldest, since = self._leaving[0][0], time.monotonic()
            # Others may wait for what this rank does before they take it.
            wait([oldest], _POLL_S)
            self.settle()
            self._wire.ask(since)

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

    def _part(self, piece: SentPiece, host: int) -> SentPiece | None:
        """What the owner on `host` has of a piece, counted from its first element."""
        low, high = self._weights[piece.index].ranges[self._owners[host]]
        first, last = max(piece.start, low), min(piece.stop, high)
        return replace(piece, start=first - low, stop=last - low) if first < last else None

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
        piece, rooms = expected.piece, expected.rooms
        own = self._sums.in_memory(self._wire.own, piece.index)[piece.start : piece.stop]
        if piece.rows_follow:
            found = {host: self._rows_in(room, host, piece) for host, room in rooms.items()}
            found[self._wire.own] = self._own_rows.pop(piece.index)
            width = self._weights[piece.index].row_numel
            numbers, values = sum_rows([found[host] for host in sorted(found)], width)
            own.view(-1, width).index_add_(0, numbers, values.to(own.dtype))
        else:
            received = {host: self._taken_in(room, host, piece) for host, room in rooms.items()}
            add_hosts(own, self._wire.own, received)
        self._added += 1
        for room in rooms.values():
            self._expected_bytes -= room.nbytes
            if self._is_dense(piece):
                self._rooms.give(room)
        self._expect()

    def _is_dense(self, piece: SentPiece) -> bool:
        return not piece.rows_follow and piece.index not in self._looked_up

    def _taken_in(self, room: Tensor, host: int, piece: SentPiece) -> Tensor:
        """What has come into a room, flat."""
        if self._is_dense(piece):
            self._received[host].add(room)
            return room
        rows, width = self._rows_of(piece)
        message = self._message_in(room, host, rows, width)
        return decode_rows(message, rows, width, self._sums.sent_dtype, self._wire.gradients_of(host))

    def _rows_in(self, room: Tensor, host: int, piece: SentPiece) -> Rows:
        rows, width = self._rows_of(piece)
        message = self._message_in(room, host, min(rows, self._most_rows), width)
        return decode_found(message, rows, width, self._sums.sent_dtype, self._wire.gradients_of(host))

    def _message_in(self, room: Tensor, host: int, rows: int, width: int) -> Tensor:
        message = message_in(room, rows, width, self._sums.sent_dtype.itemsize, self._wire.gradients_of(host))
        self._received[host].add(message)
        return message

    def _rows_of(self, piece: SentPiece) -> tuple[int, int]:
        """How many, and their width."""
        width = self._weights[piece.index].row_numel
        return (piece.stop - piece.start) // width, width

    def _left(self) -> None:
        transfer, values, in_room = self._leaving.popleft()
        transfer.result()
        self._leaving_bytes -= values.nbytes
        if in_room:
            self._rooms.give(values)

    def _room_for(self, piece: SentPiece) -> Tensor:
        if self._is_dense(piece):
            return self._rooms.take(piece.stop - piece.start)
        rows, width = self._rows_of(piece)
        if piece.rows_follow:
            rows = min(rows, self._most_rows)
        size = most_bytes(rows, width, self._sums.sent_dtype.itemsize)
        return torch.empty(size, dtype=torch.uint8)  # of which as much is touched as comes

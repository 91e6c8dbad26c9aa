"""Sum gradients over hosts, piece by piece, during the last backward pass of an optimizer step.

All ranks complete the sums of the same pieces in the same order (host_gradients.py). If a rank of another host owns a
part of a piece, that part belongs to a message to that rank. A message ends at MESSAGE_BYTES, so that the number of
messages follows from bytes, not from weights, and leaves at once. A rank adds received parts to its own sums in host
order. A rank polls for messages whenever a piece is complete, and waits for messages only after the last piece.
Finally, the hosts compare checksums of all messages. A tied embedding is sent twice. The first messages of a step
contain the embedding's gradient as the output head. The last messages contain the rows that tokens have looked up in
the last micro-batch.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.reduce import add_hosts
from aliquot.distributed.collectives.wire import BufferPool, Tally, Wire
from aliquot.engines.host.gradient_sums import GradientSums
from aliquot.engines.host.host_memory import MESSAGE_BYTES, exchange_bytes
from aliquot.engines.host.shared_weights import Counterparts, Weight
from aliquot.engines.host.sparse_rows_codec import (
    Rows,
    decode_rows,
    decode_table,
    encode_rows,
    encode_table,
    message_in,
    most_bytes,
    sum_rows,
)

_POLL_S = 1e-3

Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class ExchangePiece:
    """Elements [start, stop) of a weight."""

    index: int
    start: int
    stop: int
    adds_rows: bool = False  # the piece has looked-up rows, to be added to sums that were sent before


@dataclass
class _SumsArrival:
    """A message about this rank's own sums, and the buffers that receive the message from the other hosts."""

    pieces: Sequence[ExchangePiece]  # counted from the first element that this rank owns
    buffers: dict[int, Tensor]  # by host
    transfers: list[Future[None]]


class GradientExchange:
    """Exchange of sums with this rank's counterparts. A step calls `begin`, `send` for every piece, and `finish`."""

    def __init__(
        self,
        wire: Wire,
        weights: Sequence[Weight],
        sums: GradientSums,
        counterparts: Counterparts,
        pieces: Sequence[ExchangePiece],
        looked_up: Mapping[int, Sequence[Tensor]],
        most_rows: int,
    ) -> None:
        """Prepare the exchange of `pieces`, listed in the order in which all ranks complete the pieces' sums.

        No piece has sums on disk. `looked_up`: by weight and host, a bool for each row that the host's owner owns;
        rows with False have sums of zero. `most_rows`: the most rows that a host sends in a piece with `adds_rows`.
        """
        self._wire = wire
        self._weights = weights
        self._sums = sums
        self._pieces = pieces
        self._looked_up = looked_up
        self._most_rows = most_rows
        self._local_rows: dict[int, Rows] = {}  # this host's looked-up rows, until the other hosts' rows arrive
        sums.allocate_transient = self.send_buffer
        self._owners = sorted((rank, host) for host, rank in enumerate(counterparts.ranks))
        self._ends, self._local_messages = self._plan_messages()
        self._completed = 0
        self._local_completed = 0
        self._to_receive: Iterator[Sequence[ExchangePiece]] = iter(())
        self._arrivals: deque[_SumsArrival] = deque()
        self._arriving_bytes = 0
        self._added = 0
        # The parts of the next message to each host: (sums, are they from the pool).
        self._open: defaultdict[int, list[tuple[Tensor, bool]]] = defaultdict(list)
        self._departures: deque[tuple[Future[None], Tensor, bool]] = deque()  # (send, message, is it from the pool)
        self._departing_bytes = 0
        self._limit_bytes = exchange_bytes(len(wire.peer_hosts))
        self._pool = BufferPool(sums.sent_dtype, self._limit_bytes)
        self._sent: dict[int, Tally] = {}
        self._received: dict[int, Tally] = {}

    def begin(self) -> None:
        """Post the first receives, when the last micro-batch of the step begins."""
        self._completed = self._local_completed = self._added = 0
        self._to_receive = iter(self._local_messages)
        self._sent, self._received = ({host: Tally() for host in self._wire.peer_hosts} for _ in range(2))
        self._post_receives()

    def send(self, piece: ExchangePiece) -> None:
        """Send a piece whose sums over this host are complete, except for rows that `send_rows` sends later."""
        number = self._take_turn(piece)
        for host, part in self._parts(piece):
            if host == self._wire.host:
                continue
            values = self._sums.outgoing(host, part.index, part.start, part.stop)
            if part.index in self._looked_up:
                self._wait_for_space()  # because encoding makes a copy
                width = self._weights[part.index].row_numel
                rows = self._looked_up[part.index][host][part.start // width : part.stop // width]
                values = encode_table(values.view(-1, width), rows)
            self._open[host].append((values, self._sums.is_transient(host, part.index)))
            if number in self._ends[host]:
                self._end_message(host)
        self.poll()

    def send_rows(self, index: int, rows_by_host: Sequence[Rows]) -> None:
        """Send to each host the looked-up rows, fp32, in that host's range of a weight."""
        piece = ExchangePiece(index, 0, self._weights[index].numel, adds_rows=True)
        self._take_turn(piece)
        self._local_rows[index] = rows_by_host[self._wire.host]
        for host, _ in self._parts(piece):
            if host != self._wire.host:
                numbers, values = rows_by_host[host]
                self._depart(encode_rows((numbers, values.to(self._sums.sent_dtype))), host, from_pool=False)
        self.poll()

    def _take_turn(self, piece: ExchangePiece) -> int:
        """Return the number of a piece whose sums over this host are complete."""
        number = self._completed
        if piece != self._pieces[number]:
            name = self._weights[piece.index].name
            raise SelfTestError(f"a gradient of {name} was complete before its turn: hosts would sum different weights")
        self._completed += 1
        self._local_completed += number in self._ends[self._wire.host]
        return number

    def _end_message(self, host: int) -> None:
        """Send the open message to `host`. A single part is sent in place; several parts are copied into a buffer."""
        parts = self._open.pop(host)
        if len(parts) == 1:
            ((values, from_pool),) = parts
            self._depart(values, host, from_pool)
            return
        message = self.send_buffer(sum(values.numel() for values, _ in parts))
        torch.cat([values for values, _ in parts], out=message)
        for values, from_pool in parts:
            if from_pool:
                self._pool.give(values)
        self._depart(message, host, from_pool=True)

    def _depart(self, values: Tensor, host: int, from_pool: bool) -> None:
        self._sent[host].add(values)
        self._departures.append((self._wire.send(values, host), values, from_pool))
        self._departing_bytes += values.nbytes

    def send_buffer(self, numel: int) -> Tensor:
        """Return a buffer for transient sums. When the sums are sent, the buffer returns to the pool."""
        self._wait_for_space()
        return self._pool.take(numel)

    def _wait_for_space(self) -> None:
        """Wait while messages that are being sent and open messages take more than the limit."""
        oldest, since = None, 0.0
        while self._departing_bytes > self._limit_bytes - MESSAGE_BYTES * len(self._wire.peer_hosts):
            if oldest is not self._departures[0][0]:
                oldest, since = self._departures[0][0], time.monotonic()
            # Poll, because another host may wait for a message of this rank before it receives more.
            wait([oldest], _POLL_S)
            self.poll()
            self._wire.probe(since)

    def poll(self) -> None:
        """Add received sums and release sent buffers, as far as possible without waiting."""
        while (
            self._arrivals
            and self._added < self._local_completed
            and all(transfer.done() for transfer in self._arrivals[0].transfers)
        ):
            self._add(self._arrivals.popleft())
        while self._departures and self._departures[0][0].done():
            self._end_departure()

    def finish(self) -> None:
        """Wait until this rank's own sums include the sums of all hosts.

        Raises SelfTestError if a received message differs from the message that was sent.
        """
        while self._added < len(self._local_messages):
            self._add(self._arrivals.popleft())
        while self._departures:
            self._wire.wait(self._departures[0][0])
            self._end_departure()
        self._wire.compare(self._sent, self._received)

    def _parts(self, piece: ExchangePiece) -> Iterator[tuple[int, ExchangePiece]]:
        """Yield every host whose owner owns a part of a piece, and the part, counted from the owner's first element."""
        ranges = self._weights[piece.index].ranges
        at = bisect_right(self._owners, piece.start, key=lambda owner: ranges[owner[0]][1])
        while at < len(self._owners) and ranges[self._owners[at][0]][0] < piece.stop:
            rank, host = self._owners[at]
            low, high = ranges[rank]
            if low < high:
                yield host, replace(piece, start=max(piece.start, low) - low, stop=min(piece.stop, high) - low)
            at += 1

    def _plan_messages(self) -> tuple[list[set[int]], list[list[ExchangePiece]]]:
        """Return, by host, the numbers of the pieces that end a message, and the messages about this rank's own sums.

        Encoded rows have a message of their own, because their length varies.
        """
        hosts = len(self._owners)
        ends, last, sizes = [{-1} for _ in range(hosts)], [-1] * hosts, [0] * hosts
        local_messages: list[list[ExchangePiece]] = []
        for number, piece in enumerate(self._pieces):
            for host, part in self._parts(piece):
                if not self._is_dense(piece):
                    ends[host].add(last[host])
                if host == self._wire.host:
                    if last[host] in ends[host]:
                        local_messages.append([])
                    local_messages[-1].append(part)
                last[host] = number
                sizes[host] += (part.stop - part.start) * self._sums.sent_dtype.itemsize
                if sizes[host] >= MESSAGE_BYTES or not self._is_dense(piece):
                    ends[host].add(number)
                    sizes[host] = 0
        for host in range(hosts):
            ends[host].add(last[host])
        return ends, local_messages

    def _post_receives(self) -> None:
        """Post receives of the next messages while their buffers fit into the limit."""
        while self._arriving_bytes < self._limit_bytes and (pieces := next(self._to_receive, None)) is not None:
            buffers = {host: self._receive_buffer(pieces) for host in self._wire.peer_hosts}
            transfers = [self._wire.receive(buffer, host) for host, buffer in buffers.items()]
            self._arrivals.append(_SumsArrival(pieces, buffers, transfers))
            self._arriving_bytes += sum(buffer.nbytes for buffer in buffers.values())

    def _add(self, arrival: _SumsArrival) -> None:
        for transfer in arrival.transfers:
            self._wire.wait(transfer)
        pieces, buffers = arrival.pieces, arrival.buffers
        if pieces[0].adds_rows:
            self._add_rows(pieces[0], buffers)
        else:
            messages = {host: self._received_values(buffer, host, pieces[0]) for host, buffer in buffers.items()}
            sizes = [piece.stop - piece.start for piece in pieces]
            parts = {host: torch.split(values, sizes) for host, values in messages.items()}
            for number, piece in enumerate(pieces):
                received = {host: values[number] for host, values in parts.items()}
                add_hosts(self._local_sums(piece), self._wire.host, received)
        self._added += 1
        for buffer in buffers.values():
            self._arriving_bytes -= buffer.nbytes
            if self._is_dense(pieces[0]):
                self._pool.give(buffer)
        self._post_receives()

    def _add_rows(self, piece: ExchangePiece, buffers: Mapping[int, Tensor]) -> None:
        sums = self._local_sums(piece)
        rows = {host: self._decoded(decode_rows, buffer, host, piece) for host, buffer in buffers.items()}
        rows[self._wire.host] = self._local_rows.pop(piece.index)
        width = self._weights[piece.index].row_numel
        numbers, values = sum_rows([rows[host] for host in sorted(rows)], width)
        sums.view(-1, width).index_add_(0, numbers, values.to(sums.dtype))

    def _local_sums(self, piece: ExchangePiece) -> Tensor:
        return self._sums.in_memory(self._wire.host, piece.index)[piece.start : piece.stop]

    def _is_dense(self, piece: ExchangePiece) -> bool:
        """Whether hosts send the piece as plain values, not as encoded rows."""
        return not piece.adds_rows and piece.index not in self._looked_up

    def _received_values(self, buffer: Tensor, host: int, piece: ExchangePiece) -> Tensor:
        """Return the flat values of the message that begins with a piece."""
        if self._is_dense(piece):
            self._received[host].add(buffer)
            return buffer
        return self._decoded(decode_table, buffer, host, piece)

    def _decoded(self, decode: Callable[..., Decoded], buffer: Tensor, host: int, piece: ExchangePiece) -> Decoded:
        """Return what `decode` finds in the message of encoded rows in a buffer."""
        rows, most, width = self._row_counts(piece)
        dtype, sender = self._sums.sent_dtype, self._wire.gradients_of(host)
        message = message_in(buffer, most, width, dtype.itemsize, sender)
        self._received[host].add(message)
        return decode(message, rows, width, dtype, sender)

    def _row_counts(self, piece: ExchangePiece) -> tuple[int, int, int]:
        """Return the rows of a piece, the most rows in a message about the piece, and the width of a row."""
        width = self._weights[piece.index].row_numel
        rows = (piece.stop - piece.start) // width
        return rows, min(rows, self._most_rows) if piece.adds_rows else rows, width

    def _end_departure(self) -> None:
        transfer, values, from_pool = self._departures.popleft()
        transfer.result()
        self._departing_bytes -= values.nbytes
        if from_pool:
            self._pool.give(values)

    def _receive_buffer(self, pieces: Sequence[ExchangePiece]) -> Tensor:
        piece = pieces[0]
        if self._is_dense(piece):
            return self._pool.take(sum(piece.stop - piece.start for piece in pieces))
        _, most, width = self._row_counts(piece)
        size = most_bytes(most, width, self._sums.sent_dtype.itemsize)
        return torch.empty(size, dtype=torch.uint8)  # only the pages that the message fills take memory

"""Gradient sums of a rank, stored in memory or, in windows, on disk.

Each sum adds the gradients of the ranks of one host. A rank sums its own range of each weight and, for each other host,
the range of the rank's counterpart on that host. The rank sends these sums to the counterpart once per optimizer step
(gradient_exchange.py). Sums on disk are sent only at the end of the step. One window at a time is open for changes; the
next windows are read ahead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from aliquot.distributed.collectives.reduce import add_hosts
from aliquot.distributed.collectives.wire import Tally, Wire
from aliquot.engines.global_norm import block_squares
from aliquot.engines.host.host_disk import HostDisk, SumKey
from aliquot.engines.host.shared_weights import Counterparts, Weight
from aliquot.offload.scratch_file import Move, ScratchFile, ScratchStream
from aliquot.offload.windows import AHEAD, SUMS_BUFFERS, paged, windows
from aliquot.optim.sizes import States
from aliquot.tensor_io.range_io import mapped_tensor


class GradientSums:
    """Gradient sums by host and weight. In every method, `host` is the host whose rank owns the range."""

    def __init__(
        self,
        weights: Sequence[Weight],
        counterparts: Counterparts,
        dtype: torch.dtype,
        states: States,
        disk: HostDisk | None,
        sent_dtype: torch.dtype | None = None,
        transient: Collection[int] = (),
    ) -> None:
        """Allocate the sums: `dtype` for this rank's own ranges, `sent_dtype` for other hosts (None: `dtype`).

        `transient`: weights whose sums for other hosts are sent at once and not stored. Transient sums stay in memory
        from `allocate_transient` until they are sent. Weights with sums on disk are never transient.
        """
        self._host = counterparts.host
        self.allocate_transient: Callable[[int], Tensor] = torch.empty
        self._transient_sums: dict[tuple[int, int, int], Tensor] = {}  # (host, weight, start) -> sums to send
        places = {} if disk is None else disk.sums
        self._window_sums = None if disk is None else WindowSums(disk.scratch, places, dtype)
        on_disk = {index for _, index, _ in places}
        self.transient = frozenset(transient) - on_disk
        self.dtype = dtype
        self.sent_dtype = dtype if sent_dtype is None else sent_dtype
        self.on_disk: Sequence[int] = sorted(on_disk)  # the weights whose sums are on disk
        # [host][weight]; None if the sums are on disk or transient.
        self._sums = [
            [
                None
                if index in on_disk or self.is_transient(host, index)
                else torch.zeros(weight.trainable_numel(owner), dtype=dtype if host == self._host else self.sent_dtype)
                for index, weight in enumerate(weights)
            ]
            for host, owner in enumerate(counterparts.ranks)
        ]
        ranks = counterparts.ranks
        self._windows = [[windows(w.trainable_numel(owner), states, w.row_numel) for w in weights] for owner in ranks]

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the sums in memory."""
        return sum(tensor.nbytes for tensors in self._sums for tensor in tensors if tensor is not None)

    def in_memory(self, host: int, index: int) -> Tensor:
        """Return the flat sums of a range whose sums are in memory."""
        sums = self._sums[host][index]
        assert sums is not None
        return sums

    def local(self, index: int) -> Tensor | None:
        """Return the sums of the range that this rank owns; None if the sums are on disk."""
        return self._sums[self._host][index]

    def is_transient(self, host: int, index: int) -> bool:
        """Whether these sums are sent at once and not stored."""
        return host != self._host and index in self.transient

    def writable(
        self, host: int, index: int, start: int, stop: int, overwrite: bool
    ) -> Iterator[tuple[Tensor, int, int]]:
        """Yield (sums, start, stop) for elements [start, stop) of the owner's range, to be changed in place.

        Each tensor is valid until the caller requests the next one. With `overwrite` the tensors are uninitialized, and
        the caller sets every element.
        """
        whole = self._sums[host][index]
        if whole is not None:
            yield whole[start:stop], start, stop
            return
        if self.is_transient(host, index):
            self._transient_sums[host, index, start] = self.allocate_transient(stop - start)
            yield self._transient_sums[host, index, start], start, stop
            return
        assert self._window_sums is not None
        for number, (first, last) in enumerate(self._windows[host][index]):
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield self._window_sums.open((host, index, number), overwrite)[low - first : high - first], low, high

    def outgoing(self, host: int, index: int, start: int, stop: int) -> Tensor:
        """Return the complete sums for another host: elements [start, stop) of the range of that host's owner."""
        transient = self._transient_sums.pop((host, index, start), None)
        return self.in_memory(host, index)[start:stop] if transient is None else transient

    def zero(self, host: int, index: int) -> None:
        """Set stored sums to zero."""
        if self.is_transient(host, index):
            return
        numel = self._windows[host][index][-1][1] if self._windows[host][index] else 0
        for sums, _, _ in self.writable(host, index, 0, numel, overwrite=True):
            sums.zero_()

    def flush(self) -> None:
        """Write the sums on disk, after the last change of a step."""
        if self._window_sums is not None:
            self._window_sums.flush()

    def squares(self) -> list[float]:
        """Return, by weight, the sum of squares of this rank's own sums, equal for sums in memory and on disk."""
        return [math.fsum(self._squares(index)) for index in range(len(self._windows[self._host]))]

    def _squares(self, index: int) -> Iterator[float]:
        whole = self._sums[self._host][index]
        for number, (start, stop) in enumerate(self._windows[self._host][index]):
            if whole is not None:
                yield from block_squares(whole[start:stop])
            else:
                assert self._window_sums is not None
                yield from self._window_sums.squares[self._host, index, number]

    def pieces(self, host: int) -> list[int]:
        """Return the number of elements of each window that `visit` yields. All hosts cut the same windows."""
        return [stop - start for index in self.on_disk for start, stop in self._windows[host][index]]

    def visit(self, host: int, changes: bool) -> Iterator[Tensor]:
        """Yield the sums on disk, one window at a time, in `sent_dtype`.

        With `changes`, the windows have their own dtype, and the caller changes a window in place before it takes the
        next one.
        """
        if self._window_sums is not None:
            keys = [(host, i, number) for i in self.on_disk for number in range(len(self._windows[host][i]))]
            for values in self._window_sums.visit(keys, changes):
                yield values if changes else values.to(self.sent_dtype, copy=True)


class WindowSums:
    """Gradient sums in a scratch file. Only one thread may use them.

    Each micro-batch opens the windows in the same order. The first micro-batch records this order, so that later
    micro-batches can read ahead.
    """

    def __init__(self, scratch: ScratchFile, places: Mapping[SumKey, tuple[int, int]], dtype: torch.dtype) -> None:
        """`places`: by window, (offset in the scratch file, number of elements)."""
        self._scratch = scratch
        self._places = places
        self._dtype = dtype
        self._successor: dict[SumKey, SumKey] = {}
        self._open: tuple[SumKey, Tensor] | None = None
        self._reading: deque[tuple[SumKey, Tensor, Future[None]]] = deque()
        self._writing: dict[SumKey, tuple[Tensor, Future[None]]] = {}  # the oldest write first
        largest = max((paged(numel * dtype.itemsize) for _, numel in places.values()), default=0)
        self._free = [mapped_tensor(largest, torch.uint8) for _ in range(SUMS_BUFFERS)]
        self.squares: dict[SumKey, list[float]] = {}  # block_squares() of each window when it was last closed

    def open(self, key: SumKey, overwrite: bool) -> Tensor:
        """Return the flat sums of a window. The caller may change them in place until it opens another window.

        With `overwrite`, the sums are not read from disk, and the memory is uninitialized. Raises StorageError.
        """
        if self._open is not None and self._open[0] == key:
            return self._values(*self._open)
        previous = None if self._open is None else self._open[0]
        self._close()
        if previous is not None:
            self._successor[previous] = key
        self._open = (key, self._take_buffer() if overwrite else self._read(key))
        if not overwrite:
            self._read_ahead(key)
        return self._values(*self._open)

    def visit(self, keys: Sequence[SumKey], changes: bool) -> Iterator[Tensor]:
        """Yield the sums of each window. With `changes`, the caller changes them in place. Call `flush` before."""
        places = [self._places[key] for key in keys]
        moves = [Move(at, paged(numel * self._dtype.itemsize), 0 if changes else None) for at, numel in places]
        for key, buffer in zip(keys, ScratchStream(self._scratch, moves), strict=True):
            values = self._values(key, buffer)
            yield values
            if changes:
                self.squares[key] = block_squares(values)

    def flush(self) -> None:
        """Write all changes, and return when every window is on disk. Raises StorageError."""
        self._close()
        self._drop_reads()
        while self._writing:
            self._end_oldest_write()

    def _values(self, key: SumKey, buffer: Tensor) -> Tensor:
        return buffer[: self._places[key][1] * self._dtype.itemsize].view(self._dtype)

    def _pages(self, key: SumKey, buffer: Tensor) -> Tensor:
        return buffer[: paged(self._places[key][1] * self._dtype.itemsize)]

    def _close(self) -> None:
        if self._open is not None:
            key, buffer = self._open
            self._open = None
            self.squares[key] = block_squares(self._values(key, buffer))
            self._writing[key] = (buffer, self._scratch.write(self._places[key][0], self._pages(key, buffer)))

    def _read(self, key: SumKey) -> Tensor:
        if not self._reading or self._reading[0][0] != key:
            self._drop_reads()
            self._start_read(key)
        _, buffer, read = self._reading.popleft()
        read.result()
        return buffer

    def _read_ahead(self, key: SumKey) -> None:
        last = self._reading[-1][0] if self._reading else key
        while len(self._reading) < AHEAD and last in self._successor:
            last = self._successor[last]
            if last == key:  # all windows are in memory already
                return
            self._start_read(last)

    def _start_read(self, key: SumKey) -> None:
        while key in self._writing:
            self._end_oldest_write()
        buffer = self._take_buffer()
        self._reading.append((key, buffer, self._scratch.read(self._places[key][0], self._pages(key, buffer))))

    def _take_buffer(self) -> Tensor:
        if not self._free:
            self._end_oldest_write()
        return self._free.pop()

    def _end_oldest_write(self) -> None:
        key = next(iter(self._writing))
        buffer, written = self._writing.pop(key)
        self._free.append(buffer)
        written.result()

    def _drop_reads(self) -> None:
        while self._reading:
            _, buffer, read = self._reading.popleft()
            read.exception()
            self._free.append(buffer)


def reduce_scatter(wire: Wire, sums: GradientSums, ahead: int) -> None:
    """Replace the sums on disk for this host by the sums over all hosts, added in the order of the hosts.

    gloo would implement a reduce-scatter as an all-reduce, which sends twice the bytes. While one window is summed,
    `ahead` windows per host are in transit. Raises SelfTestError if values arrive corrupted.
    """
    sent, received = ({host: Tally() for host in wire.peer_hosts} for _ in range(2))
    local = sums.visit(wire.host, changes=True)
    # A sender cuts the sums for a host into the same windows as that host. Hosts may have different numbers of windows.
    outgoing = (sums.visit(host, changes=False) for host in wire.peer_hosts)
    arriving: deque[dict[int, tuple[Tensor, Future[None]]]] = deque()
    sending: deque[list[Future[None]]] = deque()
    # Both sides post the sends and receives of a round before they wait for an earlier round.
    rounds: Iterator[tuple[Any, ...]] = zip_longest(sums.pieces(wire.host), *outgoing)
    for numel, *windows_to_send in rounds:
        if numel is not None:
            buffers = {host: torch.empty(numel, dtype=sums.sent_dtype) for host in wire.peer_hosts}
            arriving.append({host: (buffer, wire.receive(buffer, host)) for host, buffer in buffers.items()})
        leaving = [pair for pair in zip(wire.peer_hosts, windows_to_send, strict=True) if pair[1] is not None]
        for host, values in leaving:
            sent[host].add(values)
        sending.append([wire.send(values, host) for host, values in leaving])
        if len(arriving) > ahead:
            _add_arrivals(wire, next(local), arriving.popleft(), received)
        if len(sending) > ahead:
            wire.wait_all(sending.popleft())
    for arrivals in arriving:
        _add_arrivals(wire, next(local), arrivals, received)
    for transfers in sending:
        wire.wait_all(transfers)
    next(local, None)  # lets `visit` store the last changed window
    wire.compare(sent, received)


def _add_arrivals(
    wire: Wire, local: Tensor, arrivals: Mapping[int, tuple[Tensor, Future[None]]], received: Mapping[int, Tally]
) -> None:
    for host, (buffer, arrives) in arrivals.items():
        wire.wait(arrives)
        received[host].add(buffer)
    add_hosts(local, wire.host, {host: buffer for host, (buffer, _) in arrivals.items()})

"""Gradient sums of the host engine, in memory or, window by window, on disk.

`h` is a host, `index` a weight: the sums over this host's ranks of the rows that this rank's counterpart on host h
owns. What h owns travels there once a step (gradient_exchange.py; what lies on disk, when the step ends).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from aliquot.engines.host.host_disk import HostDisk
from aliquot.engines.host.shared_weights import Weight
from aliquot.offload.stream import Move, Stream
from aliquot.offload.window_sums import WindowSums
from aliquot.offload.windows import paged, windows
from aliquot.optim.sizes import States
from aliquot.optim.squared_norm import block_squares


class HostSums:
    def __init__(
        self,
        weights: Sequence[Weight],
        owners: Sequence[int],
        own: int,
        dtype: torch.dtype,
        states: States,
        disk: HostDisk | None,
        sent_dtype: torch.dtype | None = None,
        passing: Collection[int] = (),
    ) -> None:
        """`owners[h]`: the rank on host h that is this one's counterpart, on host `own` itself. `sent_dtype`: of what
        travels, by default that of what stays. `passing`: of these weights, but for those on disk, what others own is
        not kept: it is given `room` for as long as it takes to leave.
        """
        self._own = own
        self.room: Callable[[int], Tensor] = torch.empty
        self._rooms: dict[tuple[int, int, int], Tensor] = {}  # filled, not yet on their way
        self._disk = disk
        places = {} if disk is None else disk.sums
        self._on_disk = None if disk is None else WindowSums(disk.scratch, places, dtype)
        spilled = {index for _, index, _ in places}
        self.passing = frozenset(passing) - spilled
        self.dtype = dtype
        self.sent_dtype = dtype if sent_dtype is None else sent_dtype
        self._spilled = sorted(spilled)
        # None: on disk, or passing.
        self._sums = [
            [
                None
                if index in spilled or self.passes(h, index)
                else torch.zeros(weight.learned_of(owner), dtype=dtype if h == own else self.sent_dtype)
                for index, weight in enumerate(weights)
            ]
            for h, owner in enumerate(owners)
        ]
        self._windows = [
            [windows(weight.learned_of(owner), states, weight.row_numel) for weight in weights] for owner in owners
        ]
        self._itemsize = dtype.itemsize

    @cached_property
    def size_bytes(self) -> int:
        """In memory."""
        return sum(tensor.nbytes for tensors in self._sums for tensor in tensors if tensor is not None)

    def in_memory(self, h: int, index: int) -> Tensor:
        """The sums of a weight that has them there, flat."""
        found = self._sums[h][index]
        assert found is not None
        return found

    def own(self, index: int) -> Tensor | None:
        """What this rank itself owns; None: it lies on disk."""
        return self._sums[self._own][index]

    def ranges(self, h: int, index: int, a: int, b: int, first: bool) -> Iterator[tuple[Tensor, int, int]]:
        """(sums, start, stop): memory in which elements [a, b), counted from the owner's first, are to be changed,
        range by range, each until the next is asked for. `first`: they hold anything, and all get a value."""
        whole = self._sums[h][index]
        if whole is not None:
            yield whole[a:b], a, b
            return
        if self.passes(h, index):
            self._rooms[h, index, a] = self.room(b - a)
            yield self._rooms[h, index, a], a, b
            return
        assert self._on_disk is not None
        for number, (start, stop) in enumerate(self._windows[h][index]):
            low, high = max(a, start), min(b, stop)
            if low < high:
                yield self._on_disk.open((h, index, number), first)[low - start : high - start], low, high

    def leaving(self, h: int, index: int, a: int, b: int) -> Tensor:
        """Sums that are complete and host h's, elements [a, b) of what is its owner's."""
        room = self._rooms.pop((h, index, a), None)
        return self.in_memory(h, index)[a:b] if room is None else room

    def zero(self, h: int, index: int) -> None:
        if self.passes(h, index):
            return
        numel = self._windows[h][index][-1][1] if self._windows[h][index] else 0
        for sums, _, _ in self.ranges(h, index, 0, numel, first=True):
            sums.zero_()

    def settle(self) -> None:
        """Nothing will be added in this step: what belongs on disk is there when this returns."""
        if self._on_disk is not None:
            self._on_disk.settle()

    def squares(self) -> list[float]:
        """Of each weight the sum of squares of what this rank owns, the same wherever it lies."""
        return [math.fsum(self._squares(index)) for index in range(len(self._windows[self._own]))]

    def _squares(self, index: int) -> Iterator[float]:
        whole = self._sums[self._own][index]
        for number, (start, stop) in enumerate(self._windows[self._own][index]):
            if whole is not None:
                yield from block_squares(whole[start:stop])
            else:
                assert self._on_disk is not None
                yield from self._on_disk.squares[self._own, index, number]

    def passes(self, h: int, index: int) -> bool:
        return h != self._own and index in self.passing

    @property
    def spilled(self) -> Sequence[int]:
        """The weights whose sums lie on disk."""
        return self._spilled

    def pieces(self, h: int, most_bytes: int) -> list[int]:
        """Of what lies on disk and is host h's, the elements of each piece of `visit`."""
        return [stop - start for index in self._spilled for start, stop in self._windows[h][index]]

    def visit(self, h: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        """Those pieces one by one; with `changes` each is to be changed before the next is asked for."""
        if not self._spilled:
            return
        assert self._disk is not None and self._on_disk is not None
        windows = [(index, *each) for index in self._spilled for each in enumerate(self._windows[h][index])]
        moves = [Move(*self._place(h, i, number), written_from=0 if changes else None) for i, number, _ in windows]
        on_disk = iter(Stream(self._disk.scratch, moves))
        for index, number, (start, stop) in windows:
            values = next(on_disk)[: (stop - start) * self._itemsize].view(self.dtype)
            if changes:
                yield values
                self._on_disk.squares[h, index, number] = block_squares(values)
            else:
                yield values.to(self.sent_dtype, copy=True)
        for _ in on_disk:  # the last one is written
            pass

    def _place(self, h: int, index: int, number: int) -> tuple[int, int]:
        assert self._disk is not None
        offset, numel = self._disk.sums[h, index, number]
        return offset, paged(numel * self._itemsize)

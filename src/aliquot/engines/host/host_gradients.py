"""Gradients of the host engine: staged in shared memory as they arise, summed by their owners, never kept whole.

Every rank stages the same pieces in the same order, whatever its autograd does first; each piece says whose it is, and
a rank whose micro-batch did not touch a weight says that. Each owner adds to its fp32 part the sum over the ranks of
its host, rank by rank: the result depends on neither speed nor chance. A rank holds the sums of its own part and, with
several hosts, of its counterparts' parts on the others: those travel once a step, as soon as they are complete
(gradient_exchange.py), and are only kept where a step has several micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.buffer_sizes import aligned
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.reduce import RoundingNoise, add_rows_rounded, add_sum, add_sum_rounded
from aliquot.distributed.collectives.ring import Piece, Ring
from aliquot.engines.host.gradient_exchange import GradientExchange, SentPiece
from aliquot.engines.host.host_memory import TAG_BYTES, WINDOWS_AHEAD, looked_up_bytes, piece_edges, ring_bytes
from aliquot.engines.host.host_sums import HostSums
from aliquot.engines.host.shared_weights import Weight
from aliquot.engines.host.sparse_rows_codec import Rows, sum_rows


class HostGradients:
    def __init__(
        self,
        hosts: Hosts,
        weights: Sequence[Weight],
        sums: HostSums,
        order: Sequence[int],
        compute: torch.dtype,
        tokens: int,
        width: int,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        """`order`: the weights whose gradients `arrived` is told of, in the order in which they are staged. `before`
        and `after`: those that are told of by other ways in each micro-batch, before and after them. `tokens` x
        `width`: the most rows of an embedding's gradient in one micro-batch. Collective.
        """
        self._hosts = hosts
        self._peers = hosts.peers
        self._weights = weights
        self._dtype = compute
        self._tokens, self._width = tokens, width
        self._rows_bytes = looked_up_bytes(tokens, width, compute.itemsize)
        longest = max(weight.row_numel for weight in weights if weight.learns)
        self.ring = Ring(self._peers, ring_bytes(longest, self._rows_bytes, compute.itemsize))
        self._owners = hosts.counterparts
        self._sums = sums
        self._order = order
        self._turn = 0  # of which weight it is in this micro-batch
        self._waiting: dict[int, Tensor] = {}  # gradients that came before their turn
        self._contributions: Counter[int] = Counter()  # to each sum in this optimizer step: the first replaces
        # In a micro-batch, of each weight: it is complete after the last of them.
        self._expected = Counter([*before, *order, *after])
        self._look_ups = Counter(after)
        self._found: Counter[int] = Counter()
        self._last = self._begins = True
        self._micro_batch = (-1, 0)  # the optimizer step, and the number in it
        self._noise: tuple[tuple[int, int], RoundingNoise] | None = None  # of the micro-batch that is summed
        self._exchange = None
        self._looked_up: dict[int, list[Tensor]] = {}  # of each host's owner, the rows that a step has sums for
        self._rows_follow: set[int] = set()  # weights whose rows travel after their dense sums: tied embeddings
        if hosts.wire is not None:
            dense, there = [*before, *order], {*sums.spilled}
            complete = [index for at, index in enumerate(dense) if index not in dense[at + 1 :]]
            self._rows_follow = {*after} & {*dense} - there
            pieces = [
                SentPiece(index, first * weights[index].row_numel, last * weights[index].row_numel)
                for index in [*complete, *({*after} - {*dense})]
                if index not in there
                for first, last in pairwise(self.row_edges(index))
            ]
            pieces += [
                SentPiece(index, 0, weights[index].numel, rows_follow=True) for index in sorted(self._rows_follow)
            ]
            self._looked_up = {
                index: [
                    torch.zeros(weights[index].numel_of(owner) // weights[index].row_numel, dtype=torch.bool)
                    for owner in self._owners
                ]
                for index in {*after} - {*dense}
            }
            of_rows, most_rows = self._looked_up, tokens * self._peers.size
            self._exchange = GradientExchange(hosts.wire, weights, sums, self._owners, pieces, of_rows, most_rows)
        self.staged_bytes = 0
        self.moved_bytes = 0

    def begin_micro_batch(self, step: int, last: bool) -> None:
        """Of optimizer step `step`; `last`: what is complete with it leaves for other hosts."""
        if not last and self._sums.passing:
            raise ValueError(
                "another micro-batch of a step that was to have one: its sums for other hosts are not kept"
            )
        before, number = self._micro_batch
        self._micro_batch = (step, number + 1 if before == step else 0)
        self._last = last
        self._found.clear()
        self._begins = last

    def arrived(self, index: int, gradient: Tensor) -> None:
        """The gradient of weight `index`, of this rank's micro-batch, is complete."""
        self._waiting[index] = gradient
        while self._turn < len(self._order) and self._order[self._turn] in self._waiting:
            self._stage_next()

    def begin(self, index: int) -> bool:
        """Whether the pieces of weight `index` may be staged one by one now, with `buffer` and `publish`; then they
        must be. What comes after it in turn is staged when the next gradient arrives."""
        if self._turn == len(self._order) or self._order[self._turn] != index:
            return False
        self._turn += 1
        return True

    def end_micro_batch(self) -> None:
        """No further gradient will arrive: weights that have none are told as such."""
        while self._turn < len(self._order):
            self._stage_next()
        self._turn = 0

    def _stage_next(self) -> None:
        index = self._order[self._turn]
        self._turn += 1
        gradient = self._waiting.pop(index, None)
        row_numel = self._weights[index].row_numel
        for start, stop in pairwise(edge * row_numel for edge in self.row_edges(index)):
            buffer = self.buffer(index, start, stop)
            if gradient is not None:
                buffer.copy_(gradient.reshape(-1)[start:stop])
                self.moved_bytes += (stop - start) * self._dtype.itemsize  # a copy that the head's does not need
            self.publish(present=gradient is not None)

    def row_edges(self, index: int) -> tuple[int, ...]:
        """Where the rows of weight `index` are cut into pieces."""
        weight = self._weights[index]
        return piece_edges(weight.numel // weight.row_numel, weight.row_numel, self._dtype.itemsize)

    def buffer(self, index: int, start: int, stop: int) -> Tensor:
        """Room for elements [start, stop) of the gradient of weight `index`, flat; then call `publish`."""
        self._piece = self.ring.stage(TAG_BYTES + (stop - start) * self._dtype.itemsize)
        self._range = (index, start, stop)
        at = TAG_BYTES // self._dtype.itemsize
        return self.ring.view(self._piece, self._peers.index, self._dtype, at, (stop - start,))

    def publish(self, present: bool = True) -> None:
        """`present` false: this rank has nothing to add there."""
        index, start, stop = self._range
        self._tag(self._piece, self._peers.index).copy_(torch.tensor([index, start, present]))
        first = not self._contributions[index]
        completes, micro_batch = self._completes(index, self._look_ups[index]), self._micro_batch
        if stop == self._weights[index].numel:
            self._contributions[index] += 1
            self._found[index] += 1
        staged_bytes = (stop - start) * self._dtype.itemsize if present else 0
        self.staged_bytes += staged_bytes
        self.moved_bytes += staged_bytes

        def read(piece: Piece) -> None:
            self._sum(piece, index, start, stop, first, micro_batch)
            if completes:
                self._complete(index, start, stop)

        self.ring.publish(self._piece, read)

    def add_rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        """The gradient of a look-up: `rows` [T, E] belong to rows `ids` [T] of weight `index`."""
        piece = self.ring.stage(self._rows_bytes)
        view = self._view(piece, self._peers.index)
        count = len(ids)
        view[0].fill_(count)
        view[1][:count] = ids
        view[2][:count] = rows
        first = not self._contributions[index]
        completes, micro_batch = self._completes(index, 0), self._micro_batch
        self._contributions[index] += 1
        self._found[index] += 1
        self.staged_bytes += count * (8 + self._width * self._dtype.itemsize)

        def read(piece: Piece) -> None:
            of_owners = self._rows_of_owners(piece, index)
            if completes and index in self._rows_follow:
                assert self._exchange is not None
                self._exchange.rows_completed(index, of_owners)
                return
            self._add_rows(index, of_owners, first, micro_batch)
            if completes:
                for start, stop in pairwise(edge * self._width for edge in self.row_edges(index)):
                    self._complete(index, start, stop)

        self.ring.publish(piece, read)

    def finish(self) -> None:
        """All of this host's sums are complete; what is added next belongs to the next optimizer step."""
        self.ring.drain()
        for index in range(len(self._weights)):
            if not self._contributions[index]:  # nothing replaced the sum of the step before
                for h in range(len(self._owners)):
                    self._sums.zero(h, index)
        self._contributions.clear()
        self._sums.settle()

    def exchange(self) -> None:
        """Between hosts: what each owns becomes the sum over all of them; much of it has become that before."""
        if self._hosts.wire is not None and self._exchange is not None:
            self._exchange.finish()
            self.ring.beside = None
            self._hosts.wire.reduce_scatter(self._sums, WINDOWS_AHEAD)

    def _completes(self, index: int, to_come: int) -> bool:
        """Whether what is staged now for weight `index` is the last that this step adds to its sums, but for so many
        look-ups."""
        if self._begins and self._exchange is not None:
            self._exchange.begin()  # not before: weights are received until the forward pass has used the last of them
            self.ring.beside = self._exchange.settle
            self._begins = False
        return self._last and self._found[index] == self._expected[index] - to_come - 1

    def _complete(self, index: int, start: int, stop: int) -> None:
        if self._exchange is not None and index not in self._sums.spilled:
            self._exchange.completed(SentPiece(index, start, stop))

    def _sum(self, piece: Piece, index: int, start: int, stop: int, first: bool, micro_batch: tuple[int, int]) -> None:
        tags = [self._tag(piece, rank).tolist() for rank in range(self._peers.size)]
        for rank, (of_index, of_start, _) in zip(self._peers.ranks, tags, strict=True):
            if (of_index, of_start) != (index, start):
                raise SelfTestError(
                    f"rank {rank} hands on a gradient of {self._weights[of_index].name} where this rank expects one of"
                    f" {self._weights[index].name}: nothing was summed"
                )
        present = [rank for rank, (_, _, has_any) in enumerate(tags) if has_any]
        at = TAG_BYTES // self._dtype.itemsize - start
        for h, owner in enumerate(self._owners):
            low, high = self._weights[index].ranges[owner]
            a, b = max(start, low), min(stop, high)
            if a >= b or not (present or first):
                continue
            for sums, begin, end in self._sums.ranges(h, index, a - low, b - low, first):
                if not present:
                    sums.zero_()
                    continue
                count = end - begin
                sources = [self.ring.view(piece, rank, self._dtype, at + low + begin, (count,)) for rank in present]
                if sums.dtype != torch.bfloat16:
                    add_sum(sums, sources, first)
                else:
                    noise = None if first else self._rounding(micro_batch)
                    add_sum_rounded(sums, sources, first, noise, low + begin)
                of_sum = sums.element_size() * (1 if first else 2)
                self.moved_bytes += count * (len(sources) * self._dtype.itemsize + of_sum)

    def _rows_of_owners(self, piece: Piece, index: int) -> list[Rows]:
        """What was looked up of each owner's rows, summed over positions and ranks as a dense gradient's are."""
        counts, ids, rows = zip(*(self._view(piece, rank) for rank in range(self._peers.size)), strict=True)
        of_owners = []
        for owner in self._owners:
            low, high = (edge // self._width for edge in self._weights[index].ranges[owner])
            found = []
            for count, own_ids, own_rows in zip(counts, ids, rows, strict=True):
                used = own_ids[: int(count)]
                inside = ((used >= low) & (used < high)).nonzero().flatten()
                found.append((used[inside] - low, own_rows[: int(count)][inside]))
            of_owners.append(sum_rows(found, self._width))
        return of_owners

    def _add_rows(self, index: int, of_owners: Sequence[Rows], first: bool, micro_batch: tuple[int, int]) -> None:
        for h, (numbers, total) in enumerate(of_owners):
            target = self._sums.in_memory(h, index).view(-1, self._width)
            if first:
                target.zero_()
            if index in self._looked_up:
                if first:
                    self._looked_up[index][h].zero_()
                self._looked_up[index][h][numbers] = True
            if target.dtype != torch.bfloat16:
                target.index_add_(0, numbers, total.to(target.dtype))
            elif len(numbers):
                noise = None if first else self._rounding(micro_batch)
                first_row = self._weights[index].ranges[self._owners[h]][0] // self._width
                add_rows_rounded(target, numbers, total, first, noise, first_row)

    def _rounding(self, micro_batch: tuple[int, int]) -> RoundingNoise:
        if self._noise is None or self._noise[0] != micro_batch:
            self._noise = (micro_batch, RoundingNoise(*micro_batch, self._hosts.own))
        return self._noise[1]

    def _tag(self, piece: Piece, rank: int) -> Tensor:
        """What a piece of `publish` begins with: the weight, the first element, whether there is anything. int64 [3]"""
        return self.ring.view(piece, rank, torch.int64, 0, (3,))

    def _view(self, piece: Piece, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """count [], ids int64 [tokens] and rows [tokens, E] of a piece of `add_rows`."""
        ids_at = aligned(8) // 8
        rows_at = (aligned(8) + aligned(8 * self._tokens)) // self._dtype.itemsize
        return (
            self.ring.view(piece, rank, torch.int64, 0, ()),
            self.ring.view(piece, rank, torch.int64, ids_at, (self._tokens,)),
            self.ring.view(piece, rank, self._dtype, rows_at, (self._tokens, self._width)),
        )

"""Sum gradients over the ranks of a host: ranks stage gradients in shared memory, and owners sum them.

No rank stores the gradients of the whole model. All ranks stage the same pieces in the same order, although autograd
may compute gradients in another order. The tag of a piece contains the weight, and whether the rank has a gradient for
the weight in this micro-batch. Owners add the pieces in rank order, so that the sums are reproducible.

A rank sums its own ranges and, with several hosts, also the ranges of its counterparts on the other hosts. The rank
sends its counterparts' sums once per optimizer step, as soon as they are complete (gradient_exchange.py). The rank
stores these sums only if a step has several micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.reduce import (
    RoundingNoise,
    add_hosts,
    add_rows_rounded,
    add_sum,
    add_sum_rounded,
    check_result,
)
from aliquot.distributed.collectives.ring import Piece, Ring
from aliquot.distributed.collectives.wire import Wire
from aliquot.engines.host.gradient_exchange import ExchangePiece, GradientExchange
from aliquot.engines.host.gradient_sums import GradientSums, reduce_scatter
from aliquot.engines.host.host_memory import TAG_BYTES, WINDOWS_AHEAD, looked_up_bytes, piece_edges, ring_bytes
from aliquot.engines.host.shared_weights import Counterparts, GradientOrder, Weight
from aliquot.engines.host.sparse_rows_codec import Rows, sum_rows
from aliquot.nn.head_loss import GradientRows

_CHECK_NUMEL = 1000


class HostGradients:
    """Stage and sum the gradients of a rank. All ranks of a host make the same calls in the same order."""

    def __init__(
        self,
        hosts: Hosts,
        weights: Sequence[Weight],
        sums: GradientSums,
        order: GradientOrder,
        compute_dtype: torch.dtype,
        tokens: int,
        width: int,
    ) -> None:
        """Share the staging memory. Collective over the host.

        `tokens`: the most tokens in a micro-batch, and so the most rows in the gradient of an embedding look-up.
        `width`: elements of such a row.
        """
        self._hosts = hosts
        self._peers = hosts.peers
        self._weights = weights
        self._dtype = compute_dtype
        self._tokens, self._width = tokens, width
        self._rows_bytes = looked_up_bytes(tokens, width, compute_dtype.itemsize)
        longest = max(weight.row_numel for weight in weights if weight.trainable)
        self.ring = Ring(self._peers, ring_bytes(longest, self._rows_bytes, compute_dtype.itemsize))
        self._counterparts = Counterparts(hosts.counterparts, hosts.host)
        self._sums = sums
        self._order = order.dense
        self._turn = 0  # index in `_order` of the weight to stage next
        self._early: dict[int, Tensor] = {}  # by weight, gradients that are ready before their position in the order
        self._contributions: Counter[int] = Counter()  # gradients per sum in this optimizer step; the first replaces
        # The number of gradients of each weight in a micro-batch: the last gradient completes the sum.
        self._expected = Counter([*order.head, *order.dense, *order.looked_up])
        self._look_ups = Counter(order.looked_up)
        self._staged: Counter[int] = Counter()  # gradients of each weight in this micro-batch
        self._is_last = self._starts_exchange = True
        self._micro_batch = (-1, 0)  # the optimizer step, and the number of the micro-batch in it
        self._noise: tuple[tuple[int, int], RoundingNoise] | None = None  # of the micro-batch being summed
        self._exchange = None
        self._looked_up: dict[int, list[Tensor]] = {}  # by weight and host, the rows that have sums in this step
        self._adds_rows: set[int] = set()  # tied embeddings, whose rows are sent after their dense sums
        if hosts.wire is not None:
            self._exchange = self._plan_exchange(hosts.wire, order)
        self.staged_bytes = self.moved_bytes = 0

    def _plan_exchange(self, wire: Wire, order: GradientOrder) -> GradientExchange:
        """Plan the exchange between hosts: send a weight after its last gradient, and tied embeddings' rows last."""
        weights, on_disk = self._weights, {*self._sums.on_disk}
        dense, looked_up = [*order.head, *order.dense], {*order.looked_up}
        complete = [index for at, index in enumerate(dense) if index not in dense[at + 1 :]]
        self._adds_rows = looked_up & {*dense} - on_disk
        pieces = [
            ExchangePiece(index, first * weights[index].row_numel, last * weights[index].row_numel)
            for index in [*complete, *(looked_up - {*dense})]
            if index not in on_disk
            for first, last in pairwise(self.row_edges(index))
        ]
        pieces += [ExchangePiece(index, 0, weights[index].numel, adds_rows=True) for index in sorted(self._adds_rows)]
        self._looked_up = {
            index: [
                torch.zeros(weights[index].shard_numel(owner) // weights[index].row_numel, dtype=torch.bool)
                for owner in self._counterparts.ranks
            ]
            for index in looked_up - {*dense}
        }
        most_rows = self._tokens * self._peers.size
        return GradientExchange(wire, weights, self._sums, self._counterparts, pieces, self._looked_up, most_rows)

    def begin_micro_batch(self, step: int, last: bool) -> None:
        """Begin a micro-batch of optimizer step `step`. In the `last` one, ranks send complete sums to other hosts."""
        if not last and self._sums.transient:
            raise ValueError(
                "expected one micro-batch per optimizer step, got a second one, but sums for other hosts are not"
                " stored; this is a bug in aliquot: please report it"
            )
        step_before, number = self._micro_batch
        self._micro_batch = (step, number + 1 if step_before == step else 0)
        self._is_last = last
        self._staged.clear()
        self._starts_exchange = last

    def stage(self, index: int, gradient: Tensor) -> None:
        """Stage the complete gradient of a weight as soon as all weights before it in the order are staged."""
        self._early[index] = gradient
        while self._turn < len(self._order) and self._order[self._turn] in self._early:
            self._stage_next()

    def take_turn(self, index: int) -> bool:
        """Return whether a weight is next in the order, so that the caller can stage its gradient block by block.

        If the result is true, the caller must stage all pieces with `buffer` and `publish`. The next call of `stage`
        or `end_micro_batch` stages the weights that follow in the order.
        """
        is_next = self._turn < len(self._order) and self._order[self._turn] == index
        self._turn += is_next
        return is_next

    def end_micro_batch(self) -> None:
        """Stage all remaining weights. Weights without a gradient are staged as absent."""
        while self._turn < len(self._order):
            self._stage_next()
        self._turn = 0

    def _stage_next(self) -> None:
        index = self._order[self._turn]
        self._turn += 1
        gradient = self._early.pop(index, None)
        row_numel = self._weights[index].row_numel
        for start, stop in pairwise(edge * row_numel for edge in self.row_edges(index)):
            buffer = self.buffer(index, start, stop)
            if gradient is not None:
                buffer.copy_(gradient.reshape(-1)[start:stop])
                self.moved_bytes += (stop - start) * self._dtype.itemsize  # the head's gradient needs no copy
            self.publish(present=gradient is not None)

    def head_rows(self, index: int) -> GradientRows:
        """Return the receiver of the head's gradient, which the fused loss computes block by block."""
        return GradientRows(self.row_edges(index), partial(self.row_buffer, index), self.publish)

    def row_edges(self, index: int) -> tuple[int, ...]:
        """Return the row numbers at which the gradient of a weight is cut into pieces."""
        weight = self._weights[index]
        return piece_edges(weight.numel // weight.row_numel, weight.row_numel, self._dtype.itemsize)

    def row_buffer(self, index: int, first: int, last: int) -> Tensor:
        """Return a buffer for rows [first, last) of a weight's gradient. Fill the buffer, then call `publish`."""
        weight = self._weights[index]
        return self.buffer(index, first * weight.row_numel, last * weight.row_numel).view(-1, *weight.shape[1:])

    def buffer(self, index: int, start: int, stop: int) -> Tensor:
        """Return a flat buffer for elements [start, stop) of a weight's gradient. Fill it, then call `publish`."""
        self._piece = self.ring.stage(TAG_BYTES + (stop - start) * self._dtype.itemsize)
        self._range = (index, start, stop)
        at = TAG_BYTES // self._dtype.itemsize
        return self.ring.view(self._piece, self._peers.index, self._dtype, at, (stop - start,))

    def publish(self, present: bool = True) -> None:
        """Publish the buffer to the owners. If `present` is false, this rank adds nothing to the sums."""
        index, start, stop = self._range
        self._tag(self._piece, self._peers.index).copy_(torch.tensor([index, start, present]))
        first = not self._contributions[index]
        completes, micro_batch = self._completes(index, self._look_ups[index]), self._micro_batch
        if stop == self._weights[index].numel:
            self._contributions[index] += 1
            self._staged[index] += 1
        staged_bytes = (stop - start) * self._dtype.itemsize if present else 0
        self.staged_bytes += staged_bytes
        self.moved_bytes += staged_bytes

        def read(piece: Piece) -> None:
            self._sum(piece, index, start, stop, first, micro_batch)
            if completes:
                self._complete(index, start, stop)

        self.ring.publish(self._piece, read)

    def add_rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        """Stage the gradient of an embedding look-up: add `rows` [T, E] to rows `ids` [T] of the weight's gradient."""
        piece = self.ring.stage(self._rows_bytes)
        view = self._rows_view(piece, self._peers.index)
        count = len(ids)
        view[0].fill_(count)
        view[1][:count] = ids
        view[2][:count] = rows
        first = not self._contributions[index]
        completes, micro_batch = self._completes(index, 0), self._micro_batch
        self._contributions[index] += 1
        self._staged[index] += 1
        self.staged_bytes += count * (8 + self._width * self._dtype.itemsize)

        def read(piece: Piece) -> None:
            rows_by_host = self._rows_of_owners(piece, index)
            if completes and index in self._adds_rows:
                assert self._exchange is not None
                self._exchange.send_rows(index, rows_by_host)
                return
            self._add_rows(index, rows_by_host, first, micro_batch)
            if completes:
                for start, stop in pairwise(edge * self._width for edge in self.row_edges(index)):
                    self._complete(index, start, stop)

        self.ring.publish(piece, read)

    def finish(self) -> None:
        """Complete all sums over this host. Later gradients belong to the next optimizer step."""
        self.ring.drain()
        for index in range(len(self._weights)):
            if not self._contributions[index]:  # no gradient has replaced the sum of the previous step
                for host in range(len(self._counterparts.ranks)):
                    self._sums.zero(host, index)
        self._contributions.clear()
        self._sums.flush()

    def exchange(self) -> None:
        """Finish the sums of this rank's ranges over all hosts. The backward pass has exchanged most pieces already."""
        if self._hosts.wire is not None and self._exchange is not None:
            self._exchange.finish()
            self.ring.while_waiting = None
            if self._sums.on_disk:
                reduce_scatter(self._hosts.wire, self._sums, WINDOWS_AHEAD)

    def _completes(self, index: int, look_ups_left: int) -> bool:
        """Whether the weight gets no more gradients in this step, apart from `look_ups_left` look-ups.

        The first call in the last micro-batch also begins the exchange between hosts.
        """
        if self._starts_exchange and self._exchange is not None:
            self._exchange.begin()  # not earlier, because a forward pass still receives weights
            self.ring.while_waiting = self._exchange.poll
            self._starts_exchange = False
        return self._is_last and self._staged[index] == self._expected[index] - look_ups_left - 1

    def _complete(self, index: int, start: int, stop: int) -> None:
        if self._exchange is not None and index not in self._sums.on_disk:
            self._exchange.send(ExchangePiece(index, start, stop))

    def _sum(self, piece: Piece, index: int, start: int, stop: int, first: bool, micro_batch: tuple[int, int]) -> None:
        tags = [self._tag(piece, rank).tolist() for rank in range(self._peers.size)]
        for rank, (tagged_index, tagged_start, _) in zip(self._peers.ranks, tags, strict=True):
            if (tagged_index, tagged_start) != (index, start):
                raise SelfTestError(
                    f"rank {rank} hands on a gradient of {self._weights[tagged_index].name} where this rank expects"
                    f" one of {self._weights[index].name}: nothing was summed"
                )
        present = [rank for rank, (_, _, is_present) in enumerate(tags) if is_present]
        at = TAG_BYTES // self._dtype.itemsize - start
        for host, owner in enumerate(self._counterparts.ranks):
            low, high = self._weights[index].ranges[owner]
            begin, end = max(start, low), min(stop, high)
            if begin >= end or not (present or first):
                continue
            for sums, first_element, last_element in self._sums.writable(host, index, begin - low, end - low, first):
                if not present:
                    sums.zero_()
                    continue
                count = last_element - first_element
                place = low + first_element
                sources = [self.ring.view(piece, rank, self._dtype, at + place, (count,)) for rank in present]
                if sums.dtype != torch.bfloat16:
                    add_sum(sums, sources, first)
                else:
                    add_sum_rounded(sums, sources, first, None if first else self._rounding(micro_batch), place)
                sum_bytes = sums.element_size() * (1 if first else 2)
                self.moved_bytes += count * (len(sources) * self._dtype.itemsize + sum_bytes)

    def _rows_of_owners(self, piece: Piece, index: int) -> list[Rows]:
        """Return the looked-up rows in each owner's range, summed over tokens and ranks like a dense gradient."""
        counts, ids, rows = zip(*(self._rows_view(piece, rank) for rank in range(self._peers.size)), strict=True)
        rows_by_host = []
        for owner in self._counterparts.ranks:
            low, high = (edge // self._width for edge in self._weights[index].ranges[owner])
            parts = []
            for count, rank_ids, rank_rows in zip(counts, ids, rows, strict=True):
                used = rank_ids[: int(count)]
                inside = ((used >= low) & (used < high)).nonzero().flatten()
                parts.append((used[inside] - low, rank_rows[: int(count)][inside]))
            rows_by_host.append(sum_rows(parts, self._width))
        return rows_by_host

    def _add_rows(self, index: int, rows_by_host: Sequence[Rows], first: bool, micro_batch: tuple[int, int]) -> None:
        for host, (numbers, total) in enumerate(rows_by_host):
            target = self._sums.in_memory(host, index).view(-1, self._width)
            if first:
                target.zero_()
            if index in self._looked_up:
                if first:
                    self._looked_up[index][host].zero_()
                self._looked_up[index][host][numbers] = True
            if target.dtype != torch.bfloat16:
                target.index_add_(0, numbers, total.to(target.dtype))
            elif len(numbers):
                noise = None if first else self._rounding(micro_batch)
                first_row = self._weights[index].ranges[self._counterparts.ranks[host]][0] // self._width
                add_rows_rounded(target, numbers, total, first, noise, first_row)

    def _rounding(self, micro_batch: tuple[int, int]) -> RoundingNoise:
        if self._noise is None or self._noise[0] != micro_batch:
            self._noise = (micro_batch, RoundingNoise(*micro_batch, self._hosts.host))
        return self._noise[1]

    def _tag(self, piece: Piece, rank: int) -> Tensor:
        """Return the tag of a piece, int64 [3]: weight index, first element, and whether the gradient is present."""
        return self.ring.view(piece, rank, torch.int64, 0, (3,))

    def _rows_view(self, piece: Piece, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return count [], ids int64 [tokens] and rows [tokens, E] of a piece that `add_rows` has staged."""
        ids_at, rows_at = align(8) // 8, (align(8) + align(8 * self._tokens)) // self._dtype.itemsize
        count = self.ring.view(piece, rank, torch.int64, 0, ())
        ids = self.ring.view(piece, rank, torch.int64, ids_at, (self._tokens,))
        return count, ids, self.ring.view(piece, rank, self._dtype, rows_at, (self._tokens, self._width))

    def check(self) -> None:
        """Test sums of known numbers over ranks and hosts. Collective. Raises SelfTestError if a sum is wrong."""
        hosts, ring, ranks = self._hosts, self.ring, self._peers.ranks
        total = torch.zeros(_CHECK_NUMEL)
        piece = ring.stage(4 * _CHECK_NUMEL)
        ring.view(piece, self._peers.index, torch.float32, 0, (_CHECK_NUMEL,)).fill_(ranks[self._peers.index] + 1)

        def read(piece: Piece) -> None:
            views = [ring.view(piece, member, torch.float32, 0, (_CHECK_NUMEL,)) for member in range(len(ranks))]
            add_sum(total, views, first=True)

        ring.publish(piece, read)
        ring.drain()
        expected = torch.full_like(total, sum(rank + 1 for rank in ranks))
        check_result("sum over the ranks of this host", total, expected)
        if (wire := hosts.wire) is not None:
            total.fill_(self._counterparts.rank + 1)
            received = {host: torch.empty_like(total) for host in wire.peer_hosts}
            arriving = [wire.receive(buffer, host) for host, buffer in received.items()]
            wire.wait_all([*(wire.send(total, host) for host in wire.peer_hosts), *arriving])
            add_hosts(total, hosts.host, received)
            expected.fill_(sum(rank + 1 for rank in self._counterparts.ranks))
            check_result("sum over the hosts", total, expected)

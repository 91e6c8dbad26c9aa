"""Cut attention over packed documents into a few dense matrix products, for CPUs.

Short documents are sorted by length and packed into bins. Each bin is a small dense matrix with a mask, and bins of one
width are multiplied as a batch. A long document is cut into blocks of queries, and each block is multiplied with all
visible keys. Bins and long documents consist of *slots*: the tokens of the row in another order, with a few padding
slots.

The documents of a row change with every step, and oneDNN caches a compiled kernel of about 200 KiB for every shape of
product. To keep the number of shapes small, bins are multiplied in batches of a few fixed sizes, and long documents are
padded to whole blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from aliquot.nn.product_shapes import BATCHES, LONGEST_BINNED, NARROWEST, QUERY_BLOCK, STEP, saved_numel


@dataclass(frozen=True)
class Bins:
    """`count` bins of `width` slots each, beginning at slot `start`."""

    start: int
    count: int
    width: int
    bias: Tensor  # [count, width, width], 0 or -inf, of the compute dtype

    @property
    def stop(self) -> int:
        return self.start + self.count * self.width


@dataclass(frozen=True)
class Block:
    """Queries [first, last) of a long document against its keys [key, last); positions count in the document."""

    first: int
    last: int
    key: int
    bias: Tensor  # [last - first, n]: 0 or -inf for the last n keys; all queries attend to earlier keys


@dataclass(frozen=True)
class Long:
    """A long document and the padding after it, at slots [start, start + length)."""

    start: int
    length: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Tiles:
    """The bins and long documents of one row of T tokens.

    `tokens` [slots] and `slots` [T] are None if the slots have the order of the row.
    """

    bins: tuple[Bins, ...]
    longs: tuple[Long, ...]
    tokens: Tensor | None  # the token of each slot; 0 in padding slots
    slots: Tensor | None  # the slot of each token
    padding: Tensor | None  # the padding slots

    def layout(self) -> list[int]:
        """Return the tiles as numbers, because torch operations accept no dataclasses. `of` is the inverse."""
        numbers = [len(self.bins)]
        for bins in self.bins:
            numbers += [bins.start, bins.count, bins.width]
        for long in self.longs:
            numbers += [long.start, long.length, len(long.blocks)]
            for block in long.blocks:
                numbers += [block.first, block.last, block.key]
        return numbers

    def biases(self) -> list[Tensor]:
        return [*(bins.bias for bins in self.bins), *(block.bias for long in self.longs for block in long.blocks)]

    @staticmethod
    def of(layout: list[int], biases: list[Tensor], tokens: Tensor | None, slots: Tensor | None) -> Tiles:
        """Make tiles from `layout` and `biases`, without `padding`, which only the backward pass needs."""
        number, bias = iter(layout), iter(biases)
        bins = tuple(Bins(next(number), next(number), next(number), next(bias)) for _ in range(next(number)))
        longs = []
        for start in number:
            length, count = next(number), next(number)
            blocks = tuple(Block(next(number), next(number), next(number), next(bias)) for _ in range(count))
            longs.append(Long(start, length, blocks))
        return Tiles(bins, tuple(longs), tokens, slots, None)


def cut(edges: tuple[int, ...], window: int | None, like: Tensor) -> Tiles:
    """Cut a row with documents at `edges` for causal attention over at most `window` tokens.

    Biases have the dtype of `like`; all tensors are on its device.
    """
    lengths = [b - a for a, b in pairwise(edges)]
    order: list[int] = []  # token of each slot, -1 for padding
    bins: list[Bins] = []
    for width, filled in sorted(_fill_bins(lengths).items()):
        start = len(order)
        bias = like.new_full((len(filled), width, width), float("-inf"))
        for number, documents in enumerate(filled):
            at = 0
            for document in documents:
                length = lengths[document]
                bias[number, at : at + length, at : at + length] = _causal_bias(length, length, window, like)
                order.extend(range(edges[document], edges[document + 1]))
                at += length
            # A padding slot attends to itself, because a row of -inf would become nan.
            bias[number].diagonal()[at:] = 0
            order.extend([-1] * (width - at))
        bins += _in_batches(Bins(start, len(filled), width, bias), saved_numel(edges[-1]))
    longs = []
    for document, length in enumerate(lengths):
        if length > LONGEST_BINNED:
            # Padding follows all real tokens, so that no real token attends to it.
            padded = -(-length // QUERY_BLOCK) * QUERY_BLOCK
            longs.append(Long(len(order), padded, _blocks(padded, window, like)))
            order.extend(range(edges[document], edges[document + 1]))
            order.extend([-1] * (padded - length))
    if order == list(range(edges[-1])):
        return Tiles(tuple(bins), tuple(longs), None, None, None)
    tokens = torch.tensor(order)
    padding = (tokens < 0).nonzero().flatten()
    slots = torch.empty(edges[-1], dtype=torch.int64)
    real = (tokens >= 0).nonzero().flatten()
    slots[tokens[real]] = real
    tokens, slots, padding = (x.to(like.device) for x in (tokens.clamp(min=0), slots, padding))
    return Tiles(tuple(bins), tuple(longs), tokens, slots, padding if len(padding) else None)


def _in_batches(bins: Bins, saved: int) -> Iterator[Bins]:
    """Divide bins into batches with at most `saved` attention probabilities, which a backward pass saves together."""
    done = 0
    for size in BATCHES:
        while bins.count - done >= size and (size == 1 or size * bins.width**2 <= saved):
            yield Bins(bins.start + done * bins.width, size, bins.width, bins.bias[done : done + size])
            done += size


def _fill_bins(lengths: list[int]) -> dict[int, list[list[int]]]:
    """Pack documents into bins: longest document first, into the fullest bin that fits. Return {width: bins}."""
    room: dict[int, list[list[int]]] = defaultdict(list)  # number of free slots -> bins with this number of free slots
    filled: dict[int, list[list[int]]] = defaultdict(list)
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length = lengths[document]
        if length > LONGEST_BINNED:
            continue
        free = min((f for f, waiting in room.items() if f >= length and waiting), default=None)
        if free is None:
            width = max(NARROWEST, -(-length // STEP) * STEP)
            free, chosen = width, list[int]()
            filled[width].append(chosen)
        else:
            chosen = room[free].pop()
        chosen.append(document)
        if free > length:
            room[free - length].append(chosen)
    return filled


def _blocks(length: int, window: int | None, like: Tensor) -> tuple[Block, ...]:
    blocks = []
    within = _causal_bias(QUERY_BLOCK, QUERY_BLOCK, None, like)
    for first in range(0, length, QUERY_BLOCK):
        last = first + QUERY_BLOCK
        key = 0 if window is None else max(0, first - window + 1)
        bias = within
        if window is not None and last - key > window:
            bias = _causal_bias(last - first, last - key, window, like)
        blocks.append(Block(first, last, key, bias))
    return tuple(blocks)


def _causal_bias(queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """Return a causal bias [queries, keys] where the queries have the last positions of the keys."""
    bias = like.new_full((queries, keys), float("-inf")).triu_(keys - queries + 1)
    if window is not None and keys > window:
        beyond = like.new_ones((queries, keys), dtype=torch.bool).tril_(keys - queries - window)
        bias.masked_fill_(beyond, float("-inf"))
    return bias


def to_slots(x: Tensor, tiles: Tiles) -> Tensor:
    """Reorder tokens to slots: [T, heads, D] -> [slots, heads, D]."""
    return x if tiles.tokens is None else x.index_select(0, tiles.tokens)


def from_slots(x: Tensor, tiles: Tiles) -> Tensor:
    return x if tiles.slots is None else x.index_select(0, tiles.slots)


def bin_queries(x: Tensor, bins: Bins, heads: tuple[int, int]) -> Tensor:
    """Gather queries: [slots, H, D] -> [bins x H_kv, group x width, D]. Queries that share keys are in one matrix."""
    grid = x[bins.start : bins.stop].view(bins.count, bins.width, *heads, x.shape[-1])
    return grid.permute(0, 2, 3, 1, 4).reshape(bins.count * heads[0], heads[1] * bins.width, x.shape[-1])


def bin_keys(x: Tensor, bins: Bins) -> Tensor:
    """Gather keys or values of bins: [slots, H_kv, D] -> [bins x H_kv, width, D]."""
    grid = x[bins.start : bins.stop].view(bins.count, bins.width, *x.shape[1:])
    return grid.transpose(1, 2).reshape(-1, bins.width, x.shape[-1])


def bins_back(x: Tensor, out: Tensor, bins: Bins, heads: tuple[int, int]) -> None:
    """Write `x` to its slots in `out`: the inverse of `bin_queries` and, with a group of one, of `bin_keys`."""
    grid = out[bins.start : bins.stop].view(bins.count, bins.width, *heads, x.shape[-1])
    grid.copy_(x.view(bins.count, *heads, bins.width, x.shape[-1]).permute(0, 3, 1, 2, 4))


def long_queries(x: Tensor, long: Long, heads: tuple[int, int]) -> Tensor:
    """Gather queries: [slots, H, D] -> [H_kv, length x group, D], where a block of queries is a slice of rows."""
    grid = x[long.start : long.start + long.length].view(long.length, *heads, x.shape[-1])
    return grid.transpose(0, 1).reshape(heads[0], long.length * heads[1], x.shape[-1])


def long_keys(x: Tensor, long: Long) -> Tensor:
    """Gather keys or values of a long document: [slots, H_kv, D] -> [H_kv, length, D]."""
    return x[long.start : long.start + long.length].transpose(0, 1).contiguous()


def transposed(x: Tensor, keys: slice) -> Tensor:
    """Transpose visible keys: [H_kv, length, D] -> [H_kv, D, keys], always as a view of contiguous rows.

    torch would make a transposed copy of other rows, for which oneDNN needs another kind of kernel.
    """
    rows = x[:, keys]
    in_one_piece = rows.stride(0) == rows.shape[1] * rows.shape[2]
    return (rows if in_one_piece else rows.clone(memory_format=torch.contiguous_format)).mT


def long_back(x: Tensor, out: Tensor, long: Long, heads: tuple[int, int]) -> None:
    grid = out[long.start : long.start + long.length].view(long.length, *heads, x.shape[-1])
    grid.copy_(x.view(heads[0], long.length, heads[1], x.shape[-1]).transpose(0, 1))

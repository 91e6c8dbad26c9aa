"""Attention over packed documents on CPU as few dense products: see tiles.py for how a row is cut.

torch's own kernel is slow there in bf16, one call a document; products over bins of short documents are not. Scores and
probabilities are of the compute dtype, softmax works in fp32 inside, as in transformers' eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from aliquot.nn.attention.tile_sizes import LONGEST_BINNED, binned, kept_numel
from aliquot.nn.attention.tiles import (
    Bins,
    Block,
    Tiles,
    bin_keys,
    bin_queries,
    bins_back,
    cut,
    from_slots,
    long_back,
    long_keys,
    long_queries,
    to_slots,
    transposed,
)

if TYPE_CHECKING:
    from aliquot.nn.attention.base import Documents, Scoring


class Kept:
    """Probabilities for the backward pass, at most so many for each head of the row; of tiles that come when there is
    no room, they are computed again. All lie in one block, whose size does not follow from the documents: neither does
    what a row needs."""

    def __init__(self, query: Tensor, numel: int) -> None:
        """`query` [T, H, D]; `numel` of a head."""
        self.block = query.new_empty(numel * query.shape[1]) if numel else None
        self.places: list[tuple[int, torch.Size] | None] = []  # where those of each tile begin, and their shape
        self.of_sinks: list[Tensor] = []  # of tiles that have a place, where there are sinks
        self._used = 0

    def place(self, shape: torch.Size) -> Tensor | None:
        """Where to write those of the next tile; None: nowhere."""
        if self.block is None or self._used + shape.numel() > len(self.block):
            self.places.append(None)
            return None
        start, self._used = self._used, self._used + shape.numel()
        self.places.append((start, shape))
        return self.block[start : self._used].view(shape)


def kept_tiles(
    places: list[tuple[int, torch.Size] | None], block: Tensor | None, of_sinks: list[Tensor]
) -> Iterator[tuple[Any, Any]]:
    """Of each tile, its probabilities and the sinks'; None for what has not been kept, or is not there."""
    if block is None:
        yield from repeat((None, None))
        return
    sinks = iter(of_sinks)
    for place in places:
        if place is None:
            yield None, None
        else:
            start, shape = place
            yield block[start : start + shape.numel()].view(shape), next(sinks, None)


class _Kind(NamedTuple):
    """What the shapes of products depend on, beside the documents."""

    heads: tuple[torch.Size, ...]  # of queries, keys and values: [heads, width]
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True)
class TiledAttention:
    """`selective`: its output is kept over a recomputation of the layer, and no probabilities."""

    selective: bool = False
    _met: dict[_Kind, set[tuple[int, ...]]] = field(default_factory=dict, repr=False, compare=False)  # see meet_all

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        kind = (scoring.window, query.dtype)
        if kind not in documents.cuts:
            documents.cuts[kind] = cut(documents.edges, scoring.window, query)
        rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        if query.device.type == "cpu" and query.requires_grad:
            self._met.setdefault(_Kind(tuple(x.shape[1:] for x in rows), query.dtype, scoring.window), set())
        sinks = None if scoring.sinks is None else scoring.sinks.to(query.dtype)
        how = (documents.cuts[kind], scoring.scaling, scoring.softcap, self.selective)
        out: Tensor = _Tiled.apply(*rows, sinks, *how)  # type: ignore[no-untyped-call]
        return out[None]

    def meet_all(self, edges: tuple[int, ...], most: int) -> None:
        """Multiply once in every shape that such a row can need, where it has not been done: with any bins, and with
        blocks of documents as long as its longest, up to the next power of two and at `most`. oneDNN makes a kernel for
        each, some tens of MiB together, which would otherwise be met one by one over hundreds of steps."""
        rows = {(width,) * count for width, count in binned(edges[-1])}
        longest = max((b - a for a, b in pairwise(edges)), default=0)
        if longest > LONGEST_BINNED:
            rows.add((min(most, 1 << (longest - 1).bit_length()),))
        for kind, met in self._met.items():
            for lengths in rows - met:
                _multiply(kind, lengths)
            met |= rows

    def on_meta(self) -> TiledAttention:
        return self


def _multiply(kind: _Kind, lengths: tuple[int, ...]) -> None:
    """As forward and backward do with documents of these lengths."""
    edges = tuple(accumulate(lengths, initial=0))
    inputs = [torch.zeros(edges[-1], *heads, dtype=kind.dtype, requires_grad=True) for heads in kind.heads]
    out = _Tiled.apply(*inputs, None, cut(edges, kind.window, inputs[0]), 1.0, None, False)  # type: ignore[no-untyped-call]
    torch.autograd.grad(out, inputs, torch.zeros_like(out))


class _Tiled(torch.autograd.Function):
    """query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v], sinks [H] or None -> [T, H, D_v], all contiguous."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tiles: Tiles,
        scaling: float,
        softcap: float | None,
        selective: bool,
    ) -> Tensor:
        kept = Kept(query, kept_numel(len(query)) if any(ctx.needs_input_grad) and not selective else 0)
        if selective:
            out: Tensor = torch.ops.aliquot.tiled_attention(
                query, key, value, sinks, tiles.layout(), tiles.biases(), tiles.tokens, tiles.slots, scaling, softcap
            )
        else:
            heads = (key.shape[1], query.shape[1] // key.shape[1])
            out = _attended(query, key, value, tiles, _Scores(scaling, softcap, sinks, heads), kept)
        ctx.save_for_backward(query, key, value, sinks, kept.block, *kept.of_sinks)
        ctx.places, ctx.tiles, ctx.scaling, ctx.softcap = kept.places, tiles, scaling, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tiles: Tiles = ctx.tiles
        query, key, value, sinks, block_kept, *of_sinks_kept = ctx.saved_tensors
        heads = (key.shape[1], query.shape[1] // key.shape[1])
        kept = kept_tiles(ctx.places, block_kept, of_sinks_kept)
        q, k, v, g = (to_slots(x, tiles) for x in (query, key, value, gradient.contiguous()))
        if tiles.padding is not None:
            g.index_fill_(0, tiles.padding, 0)  # padding is queried by nobody and adds nothing to keys and values
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scores = _Scores(ctx.scaling, ctx.softcap, sinks, heads)
        wide = torch.promote_types(q.dtype, torch.float32)
        of_sinks = None if sinks is None else torch.zeros(heads, dtype=wide, device=q.device)
        for bins in tiles.bins:
            p, rest = next(kept)
            queries, keys, values = bin_queries(q, bins, heads), bin_keys(k, bins), bin_keys(v, bins)
            if p is None:
                p, rest = scores.of_bins(queries, keys, bins)
            out_gradient = bin_queries(g, bins, heads)
            of_p = torch.bmm(out_gradient, values.mT)
            if of_sinks is not None:
                of_sinks -= (rest * (p * of_p).sum(-1)).view(bins.count, *heads, bins.width).sum((0, 3), dtype=wide)
            of_scores = scores.gradient(p, of_p, queries, keys)
            bins_back(torch.bmm(of_scores, keys), dq, bins, heads)
            bins_back(torch.bmm(of_scores.mT, queries), dk, bins, (heads[0], 1))
            bins_back(torch.bmm(p.mT, out_gradient), dv, bins, (heads[0], 1))
        scores = replace(scores, scaling=1.0)
        for long in tiles.longs:
            queries, out_gradient = long_queries(q, long, heads) * ctx.scaling, long_queries(g, long, heads)
            keys, values = long_keys(k, long), long_keys(v, long)
            result = torch.empty_like(queries)
            # A key's gradient is a sum over blocks of queries: rounded once, at the end.
            sum_k, sum_v = (torch.zeros_like(each, dtype=wide) for each in (keys, values))
            for block in long.blocks:
                rows, seen = slice(block.first * heads[1], block.last * heads[1]), slice(block.key, block.last)
                p, rest = next(kept)
                if p is None:
                    p, rest = scores.of_block(queries, keys, block)
                of_p = torch.bmm(out_gradient[:, rows], transposed(values, seen))
                if of_sinks is not None:
                    of_sinks -= (rest * (p * of_p).sum(-1)).view(heads[0], -1, heads[1]).sum(1, dtype=wide)
                of_scores = scores.gradient(p, of_p, queries[:, rows], keys[:, seen])
                result[:, rows] = torch.bmm(of_scores, keys[:, seen])
                sum_k[:, seen] += torch.bmm(of_scores.mT, queries[:, rows])
                sum_v[:, seen] += torch.bmm(p.mT, out_gradient[:, rows])
            long_back(result.mul_(ctx.scaling), dq, long, heads)
            long_back(sum_k, dk, long, (heads[0], 1))
            long_back(sum_v, dv, long, (heads[0], 1))
        sink_gradient = None if of_sinks is None else of_sinks.flatten().to(q.dtype)
        return *(from_slots(x, tiles) for x in (dq, dk, dv)), sink_gradient, None, None, None, None


def _attended(query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: _Scores, kept: Kept) -> Tensor:
    """Return [T, H, D_v]; `kept` receives the probabilities of each tile."""
    heads, scaling = scores.heads, scores.scaling
    q, k, v = (to_slots(x, tiles) for x in (query, key, value))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    for bins in tiles.bins:
        queries, keys, values = bin_queries(q, bins, heads), bin_keys(k, bins), bin_keys(v, bins)
        p = scores.of_bins(queries, keys, bins, kept)[0]
        bins_back(torch.bmm(p, values), out, bins, heads)
    scores = replace(scores, scaling=1.0)
    for long in tiles.longs:
        queries = long_queries(q, long, heads) * scaling
        keys, values = long_keys(k, long), long_keys(v, long)
        result = queries.new_empty(*queries.shape[:2], v.shape[2])
        for block in long.blocks:
            p = scores.of_block(queries, keys, block, kept)[0]
            rows = slice(block.first * heads[1], block.last * heads[1])
            result[:, rows] = torch.bmm(p, values[:, block.key : block.last])
        long_back(result, out, long, heads)
    return from_slots(out, tiles)


def attended_alone(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *tiles_and_scores: Any) -> Tensor:
    """Compute torch.ops.aliquot.tiled_attention, whose schema below names the other arguments: [T, H, D_v]."""
    layout, biases, tokens, slots, scaling, softcap = tiles_and_scores
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    tiles, scores = Tiles.of(layout, biases, tokens, slots), _Scores(scaling, softcap, sinks, heads)
    return _attended(query, key, value, tiles, scores, Kept(query, 0))


# Selective activation checkpointing (models/recompute.py) keeps results of operations that torch knows.
torch.library.define(
    "aliquot::tiled_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int[] layout, Tensor[] biases, Tensor? tokens, "
    "Tensor? slots, float scaling, float? softcap) -> Tensor",
)
torch.library.impl("aliquot::tiled_attention", "CompositeExplicitAutograd", attended_alone)


@dataclass(frozen=True)
class _Scores:
    """How the products of queries and keys become probabilities, and the way back."""

    scaling: float  # of the products; 1: that of the queries of a long document, which are fewer numbers
    softcap: float | None
    sinks: Tensor | None  # [H]
    heads: tuple[int, int]  # of keys and values, and queries sharing one of them

    def of_bins(
        self, queries: Tensor, keys: Tensor, bins: Bins, kept: Kept | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[bins x H_kv, group x width, width], and the sinks' [bins x H_kv, group x width]."""
        scores = torch.bmm(queries, keys.mT)
        grid = scores.view(bins.count, *self.heads, bins.width, bins.width)
        sinks = None if self.sinks is None else self.sinks.view(1, *self.heads, 1, 1)
        return self._softmax(scores, grid, bins.bias[:, None, None], sinks, kept)

    def of_block(
        self, queries: Tensor, keys: Tensor, block: Block, kept: Kept | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[H_kv, queries of the block x group, keys that it sees], and the sinks' without the last."""
        kv_heads, group = self.heads
        rows = slice(block.first * group, block.last * group)
        scores = torch.bmm(queries[:, rows], transposed(keys, slice(block.key, block.last)))
        grid = scores.view(kv_heads, block.last - block.first, group, block.last - block.key)
        sinks = None if self.sinks is None else self.sinks.view(kv_heads, 1, group, 1)
        return self._softmax(scores, grid, block.bias[None, :, None], sinks, kept)

    def _softmax(
        self, scores: Tensor, grid: Tensor, bias: Tensor, sinks: Tensor | None, kept: Kept | None
    ) -> tuple[Tensor, Tensor | None]:
        """`grid` is a view of `scores` that `sinks` fit, and `bias` its last columns."""
        scaling = self.scaling
        if self.softcap is not None:
            grid.mul_(scaling / self.softcap).tanh_()
            scaling = self.softcap
        if bias.shape[-1] == grid.shape[-1]:
            torch.add(bias, grid, alpha=scaling, out=grid)
        else:
            if scaling != 1:
                grid.mul_(scaling)
            grid[..., -bias.shape[-1] :] += bias
        place = None if kept is None else kept.place(scores.shape)
        if sinks is None:
            return torch.softmax(scores, -1, out=place), None
        column = sinks.expand(*grid.shape[:-1], 1).reshape(*scores.shape[:-1], 1)
        both = torch.softmax(torch.cat([scores, column], -1), -1)
        of_sinks = both[..., -1].contiguous()
        if kept is None or place is None:
            return both[..., :-1].contiguous(), of_sinks
        kept.of_sinks.append(of_sinks)
        return place.copy_(both[..., :-1]), of_sinks

    def gradient(self, probabilities: Tensor, of_probabilities: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Through softmax, soft-cap and scaling."""
        scores: Tensor = torch.ops.aten._softmax_backward_data(
            of_probabilities, probabilities, -1, of_probabilities.dtype
        )
        if self.softcap is not None:
            capped = torch.bmm(queries, keys.mT).mul_(self.scaling / self.softcap).tanh_()
            scores.mul_(1 - capped.square_())
        return scores if self.scaling == 1 else scores.mul_(self.scaling)

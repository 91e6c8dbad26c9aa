"""Attention over packed documents on CPU, as a few dense matrix products over tiles (see tiles.py).

torch's attention kernel is slow on CPUs in bf16 and needs one call per document. Products over bins of short documents
are fast. Scores and probabilities have the compute dtype, and softmax computes in fp32, as in transformers' eager
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from aliquot.nn.product_shapes import LONGEST_BINNED, binned, saved_numel

if TYPE_CHECKING:
    from aliquot.nn.attention.document_attention import Documents, Scoring


class SavedProbabilities:
    """Attention probabilities saved for the backward pass, in one block of memory with a fixed size per head.

    The backward pass recomputes the probabilities of tiles that do not fit into the block. The block size, and so the
    memory of a row, does not depend on the documents.
    """

    def __init__(self, query: Tensor, numel: int) -> None:
        """`query` [T, H, D]; `numel`: number of saved probabilities per head."""
        self.block = query.new_empty(numel * query.shape[1]) if numel else None
        self.places: list[tuple[int, torch.Size] | None] = []  # start and shape of each tile; None: not saved
        self.sinks: list[Tensor] = []  # softmax shares of sinks, for saved tiles
        self._used = 0

    def place(self, shape: torch.Size) -> Tensor | None:
        """Return memory in the block for the next tile's probabilities; None if the block is full."""
        if self.block is None or self._used + shape.numel() > len(self.block):
            self.places.append(None)
            return None
        start, self._used = self._used, self._used + shape.numel()
        self.places.append((start, shape))
        return self.block[start : self._used].view(shape)


def saved_tiles(
    places: list[tuple[int, torch.Size] | None], block: Tensor | None, sinks_of_tiles: list[Tensor]
) -> Iterator[tuple[Any, Any]]:
    """Yield (probabilities, softmax shares of sinks) of each tile, with None for values that do not exist."""
    if block is None:
        yield from repeat((None, None))
        return
    sinks = iter(sinks_of_tiles)
    for place in places:
        if place is None:
            yield None, None
        else:
            start, shape = place
            yield block[start : start + shape.numel()].view(shape), next(sinks, None)


class _Kind(NamedTuple):
    """Properties of a layer that decide the shapes of its products."""

    heads: tuple[torch.Size, ...]  # [heads, width] of queries, keys and values
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True)
class TiledAttention:
    """The backend for CPUs. With `selective`, activation checkpointing keeps the output instead of probabilities."""

    selective: bool = False
    _warm_shapes: dict[_Kind, set[tuple[int, ...]]] = field(default_factory=dict, repr=False, compare=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        kind = (scoring.window, query.dtype)
        if kind not in documents.cuts:
            documents.cuts[kind] = cut(documents.edges, scoring.window, query)
        rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        if query.device.type == "cpu" and query.requires_grad:
            self._warm_shapes.setdefault(_Kind(tuple(x.shape[1:] for x in rows), query.dtype, scoring.window), set())
        sinks = None if scoring.sinks is None else scoring.sinks.to(query.dtype)
        how = (documents.cuts[kind], scoring.scaling, scoring.softcap, self.selective)
        out: Tensor = _Tiled.apply(*rows, sinks, *how)  # type: ignore[no-untyped-call]
        return out[None]

    def warm_up_shapes(self, edges: tuple[int, ...], most: int) -> None:
        """Run a product of every shape that a row of this length, with documents of at most `most` tokens, may need.

        oneDNN compiles a kernel for each shape, tens of MiB in all. Without this warm-up, memory would grow over
        hundreds of steps. The length of documents that are too long for bins is rounded up to a power of two.
        """
        rows = {(width,) * count for width, count in binned(edges[-1])}
        longest = max((b - a for a, b in pairwise(edges)), default=0)
        if longest > LONGEST_BINNED:
            rows.add((min(most, 1 << (longest - 1).bit_length()),))
        for kind, shapes in self._warm_shapes.items():
            for lengths in rows - shapes:
                _multiply(kind, lengths)
            shapes |= rows


def _multiply(kind: _Kind, lengths: tuple[int, ...]) -> None:
    """Run a forward and a backward pass of attention over documents of these lengths."""
    edges = tuple(accumulate(lengths, initial=0))
    inputs = [torch.zeros(edges[-1], *heads, dtype=kind.dtype, requires_grad=True) for heads in kind.heads]
    out = _Tiled.apply(*inputs, None, cut(edges, kind.window, inputs[0]), 1.0, None, False)  # type: ignore[no-untyped-call]
    torch.autograd.grad(out, inputs, torch.zeros_like(out))


class _Tiled(torch.autograd.Function):
    """Autograd function of attention over tiles, with contiguous tensors.

    query [T, H, D], key [T, H_kv, D], value [T, H_kv, D_v], sinks [H] or None -> [T, H, D_v].
    """

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
        saved = SavedProbabilities(query, saved_numel(len(query)) if any(ctx.needs_input_grad) and not selective else 0)
        if selective:
            out: Tensor = torch.ops.aliquot.tiled_attention(
                query, key, value, sinks, tiles.layout(), tiles.biases(), tiles.tokens, tiles.slots, scaling, softcap
            )
        else:
            heads = (key.shape[1], query.shape[1] // key.shape[1])
            out = _attended(query, key, value, tiles, _Scores(scaling, softcap, sinks, heads), saved)
        ctx.save_for_backward(query, key, value, sinks, saved.block, *saved.sinks)
        ctx.places, ctx.tiles, ctx.scaling, ctx.softcap = saved.places, tiles, scaling, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tiles: Tiles = ctx.tiles
        query, key, value, sinks, saved_block, *saved_sinks = ctx.saved_tensors
        heads = (key.shape[1], query.shape[1] // key.shape[1])
        saved = saved_tiles(ctx.places, saved_block, saved_sinks)
        q, k, v, g = (to_slots(x, tiles) for x in (query, key, value, gradient.contiguous()))
        if tiles.padding is not None:
            g.index_fill_(0, tiles.padding, 0)  # padding adds nothing to the gradients of keys and values
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scores = _Scores(ctx.scaling, ctx.softcap, sinks, heads)
        wide = torch.promote_types(q.dtype, torch.float32)
        sink_gradients = None if sinks is None else torch.zeros(heads, dtype=wide, device=q.device)
        for bins in tiles.bins:
            p, sink_share = next(saved)
            queries, keys, values = bin_queries(q, bins, heads), bin_keys(k, bins), bin_keys(v, bins)
            if p is None:
                p, sink_share = scores.bin_probabilities(queries, keys, bins)
            out_gradient = bin_queries(g, bins, heads)
            p_gradient = torch.bmm(out_gradient, values.mT)
            if sink_gradients is not None:
                shares = (sink_share * (p * p_gradient).sum(-1)).view(bins.count, *heads, bins.width)
                sink_gradients -= shares.sum((0, 3), dtype=wide)
            score_gradients = scores.gradient(p, p_gradient, queries, keys)
            bins_back(torch.bmm(score_gradients, keys), dq, bins, heads)
            bins_back(torch.bmm(score_gradients.mT, queries), dk, bins, (heads[0], 1))
            bins_back(torch.bmm(p.mT, out_gradient), dv, bins, (heads[0], 1))
        scores = replace(scores, scaling=1.0)
        for long in tiles.longs:
            queries, out_gradient = long_queries(q, long, heads) * ctx.scaling, long_queries(g, long, heads)
            keys, values = long_keys(k, long), long_keys(v, long)
            result = torch.empty_like(queries)
            # The gradient of a key is a sum over blocks of queries, and is rounded only once, at the end.
            sum_k, sum_v = (torch.zeros_like(rows_of_head, dtype=wide) for rows_of_head in (keys, values))
            for block in long.blocks:
                rows, keys_seen = slice(block.first * heads[1], block.last * heads[1]), slice(block.key, block.last)
                p, sink_share = next(saved)
                if p is None:
                    p, sink_share = scores.block_probabilities(queries, keys, block)
                p_gradient = torch.bmm(out_gradient[:, rows], transposed(values, keys_seen))
                if sink_gradients is not None:
                    shares = (sink_share * (p * p_gradient).sum(-1)).view(heads[0], -1, heads[1])
                    sink_gradients -= shares.sum(1, dtype=wide)
                score_gradients = scores.gradient(p, p_gradient, queries[:, rows], keys[:, keys_seen])
                result[:, rows] = torch.bmm(score_gradients, keys[:, keys_seen])
                sum_k[:, keys_seen] += torch.bmm(score_gradients.mT, queries[:, rows])
                sum_v[:, keys_seen] += torch.bmm(p.mT, out_gradient[:, rows])
            long_back(result.mul_(ctx.scaling), dq, long, heads)
            long_back(sum_k, dk, long, (heads[0], 1))
            long_back(sum_v, dv, long, (heads[0], 1))
        sink_gradient = None if sink_gradients is None else sink_gradients.flatten().to(q.dtype)
        return *(from_slots(x, tiles) for x in (dq, dk, dv)), sink_gradient, None, None, None, None


def _attended(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tiles, scores: _Scores, saved: SavedProbabilities
) -> Tensor:
    """Compute the output of attention, [T, H, D_v]. `saved` receives the probabilities of each tile."""
    heads, scaling = scores.heads, scores.scaling
    q, k, v = (to_slots(x, tiles) for x in (query, key, value))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    for bins in tiles.bins:
        queries, keys, values = bin_queries(q, bins, heads), bin_keys(k, bins), bin_keys(v, bins)
        p = scores.bin_probabilities(queries, keys, bins, saved)[0]
        bins_back(torch.bmm(p, values), out, bins, heads)
    scores = replace(scores, scaling=1.0)
    for long in tiles.longs:
        queries = long_queries(q, long, heads) * scaling
        keys, values = long_keys(k, long), long_keys(v, long)
        result = queries.new_empty(*queries.shape[:2], v.shape[2])
        for block in long.blocks:
            p = scores.block_probabilities(queries, keys, block, saved)[0]
            rows = slice(block.first * heads[1], block.last * heads[1])
            result[:, rows] = torch.bmm(p, values[:, block.key : block.last])
        long_back(result, out, long, heads)
    return from_slots(out, tiles)


def attended_alone(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *tiles_and_scores: Any) -> Tensor:
    """Implement torch.ops.aliquot.tiled_attention, [T, H, D_v]. The schema below names the other arguments."""
    layout, biases, tokens, slots, scaling, softcap = tiles_and_scores
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    tiles, scores = Tiles.of(layout, biases, tokens, slots), _Scores(scaling, softcap, sinks, heads)
    return _attended(query, key, value, tiles, scores, SavedProbabilities(query, 0))


# Selective activation checkpointing (models/backward_pass.py) only keeps results of operations registered with torch.
torch.library.define(
    "aliquot::tiled_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int[] layout, Tensor[] biases, Tensor? tokens, "
    "Tensor? slots, float scaling, float? softcap) -> Tensor",
)
torch.library.impl("aliquot::tiled_attention", "CompositeExplicitAutograd", attended_alone)


@dataclass(frozen=True)
class _Scores:
    """Turn products of queries and keys into probabilities, and back."""

    scaling: float  # of products; 1 for long documents, whose queries are scaled instead
    softcap: float | None
    sinks: Tensor | None  # [H]
    heads: tuple[int, int]  # (key-value heads, query heads per key-value head)

    def bin_probabilities(
        self, queries: Tensor, keys: Tensor, bins: Bins, saved: SavedProbabilities | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return probabilities [bins x H_kv, group x width, width] and sinks' shares [bins x H_kv, group x width]."""
        scores = torch.bmm(queries, keys.mT)
        grid = scores.view(bins.count, *self.heads, bins.width, bins.width)
        sinks = None if self.sinks is None else self.sinks.view(1, *self.heads, 1, 1)
        return self._softmax(scores, grid, bins.bias[:, None, None], sinks, saved)

    def block_probabilities(
        self, queries: Tensor, keys: Tensor, block: Block, saved: SavedProbabilities | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return probabilities [H_kv, queries x group, visible keys] and sinks' shares [H_kv, queries x group]."""
        kv_heads, group = self.heads
        rows = slice(block.first * group, block.last * group)
        scores = torch.bmm(queries[:, rows], transposed(keys, slice(block.key, block.last)))
        grid = scores.view(kv_heads, block.last - block.first, group, block.last - block.key)
        sinks = None if self.sinks is None else self.sinks.view(kv_heads, 1, group, 1)
        return self._softmax(scores, grid, block.bias[None, :, None], sinks, saved)

    def _softmax(
        self, scores: Tensor, grid: Tensor, bias: Tensor, sinks: Tensor | None, saved: SavedProbabilities | None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply softmax. `grid` is a view of `scores` in the shape of `sinks`; `bias` applies to the last columns."""
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
        place = None if saved is None else saved.place(scores.shape)
        if sinks is None:
            return torch.softmax(scores, -1, out=place), None
        column = sinks.expand(*grid.shape[:-1], 1).reshape(*scores.shape[:-1], 1)
        with_sinks = torch.softmax(torch.cat([scores, column], -1), -1)
        sink_shares = with_sinks[..., -1].contiguous()
        if saved is None or place is None:
            return with_sinks[..., :-1].contiguous(), sink_shares
        saved.sinks.append(sink_shares)
        return place.copy_(with_sinks[..., :-1]), sink_shares

    def gradient(self, probabilities: Tensor, probability_gradients: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the gradient of the products of queries and keys, through softmax, soft-cap and scaling."""
        scores: Tensor = torch.ops.aten._softmax_backward_data(
            probability_gradients, probabilities, -1, probability_gradients.dtype
        )
        if self.softcap is not None:
            capped = torch.bmm(queries, keys.mT).mul_(self.scaling / self.softcap).tanh_()
            scores.mul_(1 - capped.square_())
        return scores if self.scaling == 1 else scores.mul_(self.scaling)

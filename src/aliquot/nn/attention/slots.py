"""How a row goes into its slots, and from there into the matrices that attention multiplies, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from aliquot.nn.attention.tiles import Bins, Long, Tiles


def to_slots(x: Tensor, tiles: Tiles) -> Tensor:
    """[T, heads, D] -> [slots, heads, D]."""
    return x if tiles.tokens is None else x.index_select(0, tiles.tokens)


def from_slots(x: Tensor, tiles: Tiles) -> Tensor:
    return x if tiles.slots is None else x.index_select(0, tiles.slots)


def bin_queries(x: Tensor, bins: Bins, heads: tuple[int, int]) -> Tensor:
    """[slots, H, D] -> [bins x H_kv, group x width, D]: the queries that share keys are rows of one product."""
    grid = x[bins.start : bins.stop].view(bins.count, bins.width, *heads, x.shape[-1])
    return grid.permute(0, 2, 3, 1, 4).reshape(bins.count * heads[0], heads[1] * bins.width, x.shape[-1])


def bin_keys(x: Tensor, bins: Bins) -> Tensor:
    """[slots, H_kv, D] -> [bins x H_kv, width, D]."""
    grid = x[bins.start : bins.stop].view(bins.count, bins.width, *x.shape[1:])
    return grid.transpose(1, 2).reshape(-1, bins.width, x.shape[-1])


def bins_back(x: Tensor, out: Tensor, bins: Bins, heads: tuple[int, int]) -> None:
    """The inverse of `bin_queries`, and of `bin_keys` with a group of one."""
    grid = out[bins.start : bins.stop].view(bins.count, bins.width, *heads, x.shape[-1])
    grid.copy_(x.view(bins.count, *heads, bins.width, x.shape[-1]).permute(0, 3, 1, 2, 4))


def long_queries(x: Tensor, long: Long, heads: tuple[int, int]) -> Tensor:
    """[slots, H, D] -> [H_kv, length x group, D]: a block of queries is a slice of rows."""
    grid = x[long.start : long.start + long.length].view(long.length, *heads, x.shape[-1])
    return grid.transpose(0, 1).reshape(heads[0], long.length * heads[1], x.shape[-1])


def long_keys(x: Tensor, long: Long) -> Tensor:
    """[slots, H_kv, D] -> [H_kv, length, D]."""
    return x[long.start : long.start + long.length].transpose(0, 1).contiguous()


def transposed(x: Tensor, seen: slice) -> Tensor:
    """[H_kv, length, D] -> [H_kv, D, those that are seen], always a view of rows that lie in one piece: of others torch
    makes a copy that is transposed, for which oneDNN needs a kernel of another kind."""
    rows = x[:, seen]
    in_one_piece = rows.stride(0) == rows.shape[1] * rows.shape[2]
    return (rows if in_one_piece else rows.clone(memory_format=torch.contiguous_format)).mT


def long_back(x: Tensor, out: Tensor, long: Long, heads: tuple[int, int]) -> None:
    grid = out[long.start : long.start + long.length].view(long.length, *heads, x.shape[-1])
    grid.copy_(x.view(heads[0], long.length, heads[1], x.shape[-1]).transpose(0, 1))

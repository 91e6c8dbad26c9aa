"""Which probabilities of a row attention keeps for its backward pass on CPU, and where."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor


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

"""A weight as the host engine sees it: its shape, and who owns which range of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weight:
    """One weight of the model, in the order of the engine's lists."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # [rank]: the flat range that it owns
    learns: bool
    dtype: torch.dtype  # in which it is computed with

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    def numel_of(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def learned_of(self, rank: int) -> int:
        """How much of it has gradients and states there."""
        return self.numel_of(rank) if self.learns else 0

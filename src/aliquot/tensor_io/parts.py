"""Parts and part stores. A part is a flat range of a named tensor: a rank's shard of a weight or of a moment.

Loading and saving transfer parts between files and tensors in pieces. This file does not import torch, because the
planner, which runs without torch, counts the memory of these pieces.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")

DEPTH = 6  # pieces in progress: two more than threads, so that no thread idles while the calling thread converts
PIECE_BYTES = 4 << 20  # bytes of a piece in the file; a pipeline has DEPTH buffers of this size
MEMORY_BYTES = (DEPTH + 4) * PIECE_BYTES  # a pipeline's buffers, and one piece of 1-byte elements as fp32


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of tensor `name`, counted in row-major order over its full `shape`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@cache  # because a model has few shapes, but many weights and ranks
def row_ranges(shape: tuple[int, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the flat range of each rank by FSDP2's rule: ceil(rows / ranks) rows; the last ranks may get none."""
    rows = shape[0] if shape else 1
    row_numel, share = math.prod(shape[1:]), -(-rows // ranks)
    edges = [min(rank * share, rows) * row_numel for rank in range(ranks + 1)]
    return tuple(pairwise(edges))


class PartSource(Protocol):
    """A source of this rank's parts. Callers read values as fp32 CPU tensors, piece by piece."""

    def parts(self) -> Sequence[Part]:
        """Return this rank's parts. The parts of all ranks cover each element of each (name, kind) exactly once.

        Frozen weights may be an exception: the ranks of each host then cover the weight.
        """
        ...

    def read(self, part: Part, start: int, out: Tensor) -> None:
        """Copy elements [start, start + out.numel()) of the full tensor, all inside `part`, into flat fp32 `out`."""
        ...


class PartStore(PartSource, Protocol):
    """A source of parts whose values can also be written; every engine is a part store."""

    def write(self, part: Part, start: int, values: Tensor) -> None:
        """Set elements [start, start + values.numel()) of the full tensor, all inside `part`, to flat fp32 `values`."""
        ...


@runtime_checkable
class ViewableStore(Protocol):
    """A part store that can expose the memory of its parts, so that a transfer need not copy them as fp32."""

    def view(self, part: Part) -> Tensor | None:
        """Return the memory of a part: a flat, contiguous CPU tensor of any float dtype. None: not available."""
        ...


class FlatParts(ABC):
    """A viewable part store whose parts are flat tensors on any device."""

    @abstractmethod
    def flat(self, part: Part) -> Tensor:
        """Return the memory of a part: a flat tensor of any float dtype."""

    def read(self, part: Part, start: int, out: Tensor) -> None:
        out.copy_(self.flat(part)[start - part.start :][: out.numel()])

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self.flat(part)[start - part.start :][: values.numel()].copy_(values)

    def view(self, part: Part) -> Tensor | None:
        flat = self.flat(part)
        return flat if flat.device.type == "cpu" else None


class SelectedParts:
    """A part store with only those parts of `store` whose tensors are in `names`, for example those of an adapter."""

    def __init__(self, store: PartStore, names: Collection[str]) -> None:
        self._parts = [part for part in store.parts() if part.name in names]
        self.read, self.write = store.read, store.write
        self.view = store.view if isinstance(store, ViewableStore) else lambda part: None

    def parts(self) -> Sequence[Part]:
        return self._parts

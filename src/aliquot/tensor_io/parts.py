"""A part: a flat range of a named tensor. Ranks hold, read and write their shards of the state in parts.

Parts move between files and tensors in pieces. The planner counts the buffers of pieces, so this file imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")

DEPTH = 6  # pieces in progress: two more than threads, so that none waits while the calling thread converts
PIECE_BYTES = 4 << 20  # of a file; DEPTH buffers of this size are all the memory that a pipeline has
MEMORY_BYTES = (DEPTH + 4) * PIECE_BYTES  # the buffers of a pipeline, and a piece of bytes as fp32


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


def row_ranges(shape: tuple[int, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """Return each rank's flat range by FSDP2's dim-0 rule: ceil(rows / ranks) rows; later ranks get fewer or none."""
    rows = shape[0] if shape else 1
    row_numel, share = math.prod(shape[1:]), -(-rows // ranks)
    edges = [min(rank * share, rows) * row_numel for rank in range(ranks + 1)]
    return tuple(pairwise(edges))


class PartSource(Protocol):
    """A source of parts. Callers read values as fp32 CPU tensors, piece by piece."""

    def parts(self) -> Sequence[Part]:
        """Return the parts of this rank. The parts of all ranks together cover each (name, kind) exactly once."""
        ...

    def read(self, part: Part, start: int, out: Tensor) -> None:
        """Copy elements [start, start + out.numel()) of the tensor, all inside `part`, into flat fp32 `out`."""
        ...


class PartStore(PartSource, Protocol):
    """A source of parts that also accepts values; every engine is one."""

    def write(self, part: Part, start: int, values: Tensor) -> None:
        """Set elements [start, start + values.numel()) of the tensor, all inside `part`, from flat fp32 `values`."""
        ...


@runtime_checkable
class ViewableStore(Protocol):
    """A store that gives access to the memory of its parts. Parts of any other store are copied, as fp32."""

    def view(self, part: Part) -> Tensor | None:
        """Return the memory of the part: flat, contiguous, on the CPU, of any float dtype. None: not available."""
        ...


class SelectedParts:
    """The parts of `store` that belong to tensors of these names, for example those of an adapter."""

    def __init__(self, store: PartStore, names: Collection[str]) -> None:
        self._store = store
        self._parts = [part for part in store.parts() if part.name in names]

    def parts(self) -> Sequence[Part]:
        return self._parts

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._store.read(part, start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self._store.write(part, start, values)

    def view(self, part: Part) -> Tensor | None:
        return self._store.view(part) if isinstance(self._store, ViewableStore) else None

"""Cut flat ranges of weights into windows, and lay out each window in a scratch file. Imports no torch.

A window is stored as a record of fields, such as the moments of its elements. One disk request moves one record. The
fields are adjacent and begin on page boundaries, so that a request can also move a single field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from aliquot.optim.sizes import States, low_bytes, moment_bytes, update_block

PAGE_BYTES = 4096  # alignment of direct I/O on every common disk
_BLOCKS = 4  # update blocks per window: 1 M elements, 14 MB of fp32 states and gradient
AHEAD = 2  # windows that are read ahead; as many windows may be written at the same time
STREAM_BUFFERS = SUMS_BUFFERS = 2 * AHEAD + 1  # including the window in use
SMALLEST = 1 << 12  # elements; smaller weights stay in memory, because they would waste pages and requests


@cache  # because a rank asks for the windows of every weight and host
def windows(numel: int, states: States, row_numel: int) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of each window of a range of `numel` elements."""
    size = _BLOCKS * update_block(states, row_numel)
    return tuple((start, min(numel, start + size)) for start in range(0, numel, size))


def longest_window(numel: int, states: States, row_numel: int) -> int:
    """Return the number of elements of the longest window."""
    return min(numel, _BLOCKS * update_block(states, row_numel))


@dataclass(frozen=True)
class Record:
    """The position of a window and of its fields in a scratch file."""

    offset: int
    fields: Mapping[str, tuple[int, int]]  # (offset in the record, bytes), in order

    @property
    def size_bytes(self) -> int:
        return sum(map(paged, (size for _, size in self.fields.values())))


def record(offset: int, sizes: Mapping[str, int]) -> Record:
    """Lay out a record at `offset` of the scratch file. `sizes`: bytes of each field."""
    starts = accumulate(map(paged, sizes.values()), initial=0)
    return Record(offset, {name: (start, sizes[name]) for name, start in zip(sizes, starts, strict=False)})


def state_bytes(numel: int, states: States, row_numel: int, splits: bool) -> dict[str, int]:
    """Return the bytes of each field that an update reads and writes: "weight", "exp_avg", "exp_avg_sq".

    `splits`: master weights are split. Only then is there a field "weight", which contains their low halves.
    """
    moment = moment_bytes(states, numel, row_numel)
    low = {"weight": low_bytes(numel)} if splits else {}
    return {**low, "exp_avg": moment, "exp_avg_sq": moment}


def paged(size: int) -> int:
    """Round a size in bytes up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES

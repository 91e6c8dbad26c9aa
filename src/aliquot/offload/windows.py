"""Cut flat ranges into windows, each of which is a record of fields in a scratch file. Imports no torch.

One request moves one window. The fields of a window are adjacent and begin on pages, so that a request can also move a
single field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aliquot.optim.sizes import States, low_bytes, moment_bytes, update_block

PAGE_BYTES = 4096  # alignment of direct I/O on every common disk
_BLOCKS = 4  # blocks of an update in a window: 1 M elements, 14 MB of exact states and gradient
AHEAD = 2  # windows that are read ahead, and as many that are being written
STREAM_BUFFERS = SUMS_BUFFERS = 2 * AHEAD + 1  # with the window in use
SMALLEST = 1 << 12  # elements; smaller weights stay in memory, because they would waste pages and requests


def windows(numel: int, states: States, row_numel: int) -> list[tuple[int, int]]:
    """Return [start, stop) of each window of a range of `numel` elements."""
    size = _BLOCKS * update_block(states, row_numel)
    return [(start, min(numel, start + size)) for start in range(0, numel, size)]


def longest_window(numel: int, states: States, row_numel: int) -> int:
    """Return the elements of the longest of `windows`."""
    return min(numel, _BLOCKS * update_block(states, row_numel))


@dataclass(frozen=True)
class Record:
    """The place of a window and of its fields in a scratch file."""

    offset: int
    fields: Mapping[str, tuple[int, int]]  # (offset in the record, bytes), in order

    @property
    def size_bytes(self) -> int:
        return sum(map(paged, (size for _, size in self.fields.values())))


def record(offset: int, sizes: Mapping[str, int]) -> Record:
    """Lay out a record at `offset` of the file; `sizes`: bytes of each field."""
    fields, at = {}, 0
    for name, size in sizes.items():
        fields[name] = (at, size)
        at += paged(size)
    return Record(offset, fields)


def state_bytes(numel: int, states: States, row_numel: int, splits: bool) -> dict[str, int]:
    """Return the bytes of each field that an update reads and writes, by kind of part.

    `splits`: the low halves of the masters are among the fields.
    """
    moment = moment_bytes(states, numel, row_numel)
    low = {"weight": low_bytes(numel)} if splits else {}
    return {**low, "exp_avg": moment, "exp_avg_sq": moment}


def paged(size: int) -> int:
    """Round up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES

"""How what lies on disk is cut: windows of a flat range, each a record of fields in a scratch file. Told without torch.

A window is what moves at a time. Its fields lie side by side, each on whole pages, so that one request moves all of
them or one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aliquot.optim.sizes import States, low_bytes, moment_bytes, update_block

PAGE_BYTES = 4096  # what direct I/O aligns to on every disk of today
_BLOCKS = 4  # of an update, in a window: 1 M elements, 14 MB of exact states and gradient
AHEAD = 2  # windows that are read before they are wanted, and as many that are being written
STREAM_BUFFERS = SUMS_BUFFERS = 2 * AHEAD + 1  # with the one in hand
SMALLEST = 1 << 12  # elements; what has fewer stays in memory: pages would be wasted on it, and requests


def windows(numel: int, states: States, row_numel: int) -> list[tuple[int, int]]:
    """[start, stop) of each window of a range of `numel` elements."""
    size = _window(states, row_numel)
    return [(start, min(numel, start + size)) for start in range(0, numel, size)]


def longest_window(numel: int, states: States, row_numel: int) -> int:
    """Elements of the longest of `windows`."""
    return min(numel, _window(states, row_numel))


def _window(states: States, row_numel: int) -> int:
    return _BLOCKS * update_block(states, row_numel)


@dataclass(frozen=True)
class Record:
    """Where the fields of a window lie in a scratch file."""

    offset: int
    fields: Mapping[str, tuple[int, int]]  # (from the record's start, bytes), in order

    @property
    def size_bytes(self) -> int:
        return sum(map(paged, (size for _, size in self.fields.values())))


def record(offset: int, sizes: Mapping[str, int]) -> Record:
    """`sizes`: bytes of each field."""
    fields, at = {}, 0
    for name, size in sizes.items():
        fields[name] = (at, size)
        at += paged(size)
    return Record(offset, fields)


def state_bytes(numel: int, states: States, row_numel: int, splits: bool) -> dict[str, int]:
    """Of the fields that an update reads and writes, by kind of part; `splits`: of weights the low halves are there."""
    moment = moment_bytes(states, numel, row_numel)
    low = {"weight": low_bytes(numel)} if splits else {}
    return {**low, "exp_avg": moment, "exp_avg_sq": moment}


def paged(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES

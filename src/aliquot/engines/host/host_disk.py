"""The layout of a rank's scratch file: a record for each window of the ranges that the rank keeps on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from aliquot.engines.engine_plan import OnDisk, first_of
from aliquot.engines.host.host_memory import sum_itemsize
from aliquot.engines.host.shared_weights import Counterparts, Weight
from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.windows import Record, paged, record, state_bytes, windows
from aliquot.optim.sizes import States

SumKey = tuple[int, int, int]  # (host whose rank owns the sums, weight, window number)


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of this rank's range of a weight, and their record on disk."""

    start: int
    stop: int
    record: Record


class HostDisk:
    """A rank's scratch file, and the position of each window in the file.

    `windows` lists, by weight, the windows of optimizer state and of frozen weights; `states` has only the windows of
    optimizer state. `sums` has (offset in bytes, number of elements) of each window of gradient sums, for this rank and
    for its counterparts on other hosts.
    """

    def __init__(
        self,
        directory: Path,
        on_disk: OnDisk,
        weights: Sequence[Weight],
        embedding: int,
        counterparts: Counterparts,
        states: States,
        streamed: Collection[int] = (),
    ) -> None:
        """Lay out and allocate the file. Raises StorageError if the directory cannot hold it.

        `embedding`: the input embedding, whose sums stay in memory because tokens look up its rows. `streamed`: the
        weights of streamed layers, whose compute copies are also on disk.
        """
        shapes = [weight.shape if weight.trainable else None for weight in weights]
        with_sums = set(first_of(shapes, on_disk.gradients, never=embedding))
        updated = first_of(shapes, on_disk.states)
        self.windows: dict[int, list[Window]] = {}
        self.sums: dict[SumKey, tuple[int, int]] = {}
        end = 0
        for index in [*updated, *sorted(set(streamed) - set(updated))]:
            weight, placed = weights[index], []
            for start, stop in windows(weight.shard_numel(counterparts.rank), states, weight.row_numel):
                numel = stop - start
                sizes = {"gradient": numel * sum_itemsize(states)} if index in with_sums else {}
                if index in streamed:
                    sizes["compute"] = numel * weight.dtype.itemsize
                if weight.trainable:  # bf16 weights are the high halves of master weights
                    sizes |= state_bytes(numel, states, weight.row_numel, splits=weight.dtype.itemsize == 2)
                placed.append(Window(start, stop, record(end, sizes)))
                end += placed[-1].record.size_bytes
            self.windows[index] = placed
        self.states = {index: self.windows[index] for index in updated}
        for index in sorted(with_sums):
            for host, owner in enumerate(counterparts.ranks):
                cut = windows(weights[index].shard_numel(owner), states, weights[index].row_numel)
                for number, (start, stop) in enumerate(cut):
                    if host == counterparts.host:
                        offset = self.states[index][number].record.offset  # sums are a record's first field
                    else:
                        offset, end = end, end + paged((stop - start) * sum_itemsize(states))
                    self.sums[host, index, number] = (offset, stop - start)
        self.scratch = ScratchFile(directory, end)

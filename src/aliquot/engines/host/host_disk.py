"""Where on disk what a rank of the host engine holds there is: a record for each window of its ranges."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from aliquot.engines.host.shared_weights import Weight
from aliquot.engines.state_placement import OnDisk, first_of
from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.windows import Record, paged, record, state_bytes, windows
from aliquot.optim.sizes import States

Place = tuple[int, int, int]  # host whose rank owns it, weight, window


@dataclass(frozen=True)
class Window:
    """Elements [start, stop) of this rank's range of a weight."""

    start: int
    stop: int
    record: Record


class HostDisk:
    """`states[weight]`: the windows of a weight whose states lie on disk; `windows`: of what is frozen, too. `sums`:
    offset and elements of each window of gradient sums that does, this rank's and those of its counterparts on the
    other hosts."""

    def __init__(
        self,
        directory: Path,
        on_disk: OnDisk,
        weights: Sequence[Weight],
        embedding: int,
        owners: Sequence[int],
        own: int,
        states: States,
        splits: bool,
        kept_itemsize: int,
        streamed: Collection[int] = (),
    ) -> None:
        """`embedding`: the weight that is looked up. `owners[host]`: the rank there that is this one's counterpart;
        `own`: this host. `streamed`: the weights that themselves lie there, too, or alone. Raises StorageError.
        """
        shapes = [weight.shape if weight.learns else None for weight in weights]
        summed = set(first_of(shapes, on_disk.gradients, never=embedding))
        self.states: dict[int, list[Window]] = {}
        self.sums: dict[Place, tuple[int, int]] = {}
        end = 0
        for index in first_of(shapes, on_disk.states):
            weight, found = weights[index], []
            for start, stop in windows(weight.numel_of(owners[own]), states, weight.row_numel):
                sizes = {"gradient": (stop - start) * kept_itemsize} if index in summed else {}
                if index in streamed:
                    sizes["compute"] = (stop - start) * (2 if splits else 4)
                placed = record(end, sizes | state_bytes(stop - start, states, weight.row_numel, splits))
                found.append(Window(start, stop, placed))
                end += placed.size_bytes
            self.states[index] = found
        self.windows = dict(self.states)
        for index in sorted(set(streamed) - self.states.keys()):
            weight, self.windows[index] = weights[index], []
            for start, stop in windows(weight.numel_of(owners[own]), states, weight.row_numel):
                placed = record(end, {"compute": (stop - start) * (2 if splits else 4)})
                self.windows[index].append(Window(start, stop, placed))
                end += placed.size_bytes
        for index in sorted(summed):
            for host, owner in enumerate(owners):
                cut = windows(weights[index].numel_of(owner), states, weights[index].row_numel)
                for number, (start, stop) in enumerate(cut):
                    if host == own:
                        offset = self.states[index][number].record.offset  # the sums are its first field
                    else:
                        offset, end = end, end + paged((stop - start) * kept_itemsize)
                    self.sums[host, index, number] = (offset, stop - start)
        self.scratch = ScratchFile(directory, end)

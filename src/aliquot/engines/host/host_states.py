"""Master weights and moments of a rank of the host engine, in memory or, window by window, on disk.

On disk lies all of them but what every rank computes from, the high halves of the masters, and of streamed layers that,
too; of what is frozen nothing else. An update reads windows ahead of the arithmetic and writes them behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aliquot.engines.host.host_disk import HostDisk, Window
from aliquot.engines.host.host_sums import HostSums
from aliquot.engines.host.shared_weights import Owned
from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.stream import Move, Stream
from aliquot.offload.windows import paged
from aliquot.optim.adamw import FlatShard
from aliquot.optim.master_weights import PairedWeights, RoundedWeights, SplitWeights, Weights, WholeWeights
from aliquot.optim.moments import ExactMoment, Moment, moment
from aliquot.optim.sizes import States
from aliquot.tensor_io.mapped_memory import mapped_tensor
from aliquot.tensor_io.parts import Kind


class HostStates:
    def __init__(
        self,
        owned: Sequence[Owned],
        sums: HostSums,
        states: States,
        disk: HostDisk | None,
        streamed: Collection[int],
        compiled: bool,
    ) -> None:
        """`streamed`: the weights that lie on disk whole, of `disk`. `compiled`: the update is."""
        self._split = PairedWeights if compiled and states == "fp32" else SplitWeights
        self._owned = owned
        self._sums = sums
        self._states = states
        self._streamed = streamed
        self._updated = {} if disk is None else disk.states
        self._windows = {} if disk is None else disk.windows
        self._scratch = None if disk is None else disk.scratch
        self._at_hand: dict[Kind, _AtHand] = {}
        self._handing = threading.Lock()  # a save reads in a thread of its own
        self._shards: dict[int, FlatShard] = {}  # those in memory, by weight
        self._frozen = {
            index: self._weights(own, 0, own.numel, {})
            for index, own in enumerate(owned)
            if not own.learns and index not in self._windows
        }
        for index, own in enumerate(owned):
            if index not in self._updated and own.learns:
                gradient = sums.own(index)
                assert gradient is not None  # what has its sums on disk has its states there, too
                self._shards[index] = self._shard(own, 0, own.numel, gradient, {})

    @property
    def low_bytes(self) -> int:
        """What the masters in memory have beyond what is computed from."""
        found = (shard.weights for shard in self._shards.values())
        return sum(weights.low.nbytes for weights in found if isinstance(weights, SplitWeights))

    @property
    def moments_bytes(self) -> int:
        """In memory."""
        return sum(shard.exp_avg.size_bytes + shard.exp_avg_sq.size_bytes for shard in self._shards.values())

    @property
    def on_disk(self) -> bool:
        """Whether states of any weight lie there."""
        return bool(self._updated)

    def order(self, wanted: Sequence[int]) -> list[int]:
        """All weights as `to_update` comes to them: those in memory, then those on disk, each as they are `wanted`."""
        return [index for where in (self._shards, self._updated) for index in wanted if index in where]

    def to_update(self, order: Sequence[int]) -> Iterator[tuple[int, FlatShard]]:
        """Every shard and its weight, each to be updated before the next is asked for, which may be in another thread.
        Raises StorageError."""
        self.put_away()
        visits = [(index, window) for index in order for window in self._updated.get(index, ())]
        on_disk = None if self._scratch is None else Stream(self._scratch, [_move(window) for _, window in visits])
        for index in order:
            if index in self._shards:
                yield index, self._shards[index]
        for (index, window), buffer in zip(visits, on_disk or (), strict=True):
            fields = {name: buffer[at : at + size] for name, (at, size) in window.record.fields.items()}
            gradient = self._sums.own(index)
            if gradient is None:
                gradient = fields["gradient"].view(self._sums.dtype)
            else:
                gradient = gradient[window.start : window.stop]
            yield index, self._shard(self._owned[index], window.start, window.stop, gradient, fields)

    def view(self, index: int, kind: Kind) -> Tensor | None:
        """This rank's range where it lies as fp32 in memory; None: it does not, or there is more to write than that."""
        store = None if self._on_disk(index, kind) else self._store(index, kind)
        if isinstance(store, WholeWeights) and not store.is_alone:
            return None
        return store.values if isinstance(store, ExactMoment | WholeWeights) else None

    def load(self, index: int, kind: Kind, start: int, out: Tensor) -> None:
        """Fill fp32 `out` with elements of this rank's range from `start` on. Raises StorageError."""
        for store, at, into in self._stores(index, kind, start, out, changes=False):
            found = store.load(at, into)
            if found is not into:
                into.copy_(found)

    def store(self, index: int, kind: Kind, start: int, values: Tensor) -> None:
        """Set elements of this rank's range from `start` on. Raises StorageError."""
        for store, at, some in self._stores(index, kind, start, values, changes=True):
            store.store(at, some)

    def put_away(self) -> None:
        """What `store` has changed is on disk when this returns. Raises StorageError."""
        with self._handing:
            while self._at_hand:
                self._at_hand.popitem()[1].put_away()

    def _stores(
        self, index: int, kind: Kind, start: int, values: Tensor, changes: bool
    ) -> Iterator[tuple[Store, int, Tensor]]:
        """Stores, of each the place where a part of `values` belongs, and that part."""
        if not self._on_disk(index, kind):
            yield self._store(index, kind), start, values
            return
        windows = self._windows[index]
        with self._handing:
            for window in windows[start // windows[0].stop :]:
                low, high = max(start, window.start), min(start + values.numel(), window.stop)
                if low < high:
                    at_hand = self._hand(index, kind, window)
                    at_hand.changed |= changes
                    yield at_hand.store, low - window.start, values[low - start : high - start]

    def _hand(self, index: int, kind: Kind, window: Window) -> _AtHand:
        found = self._at_hand.get(kind)
        if found is None or found.window is not window:
            if found is not None:
                found.put_away()
            assert self._scratch is not None
            own, start, stop = self._owned[index], window.start, window.stop
            names = [name for name in ("compute", "weight") if name in window.record.fields]
            names = names if kind == "weight" else [kind]
            spans = [window.record.fields[name] for name in names]  # side by side
            first = spans[0][0]
            memory = mapped_tensor(spans[-1][0] + paged(spans[-1][1]) - first, torch.uint8)
            fields = {name: memory[at - first :][:size] for name, (at, size) in zip(names, spans, strict=True)}
            store: Store
            if kind == "weight":
                store = self._weights(own, start, stop, fields)
            else:
                store = self._moment(own, start, stop, fields[kind], squared=kind == "exp_avg_sq")
            offset = window.record.offset + first
            self._scratch.read(offset, memory).result()
            found = self._at_hand[kind] = _AtHand(self._scratch, window, offset, memory, store)
        return found

    def _on_disk(self, index: int, kind: Kind) -> bool:
        whole = kind == "weight" and self._owned[index].dtype == torch.float32
        return bool(self._windows.get(index)) and (not whole or index in self._streamed)

    def _store(self, index: int, kind: Kind) -> Store:
        if index in self._frozen:
            return self._frozen[index]
        if index not in self._shards:  # of what is on disk, fp32 weights alone are not
            own = self._owned[index]
            return self._weights(own, 0, own.numel, {})
        shard = self._shards[index]
        stores: dict[str, Store] = {"weight": shard.weights, "exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
        return stores[kind]

    def _shard(self, own: Owned, start: int, stop: int, gradient: Tensor, fields: Mapping[str, Tensor]) -> FlatShard:
        """Elements [start, stop) of a range. What is not in `fields` is made of zeros."""
        return FlatShard(
            weights=self._weights(own, start, stop, fields),
            exp_avg=self._moment(own, start, stop, fields.get("exp_avg"), squared=False),
            exp_avg_sq=self._moment(own, start, stop, fields.get("exp_avg_sq"), squared=True),
            gradient=gradient,
            decays=own.decays,
            start=own.start + start,
        )

    def _weights(self, own: Owned, start: int, stop: int, fields: Mapping[str, Tensor]) -> Weights:
        if "compute" in fields:
            values, others = fields["compute"].view(own.dtype), []
        else:
            values, *others = (copy[start:stop] for copy in own.copies)
        if own.dtype == torch.float32:
            return WholeWeights(values, others)
        if not own.learns:
            return RoundedWeights(values, others)
        return self._split(values, others, fields.get("weight"))

    def _moment(self, own: Owned, start: int, stop: int, memory: Tensor | None, squared: bool) -> Moment:
        return moment(self._states, stop - start, own.row_numel, squared, memory)


Store = Weights | Moment


@dataclass
class _AtHand:
    """One field of a window, in memory to be read or changed in pieces."""

    scratch: ScratchFile
    window: Window
    offset: int
    memory: Tensor
    store: Store
    changed: bool = False

    def put_away(self) -> None:
        if self.changed:
            self.scratch.write(self.offset, self.memory).result()


def _move(window: Window) -> Move:
    """All of it is read; the gradient, its first field if it has one, is not written."""
    fields = window.record.fields
    return Move(
        window.record.offset,
        window.record.size_bytes,
        next(at for name, (at, _) in fields.items() if name != "gradient"),
    )

"""Master weights and Adam moments of a rank, stored in memory or, in windows, on disk.

Forward and backward passes use the bf16 high halves of the master weights, which are in shared memory. The low halves
and the moments may be on disk. The bf16 weights of streamed layers are on disk, too. Frozen weights have bf16 weights
alone, or a compressed form. During an update, the next windows are read and earlier windows are written while the CPU
computes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aliquot.engines.host.compressed_layers import CompressedLayers
from aliquot.engines.host.gradient_sums import GradientSums
from aliquot.engines.host.host_disk import HostDisk, Window
from aliquot.engines.host.shared_weights import WeightShard
from aliquot.offload.scratch_file import Move, ScratchFile, ScratchStream
from aliquot.offload.windows import paged
from aliquot.optim.adamw import FlatShard, decays
from aliquot.optim.master_weights import PairedWeights, SplitWeights, Weights
from aliquot.optim.moments import Bf16Values, ExactValues, Moment, moment
from aliquot.optim.sizes import States
from aliquot.tensor_io.parts import Kind
from aliquot.tensor_io.range_io import mapped_tensor
from aliquot.tensor_io.weight_codes import CompressedRange


class HostStates:
    """Master weights and moments of all ranges that a rank owns."""

    def __init__(
        self,
        shards: Sequence[WeightShard],
        sums: GradientSums,
        states: States,
        disk: HostDisk | None,
        streamed: Collection[int],
        compiled: bool,
        compressed: CompressedLayers | None = None,
    ) -> None:
        """Allocate the state in memory.

        `streamed`: the weights of streamed layers, whose bf16 weights are also on disk. `compiled`: a compiled kernel
        runs the update. `compressed`: the weights that are stored in its format.
        """
        self._split = PairedWeights if compiled and states == "fp32" else SplitWeights
        self._shards = shards
        self._sums = sums
        self._states = states
        self._streamed = streamed
        self._updated_on_disk = {} if disk is None else disk.states
        self._windows = {} if disk is None else disk.windows
        self._scratch = None if disk is None else disk.scratch
        self._loaded: dict[Kind, _LoadedField] = {}
        self._loading = threading.Lock()  # because checkpoint saves read in another thread
        self._resident: dict[int, FlatShard] = {}
        self._frozen: dict[int, Store] = {
            index: self._weights(shard, 0, shard.numel, {})
            for index, shard in enumerate(shards)
            if not shard.weight.trainable and index not in self._windows
        }
        if compressed is not None:
            self._frozen |= {index: compressed.shard(index, shards[index].start) for index in compressed.weights}
        for index, shard in enumerate(shards):
            if index not in self._updated_on_disk and shard.weight.trainable:
                gradient = sums.local(index)
                assert gradient is not None  # a weight whose sums are on disk also has its states on disk
                self._resident[index] = self._flat_shard(shard, 0, shard.numel, gradient, {})

    @property
    def low_bytes(self) -> int:
        """Bytes of the low halves of master weights in memory."""
        weights = (shard.weights for shard in self._resident.values())
        return sum(masters.low.nbytes for masters in weights if isinstance(masters, SplitWeights))

    @property
    def moments_bytes(self) -> int:
        """Bytes of the moments in memory."""
        return sum(shard.exp_avg.size_bytes + shard.exp_avg_sq.size_bytes for shard in self._resident.values())

    @property
    def on_disk(self) -> bool:
        """Whether states of any weight are on disk."""
        return bool(self._updated_on_disk)

    def update_order(self, forward_order: Sequence[int]) -> list[int]:
        """Return the update order of trainable weights: first weights with state in memory, then state on disk."""
        return [index for place in (self._resident, self._updated_on_disk) for index in forward_order if index in place]

    def to_update(self, order: Sequence[int]) -> Iterator[tuple[int, FlatShard]]:
        """Yield (weight index, shard) for every shard. The caller updates each shard before it requests the next one.

        The caller may run in any thread. Raises StorageError if the disk fails.
        """
        self.put_away()
        visits = [(index, window) for index in order for window in self._updated_on_disk.get(index, ())]
        moves = [_move(window) for _, window in visits]
        stream = () if self._scratch is None else ScratchStream(self._scratch, moves)
        for index in order:
            if index in self._resident:
                yield index, self._resident[index]
        for (index, window), buffer in zip(visits, stream, strict=True):
            fields = {name: buffer[at : at + size] for name, (at, size) in window.record.fields.items()}
            sums, start, stop = self._sums.local(index), window.start, window.stop
            gradient = fields["gradient"].view(self._sums.dtype) if sums is None else sums[start:stop]
            yield index, self._flat_shard(self._shards[index], start, stop, gradient, fields)

    def view(self, index: int, kind: Kind) -> Tensor | None:
        """Return this rank's range of a weight or moment if it is fp32 in memory without replicas, else None."""
        store = None if self._is_on_disk(index, kind) else self._store(index, kind)
        return store.values if isinstance(store, ExactValues) and store.is_alone else None

    def load(self, index: int, kind: Kind, start: int, out: Tensor) -> None:
        """Fill fp32 `out` with elements of this rank's range from `start` on. Raises StorageError."""
        for store, at, target in self._stores(index, kind, start, out, changes=False):
            values = store.load(at, target)
            if values is not target:
                target.copy_(values)

    def store(self, index: int, kind: Kind, start: int, values: Tensor) -> None:
        """Set elements of this rank's range from `start` on. Raises StorageError."""
        for store, at, source in self._stores(index, kind, start, values, changes=True):
            store.store(at, source)

    def put_away(self) -> None:
        """Write the changes of `store` to disk. Raises StorageError."""
        with self._loading:
            while self._loaded:
                self._loaded.popitem()[1].put_away()

    def _stores(
        self, index: int, kind: Kind, start: int, values: Tensor, changes: bool
    ) -> Iterator[tuple[Store, int, Tensor]]:
        """Yield (store, first index in the store, slice of `values`) for every store that `values` overlaps."""
        if not self._is_on_disk(index, kind):
            yield self._store(index, kind), start, values
            return
        windows = self._windows[index]
        with self._loading:
            for window in windows[start // windows[0].stop :]:
                low, high = max(start, window.start), min(start + values.numel(), window.stop)
                if low < high:
                    field = self._load_field(index, kind, window)
                    field.changed |= changes
                    yield field.store, low - window.start, values[low - start : high - start]

    def _load_field(self, index: int, kind: Kind, window: Window) -> _LoadedField:
        field = self._loaded.get(kind)
        if field is None or field.window is not window:
            if field is not None:
                field.put_away()
            assert self._scratch is not None
            shard, start, stop = self._shards[index], window.start, window.stop
            names = [name for name in ("compute", "weight") if name in window.record.fields]
            names = names if kind == "weight" else [kind]
            spans = [window.record.fields[name] for name in names]  # adjacent on disk
            first = spans[0][0]
            memory = mapped_tensor(spans[-1][0] + paged(spans[-1][1]) - first, torch.uint8)
            fields = {name: memory[at - first :][:size] for name, (at, size) in zip(names, spans, strict=True)}
            store: Store
            if kind == "weight":
                store = self._weights(shard, start, stop, fields)
            else:
                store = self._moment(shard, start, stop, fields[kind], squared=kind == "exp_avg_sq")
            offset = window.record.offset + first
            self._scratch.read(offset, memory).result()
            field = self._loaded[kind] = _LoadedField(self._scratch, window, offset, memory, store)
        return field

    def _is_on_disk(self, index: int, kind: Kind) -> bool:
        is_shared_master = kind == "weight" and self._shards[index].weight.dtype == torch.float32
        return bool(self._windows.get(index)) and (not is_shared_master or index in self._streamed)

    def _store(self, index: int, kind: Kind) -> Store:
        if index in self._frozen:
            return self._frozen[index]
        if index not in self._resident:  # an fp32 master weight in memory, with moments on disk
            shard = self._shards[index]
            return self._weights(shard, 0, shard.numel, {})
        flat = self._resident[index]
        stores: dict[str, Store] = {"weight": flat.weights, "exp_avg": flat.exp_avg, "exp_avg_sq": flat.exp_avg_sq}
        return stores[kind]

    def _flat_shard(
        self, shard: WeightShard, start: int, stop: int, gradient: Tensor, fields: Mapping[str, Tensor]
    ) -> FlatShard:
        """Return elements [start, stop) of a range, with new zeros for states that are not in `fields`."""
        return FlatShard(
            weights=self._weights(shard, start, stop, fields),
            exp_avg=self._moment(shard, start, stop, fields.get("exp_avg"), squared=False),
            exp_avg_sq=self._moment(shard, start, stop, fields.get("exp_avg_sq"), squared=True),
            gradient=gradient,
            decays=decays(shard.weight.name, shard.weight.shape),
            start=shard.start + start,
            rate_ratio=shard.weight.rate_ratio,
        )

    def _weights(self, shard: WeightShard, start: int, stop: int, fields: Mapping[str, Tensor]) -> Weights:
        if "compute" in fields:
            values, replicas = fields["compute"].view(shard.weight.dtype), []
        else:
            values, *replicas = (copy[start:stop] for copy in shard.copies)
        if shard.weight.dtype == torch.float32:
            return ExactValues(values, replicas)
        if not shard.weight.trainable:
            return Bf16Values(values, replicas)
        return self._split(values, replicas, fields.get("weight"))

    def _moment(self, shard: WeightShard, start: int, stop: int, memory: Tensor | None, squared: bool) -> Moment:
        return moment(self._states, stop - start, shard.weight.row_numel, squared, memory)


Store = Weights | CompressedRange | Moment


@dataclass
class _LoadedField:
    """One field of a window on disk, loaded into memory so that callers can read or change it in pieces."""

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
    """Return the disk request of an update: read a whole record, and write back all fields except the gradient."""
    record = window.record
    written_from = next(at for name, (at, _) in record.fields.items() if name != "gradient")
    return Move(record.offset, record.size_bytes, written_from)

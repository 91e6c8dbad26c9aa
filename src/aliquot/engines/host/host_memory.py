"""The memory of the host engine: one copy of the weights per NUMA node, all other state sharded over the ranks.

The file also defines the engine's buffer sizes, because the planner needs them. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Self

from aliquot.config.schema import RunConfig
from aliquot.data.workload import batch_size, micro_batch_tokens
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import OnDisk, RankMemory, streamed_layers
from aliquot.models.model_shape import LayerKind, ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import STREAM_BUFFERS, SUMS_BUFFERS, longest_window, paged, state_bytes
from aliquot.optim.sizes import SCRATCH_BYTES, low_bytes, moment_bytes
from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes

# Size of a rank's ring buffer for staged gradients. A rank can be ahead of other ranks by the gradients that fit into
# the buffer, a layer or more of most models. A larger buffer gains nothing.
RING_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
RESIDENT_LAYERS = 3  # streamed layers in memory: one computes, one is read, another rank still uses the third
COPY_SLOTS = 3  # copied layers on a GPU: one computes, one is being copied, the copy of a third may begin early
EXCHANGE_BYTES = 128 << 20  # see exchange_bytes()
# A message between hosts ends at this many bytes of gradient sums or uncompressed weights. Network and CPU need about
# as long for these bytes as the CPU needs for a message of any length.
MESSAGE_BYTES = 1 << 20
# Limit of gradients that are being copied from a GPU: two layers of a model of 8 B parameters, so that the GPU has
# launched kernels while the CPU sums.
IN_FLIGHT_BYTES = 1 << 30
WINDOWS_AHEAD = 2  # windows of on-disk sums in flight from and to each host while one window is summed
PUBLISHED_NUMEL = 4 << 20  # most elements of a weight in one message between hosts
# Measured: (learning rate, bits per weight to encode the changes of an average step, the same for Adam's first step, in
# which each weight, of magnitude 0.02, moves by the learning rate).
_CHANGED_BITS = ((1e-5, 2.2, 2.4), (2e-5, 2.4, 2.8), (1e-4, 3.7, 5.9), (5e-4, 6.2, 10.5), (3e-3, 6.2, 12.8))
# Memory traffic, in bytes per element, that takes a core as long as to decode an element. Measured: 1.0 G elements/s of
# nf4 and 1.4 of int8 on a core that reads and writes 9 GB/s (Xeon with AMX).
_DECODED_BYTES: dict[CompressedFormat, float] = {"nf4": 9.0, "nf4_single": 9.0, "int8": 6.4, "bf16": 0.0}
_DECODED_BYTES_ON_GPU = 24.0  # per element, read and written by the torch operations that decode; counted, not measured
TAG_BYTES = 64  # at the start of each piece: its weight and its position in the weight


def host_memory(config: RunConfig, shape: ModelShape, layout: RankLayout, on_disk: OnDisk) -> RankMemory:
    """Return the memory of a rank with engine host, if the state that `on_disk` selects is on disk."""
    states, splits = config.train.optimizer_states, config.train.chosen_precision == "bf16"
    compute = 2 if splits else 4
    shares = {weight: padded_share(weight, layout.world_size) for weight in shape.alike}
    states_on_disk, sums_on_disk = dict(on_disk.states), dict(on_disk.gradients)
    low = gradients = moments = waiting = 0
    size, sources = batch_size(config.train, layout.world_size), config.data.source_count
    micro_batches = size.micro_batches(layout.world_size, sources)
    passes = micro_batches == 1  # sums for other hosts are sent at once and not stored
    for weight, count in shape.alike.items():
        in_memory = count - states_on_disk.get(weight, 0)
        low += in_memory * (low_bytes(shares[weight]) if splits else 0)
        moments += in_memory * 2 * moment_bytes(states, shares[weight], numel(weight[1:]))
        summed = count - sums_on_disk.get(weight, 0)
        gradients += summed * sum_itemsize(states) * shares[weight]
        # Sums for other hosts. With one micro-batch per step, ranks store only sums to which looked-up rows are added.
        added_to = int(weight == shape.embedding and shape.embedding_is_added_to)
        waiting += (min(summed, added_to) if passes else summed) * shares[weight]
    others = layout.nodes - 1
    tokens = micro_batch_tokens(config, layout.world_size)
    row_numel = max(numel(weight[1:]) for weight in shape.alike)
    copies = min(layout.numa_nodes, layout.ranks_per_node)
    streamed, summing = _windows_bytes(config, shares, on_disk, layout)
    owned = sum(shares[weight] * count for weight, count in shape.alike.items())
    # Sums that are not stored leave from a copy, as do sums that share a message, and rows of an embedding.
    shared = {weight: share for weight, share in shares.items() if share * sent_itemsize(config) < MESSAGE_BYTES}
    copied = owned if passes else sum(share * shape.alike[weight] for weight, share in shared.items())
    if shape.embedding_is_added_to and not passes:
        copied += min(shares[shape.embedding], tokens * micro_batches * layout.ranks_per_node * shape.width)
    return RankMemory(
        weights=low,
        gradients=gradients + others * waiting * sent_itemsize(config) + summing,
        gradients_from_start=True,
        own_gradients=gradients,
        moments=moments,
        update=SCRATCH_BYTES + (2 * max(shares.values()) if others and splits else 0),  # copy of old weights
        shared_weights=copies
        * ((shape.numel - _streamed_numel(shape, on_disk)) * compute - saved_by_compression(config, shape)),
        buffers=layout.ranks_per_node
        * (
            ring_bytes(row_numel, looked_up_bytes(tokens, shape.width, compute), compute)
            + _between_hosts(config, owned, others, copied)
            + (_pinned_bytes(shape, compute) if layout.device == "cuda" else 0)
        ),
        streamed=streamed,
    )


def saved_by_compression(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes by which an adapter's base in 4 or 8 bits is smaller, with its buffers for decoded layers."""
    base, compute = shape.base, config.train.compute_itemsize
    decoded = [compute * sum(map(numel, kind.compressed)) for kind in shape.kinds for _ in kind.positions]
    codes = sum(code_bytes(base, weight) for weight in shape.compressed.elements())
    return sum(decoded) - codes - 2 * max(decoded)


def decoding_bytes(engine: str, shape: ModelShape, layout: RankLayout) -> float:
    """Return the memory traffic that takes a rank as long as to decode its share of all layers once.

    The CPU ranks of a NUMA node divide this work with engine host.
    """
    if layout.device == "cuda":
        return shape.compressed_numel * _DECODED_BYTES_ON_GPU
    members = layout.ranks_per_node / min(layout.numa_nodes, layout.ranks_per_node) if engine == "host" else 1
    return shape.compressed_numel * _DECODED_BYTES[shape.base] / members


def device_memory(config: RunConfig, shape: ModelShape, copied_layers: int) -> RankMemory:
    """Return the GPU memory of a rank with engine host: a copy of the weights, and gradients that are being copied.

    `copied_layers`: the number of layers that share slots.
    """
    compute, base = config.train.compute_itemsize, shape.base
    copied = compute * sum(_by_layer(shape, copied_layers, lambda kind: sum(map(numel, kind.weights))))
    padded = _by_layer(shape, copied_layers, lambda kind: sum(align(compute * numel(item)) for item in kind.weights))
    slots = sum(max(padded[slot::COPY_SLOTS], default=0) for slot in range(COPY_SLOTS))
    codes = max((code_bytes(base, weight) for weight in shape.compressed), default=0)
    return RankMemory(
        weights=compute * shape.numel - copied + slots + codes,
        gradients=_in_flight_bytes(shape, compute),
        gradients_from_start=False,
        moments=0,
        update=0,
    )


@dataclass(frozen=True)
class LayerCopies:
    """Bytes of copied layers that are copied to a GPU (compute_device.py)."""

    forward: int = 0  # of each micro-batch but the first of a step: the first layers are still in the slots
    forward_frozen: int = 0  # of the first micro-batch, beside all weights that learn
    backward: int = 0  # of each micro-batch: the last layers are still in the slots
    evaluation: int = 0  # of each micro-batch

    @classmethod
    def planned(cls, config: RunConfig, shape: ModelShape, layers: int) -> Self:
        itemsize = config.train.compute_itemsize
        learned = _by_layer(shape, layers, lambda kind: itemsize * sum(map(numel, kind.learned)))
        frozen = _by_layer(shape, layers, partial(_frozen_bytes, itemsize, shape.base))
        copied = list(map(add, learned, frozen))
        again = sum(copied) if len(copied) > COPY_SLOTS else 0
        return cls(sum(copied[COPY_SLOTS:]), sum(frozen[COPY_SLOTS:]), sum(copied[:-COPY_SLOTS]), again)


def _frozen_bytes(itemsize: int, base: CompressedFormat, kind: LayerKind) -> int:
    """Return the bytes of the frozen weights of a layer in host memory, some of them compressed."""
    saved = sum(itemsize * numel(weight) - code_bytes(base, weight) for weight in kind.compressed)
    return itemsize * sum(map(numel, kind.frozen)) - saved


def _in_flight_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the most bytes of gradients that are being copied from a GPU, with the gradient that comes next."""
    largest = max((numel(weight) for kind in shape.kinds for weight in kind.learned), default=0)
    return min(IN_FLIGHT_BYTES + itemsize * largest, itemsize * shape.learned_numel)


def _pinned_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the pinned memory for gradients from a GPU: those being copied, and a layer that waits for its turn.

    They count twice, because torch rounds sizes of pinned memory up to powers of two.
    """
    layer = max((sum(map(numel, kind.learned)) for kind in shape.kinds), default=0)
    return 2 * (_in_flight_bytes(shape, itemsize) + itemsize * layer)


def sent_itemsize(config: RunConfig) -> int:
    """Return the bytes per element of a gradient that is sent to another host."""
    return 2 if config.shard.reduce_dtype == "bf16" else sum_itemsize(config.train.optimizer_states)


def published_bytes(config: RunConfig, first_step: bool = False) -> float:
    """Return the bytes per weight that a rank sends to another host after an update.

    distributed/collectives/weight_patch.py encodes a bf16 weight in two bits, and in one more byte if the weight
    changes by more than one unit in the last place. How many weights change so much depends on the learning rate
    (benchmarks/patches.py).
    """
    if config.train.chosen_precision == "fp32":
        return 4.0
    rates, later, first = zip(*_CHANGED_BITS, strict=True)
    bits = first if first_step else later
    rate = min(max(config.train.learning_rate, rates[0]), rates[-1])
    above = next(at for at, measured in enumerate(rates) if measured >= rate)
    if above == 0:
        return float(bits[0]) / 8
    part = math.log(rate / rates[above - 1]) / math.log(rates[above] / rates[above - 1])
    return float(bits[above - 1] + part * (bits[above] - bits[above - 1])) / 8


def _between_hosts(config: RunConfig, owned: int, others: int, copied: int) -> int:
    """Return the most bytes of a rank's buffers for messages from and to `others` hosts.

    `owned`: elements that the rank owns; `copied`: elements of gradients that are sent to another host from a copy.
    """
    if not others:
        return 0
    limit = exchange_bytes(others)
    sums = sum(min(limit, others * elements * sent_itemsize(config)) for elements in (owned, copied))
    if config.train.chosen_precision == "fp32":
        return sums + min(limit, others * owned * 4) + min(limit, owned * 4)
    weight_bytes = published_bytes(config, first_step=True)
    arriving = int(min(limit, others * owned * 2) / 2 * weight_bytes)  # only written pages count
    return sums + arriving + int(owned * weight_bytes) + 2 * PUBLISHED_NUMEL


def exchange_bytes(others: int) -> int:
    """Return a rank's limit of bytes being received from `others` hosts, and of bytes being sent to them.

    The limit allows a message from or to every host while the next message is written.
    """
    return max(EXCHANGE_BYTES, 2 * MESSAGE_BYTES * others)


@dataclass(frozen=True)
class DiskUse:
    """Disk bytes of all ranks: the size of the scratch files, and the traffic of an optimizer step."""

    size: int
    update: int  # read and written by updates
    update_first: int  # the part of `update` that delays the next forward pass, which overlaps with the rest
    beside_read: int  # during forward and backward passes
    beside_written: int  # during forward and backward passes
    written: int  # all writes of a step


def disk_use(config: RunConfig, shape: ModelShape, layout: RankLayout, on_disk: OnDisk, micro_batches: int) -> DiskUse:
    """Return the disk use of engine host, not rounded to pages. `micro_batches`: per rank and optimizer step."""
    splits = config.train.chosen_precision == "bf16"
    all_states = sum(count * _state_bytes(config, weight) for weight, count in on_disk.states)
    # Every host stores sums of the whole gradient, and sends the sums to their owners once per step.
    summed = sum(count * numel(weight) for weight, count in on_disk.gradients)
    sums = summed * sum_itemsize(config.train.optimizer_states)
    exchanged = (layout.nodes - 1) * sums
    looked_up = shape.embedding if shape.embedding_learns and dict(on_disk.states).get(shape.embedding) else None
    first = 0 if looked_up is None else 2 * _state_bytes(config, looked_up)
    itemsize = 2 if splits else 4
    learned, frozen = itemsize * sum(_learned(shape, on_disk)), itemsize * sum(_frozen(shape, on_disk))
    update = 2 * (all_states + learned) + sums + 2 * exchanged
    return DiskUse(
        size=all_states + learned + frozen + layout.nodes * sums,
        update=update,
        update_first=update if layout.nodes > 1 else first + (update - first) // shape.layers,
        # Forward and backward pass each read the streamed layers. This ignores that the backward pass begins with
        # layers that are still in memory.
        beside_read=(micro_batches - 1) * layout.nodes * sums + micro_batches * 2 * (learned + frozen),
        beside_written=micro_batches * layout.nodes * sums,
        written=all_states + learned + micro_batches * layout.nodes * sums + (sums if layout.nodes > 1 else 0),
    )


def _state_bytes(config: RunConfig, weight: Shape) -> int:
    states, splits = config.train.optimizer_states, config.train.chosen_precision == "bf16"
    return sum(state_bytes(numel(weight), states, numel(weight[1:]), splits).values())


def _learned(shape: ModelShape, on_disk: OnDisk) -> list[int]:
    """Return the trainable elements on disk of each streamed layer."""
    shapes = {weight for weight, _ in on_disk.states}
    return _by_layer(
        shape, on_disk.layers, lambda kind: sum(numel(weight) for weight in kind.learned if weight in shapes)
    )


def _frozen(shape: ModelShape, on_disk: OnDisk) -> list[int]:
    """Return the frozen elements on disk of each streamed layer."""
    return _by_layer(
        shape, on_disk.layers, lambda kind: sum(numel(item) for item in kind.frozen if item in on_disk.frozen)
    )


def _by_layer(shape: ModelShape, layers: int, count: Callable[[LayerKind], int]) -> list[int]:
    """Return `count` of each of `layers` layers, which are evenly spread."""
    if not layers:
        return []  # return early, because a search over settings calls this function 100,000 times
    counts = {at: elements for kind in shape.kinds for elements in [count(kind)] for at in kind.positions}
    return [counts[at] for at in streamed_layers(shape.layers, layers)]


def _streamed_numel(shape: ModelShape, on_disk: OnDisk) -> int:
    """Return the elements of streamed layers that are not in memory: all layers but the RESIDENT_LAYERS largest."""
    per_layer = map(sum, zip(_learned(shape, on_disk), _frozen(shape, on_disk), strict=True))
    return sum(sorted(per_layer)[:-RESIDENT_LAYERS])


def _windows_bytes(
    config: RunConfig, shares: Mapping[Shape, int], on_disk: OnDisk, layout: RankLayout
) -> tuple[int, int]:
    """Return the bytes of a rank's buffers for windows: (during an update, during forward and backward passes).

    With several hosts, the exchange of on-disk sums before an update may need more buffers than the update.
    """
    # One disk stream per host, and the windows in flight from and to each other host.
    exchanging = layout.nodes * STREAM_BUFFERS + (layout.nodes - 1) * 2 * (WINDOWS_AHEAD + 1) if layout.nodes > 1 else 0
    states, splits = config.train.optimizer_states, config.train.chosen_precision == "bf16"
    summed = dict(on_disk.gradients)
    streamed = summing = reading = 0
    for weight, _ in on_disk.states:
        longest = longest_window(shares[weight], states, numel(weight[1:]))
        sums_bytes = paged(sum_itemsize(states) * longest) if weight in summed else 0
        fields = state_bytes(longest, states, numel(weight[1:]), splits)
        weights_bytes = paged(longest * (2 if splits else 4)) if on_disk.layers else 0
        streamed = max(streamed, STREAM_BUFFERS * (sums_bytes + weights_bytes + sum(map(paged, fields.values()))))
        streamed = max(streamed, exchanging * sums_bytes)
        summing = max(summing, SUMS_BUFFERS * sums_bytes)
        reading = max(reading, STREAM_BUFFERS * weights_bytes)
    for weight in on_disk.frozen:
        longest = longest_window(padded_share(weight, layout.world_size), states, numel(weight[1:]))
        reading = max(reading, STREAM_BUFFERS * paged(longest * (2 if splits else 4)))
    return streamed, summing + reading


def sum_itemsize(states: str) -> int:
    """Return the bytes of an element of a gradient sum."""
    return 4 if states == "fp32" else 2


def ring_bytes(row_numel: int, looked_up: int, itemsize: int) -> int:
    """Return the size of a rank's ring buffer, which fits two of the largest pieces: weight rows or look-ups."""
    return max(RING_BYTES, 2 * (TAG_BYTES + row_numel * itemsize), 2 * looked_up)


def looked_up_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Return the size of a piece for the gradient of an embedding look-up: the tokens' count, ids and rows."""
    return align(8) + align(8 * tokens) + align(tokens * width * itemsize)


def piece_edges(rows: int, row_numel: int, itemsize: int) -> tuple[int, ...]:
    """Return the row numbers at which a weight is cut into pieces that are small enough for the ring buffer."""
    step = max(1, _PIECE_BYTES // (row_numel * itemsize))
    return (*range(0, rows, step), rows)

"""The memory of the host engine: one copy of the weights per NUMA node, everything else sharded over all ranks.

Buffer sizes are here, too, because the planner computes with them. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aliquot.config.schema import RunConfig
from aliquot.data.workload import batch_size, micro_batch_tokens
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import OnDisk, RankMemory, streamed_layers
from aliquot.models.model_shape import LayerKind, ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import STREAM_BUFFERS, SUMS_BUFFERS, longest_window, paged, state_bytes
from aliquot.optim.sizes import SCRATCH_BYTES, low_bytes, moment_bytes

# A rank can be ahead of another by the gradients that fit into the ring, a layer or more of most models. A larger ring
# gains nothing.
RING_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
RESIDENT_LAYERS = 3  # streamed layers in memory: one computes, one is read, another rank still uses the third
EXCHANGE_BYTES = 128 << 20  # of a rank, between hosts: receives that are posted ahead, and as much on its way out
WINDOWS_AHEAD = 2  # windows of sums on disk that arrive from each host, and that leave, while one is summed
PUBLISHED_NUMEL = 4 << 20  # elements of a weight in one message between hosts
# Learning rate; bits per weight that an average step changes; the same if each weight of 0.02 moves by the rate, as in
# Adam's first step.
_CHANGED_BITS = ((1e-5, 2.2, 2.4), (2e-5, 2.4, 2.8), (1e-4, 3.7, 5.9), (5e-4, 6.2, 10.5), (3e-3, 6.2, 12.8))
TAG_BYTES = 64  # in front of each piece: its weight and its place


def host_memory(config: RunConfig, shape: ModelShape, layout: RankLayout, on_disk: OnDisk) -> RankMemory:
    """Return the memory of a rank with the state in `on_disk` on disk."""
    states, splits = config.train.optimizer_states, config.train.precision == "bf16"
    compute, sum_itemsize = 2 if splits else 4, _sum_itemsize(states)
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
        gradients += summed * sum_itemsize * shares[weight]
        # Sums for other hosts. With one micro-batch a step only those of a tied embedding, to which rows are added.
        added_to = int(weight == shape.embedding and shape.embedding_is_added_to)
        waiting += (min(summed, added_to) if passes else summed) * shares[weight]
    others = layout.nodes - 1
    tokens = micro_batch_tokens(config, layout.world_size)
    row_numel = max(numel(weight[1:]) for weight in shape.alike)
    copies = min(layout.numa_nodes, layout.ranks_per_node)
    streamed, summing = _windows_bytes(config, shares, on_disk, layout)
    owned = sum(shares[weight] * count for weight, count in shape.alike.items())
    copied = owned if passes else 0
    if shape.embedding_is_added_to and not passes:
        copied = min(shares[shape.embedding], tokens * micro_batches * layout.ranks_per_node * shape.width)
    return RankMemory(
        weights=low,
        gradients=gradients + others * waiting * sent_itemsize(config) + summing,
        gradients_from_start=True,
        own_gradients=gradients,
        moments=moments,
        update=SCRATCH_BYTES + (2 * max(shares.values()) if others and splits else 0),  # a weight before its update
        shared_weights=(shape.numel - _streamed_numel(shape, on_disk)) * compute * copies,
        buffers=layout.ranks_per_node
        * (
            ring_bytes(row_numel, looked_up_bytes(tokens, shape.width, compute), compute)
            + _between_hosts(config, owned, others, copied)
        ),
        streamed=streamed,
    )


def sent_itemsize(config: RunConfig) -> int:
    """Return the bytes of an element of a gradient that travels to another host."""
    return 2 if config.shard.reduce_dtype == "bf16" else _sum_itemsize(config.train.optimizer_states)


def published_bytes(config: RunConfig, first_step: bool = False) -> float:
    """Return the bytes per weight that travel to another host after an update.

    distributed/collectives/weight_patch.py encodes them: in bf16 two bits per weight, and a byte for each that changes
    by more than one unit in the last place. Their number depends on the learning rate (benchmarks/patches.py).
    """
    if config.train.precision == "fp32":
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
    """Return the most bytes of a rank that are received ahead from `others` hosts, or on their way out.

    `owned`: elements that the rank owns; `copied`: elements of gradients for another host that leave from a copy.
    """
    if not others:
        return 0
    sums = sum(min(EXCHANGE_BYTES, others * elements * sent_itemsize(config)) for elements in (owned, copied))
    if config.train.precision == "fp32":
        return sums  # weights travel between their final places
    weight_bytes = published_bytes(config, first_step=True)
    arriving = int(min(EXCHANGE_BYTES, others * owned * 2) / 2 * weight_bytes)  # only written pages count
    return sums + arriving + int(owned * weight_bytes) + 2 * PUBLISHED_NUMEL


@dataclass(frozen=True)
class DiskUse:
    """Bytes of all ranks: the size of the scratch files, and the traffic of a step."""

    size: int
    update: int  # read and written by updates
    update_first: int  # the part of `update` before the next forward pass can begin; the rest overlaps with it
    beside_read: int  # while forward and backward compute
    beside_written: int
    written: int  # the writes of the whole step


def disk_use(config: RunConfig, shape: ModelShape, layout: RankLayout, on_disk: OnDisk, micro_batches: int) -> DiskUse:
    """Return the use of the disks, without rounding to pages; `micro_batches`: per rank and optimizer step."""
    splits = config.train.precision == "bf16"
    all_states = sum(count * _state_bytes(config, weight) for weight, count in on_disk.states)
    # Every host has sums of the whole gradient, which travel to their owners once a step.
    summed = sum(count * numel(weight) for weight, count in on_disk.gradients)
    sums = summed * _sum_itemsize(config.train.optimizer_states)
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
        # Both passes read the layers, except for layers that are still resident when the backward pass begins.
        beside_read=(micro_batches - 1) * layout.nodes * sums + micro_batches * 2 * (learned + frozen),
        beside_written=micro_batches * layout.nodes * sums,
        written=all_states + learned + micro_batches * layout.nodes * sums + (sums if layout.nodes > 1 else 0),
    )


def _state_bytes(config: RunConfig, weight: Shape) -> int:
    states, splits = config.train.optimizer_states, config.train.precision == "bf16"
    return sum(state_bytes(numel(weight), states, numel(weight[1:]), splits).values())


def _learned(shape: ModelShape, on_disk: OnDisk) -> list[int]:
    """Return the trainable elements on disk of each streamed layer."""
    shapes = {weight for weight, _ in on_disk.states}
    return _by_layer(shape, on_disk, lambda kind: sum(numel(weight) for weight in kind.learned if weight in shapes))


def _frozen(shape: ModelShape, on_disk: OnDisk) -> list[int]:
    """Return the frozen elements on disk of each streamed layer."""
    shapes = on_disk.frozen
    return _by_layer(shape, on_disk, lambda kind: sum(numel(weight) for weight in kind.frozen if weight in shapes))


def _by_layer(shape: ModelShape, on_disk: OnDisk, count: Callable[[LayerKind], int]) -> list[int]:
    if not on_disk.layers:
        return []  # early, because a search over settings calls this a hundred thousand times
    counts = {at: elements for kind in shape.kinds for elements in [count(kind)] for at in kind.positions}
    return [counts[at] for at in streamed_layers(shape.layers, on_disk.layers)]


def _streamed_numel(shape: ModelShape, on_disk: OnDisk) -> int:
    """Return the elements of the shared copy that are never in memory together with the rest."""
    per_layer = map(sum, zip(_learned(shape, on_disk), _frozen(shape, on_disk), strict=True))
    return sum(sorted(per_layer)[:-RESIDENT_LAYERS])


def _windows_bytes(
    config: RunConfig, shares: Mapping[Shape, int], on_disk: OnDisk, layout: RankLayout
) -> tuple[int, int]:
    """Return a rank's buffers for windows: during an update, and during forward and backward passes.

    Before an update on several hosts the exchange of sums on disk may need more buffers than the update.
    """
    # A stream for each host, and for each other host arriving and leaving messages.
    exchanging = layout.nodes * STREAM_BUFFERS + (layout.nodes - 1) * 2 * (WINDOWS_AHEAD + 1) if layout.nodes > 1 else 0
    states, splits = config.train.optimizer_states, config.train.precision == "bf16"
    summed = dict(on_disk.gradients)
    streamed = summing = reading = 0
    for weight, _ in on_disk.states:
        longest = longest_window(shares[weight], states, numel(weight[1:]))
        sums_bytes = paged(_sum_itemsize(states) * longest) if weight in summed else 0
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


def _sum_itemsize(states: str) -> int:
    """Return the bytes of an element of a gradient sum."""
    return 4 if states == "fp32" else 2


def ring_bytes(row_numel: int, looked_up: int, itemsize: int) -> int:
    """Return the size of a rank's ring, which holds two of the largest pieces: a row of a weight, or a look-up."""
    return max(RING_BYTES, 2 * (TAG_BYTES + row_numel * itemsize), 2 * looked_up)


def looked_up_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Return the size of a piece with the gradient of a look-up of `tokens` tokens: their count, ids and rows."""
    return align(8) + align(8 * tokens) + align(tokens * width * itemsize)


def piece_edges(rows: int, row_numel: int, itemsize: int) -> tuple[int, ...]:
    """Return the rows at which a weight is cut into pieces that are small enough for the ring."""
    step = max(1, _PIECE_BYTES // (row_numel * itemsize))
    return (*range(0, rows, step), rows)

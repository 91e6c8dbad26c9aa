"""What the host engine holds: one copy of the weights per NUMA node, all else by rows over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aliquot.config.schema import RunConfig
from aliquot.data.batch_size import batch_size, micro_batch_tokens
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.topology import RankLayout
from aliquot.engines.rank_memory import RankMemory
from aliquot.engines.state_placement import OnDisk, streamed_layers
from aliquot.models.model_shape import LayerKind, ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import STREAM_BUFFERS, SUMS_BUFFERS, longest_window, paged, state_bytes
from aliquot.optim.sizes import SCRATCH_BYTES, low_bytes, moment_bytes

# Ranks may be apart by what the ring holds: a layer or more of most models; more gains nothing.
RING_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
RESIDENT_LAYERS = 3  # of those that lie on disk: one computes, one is read, one is another rank's still
EXCHANGE_BYTES = 128 << 20  # between hosts, of a rank: received ahead, and as much on its way out
WINDOWS_AHEAD = 2  # of sums on disk, of each other host: that come, and that go, while one is summed
PUBLISHED_NUMEL = 4 << 20  # of the piece of a weight that a message between hosts is about
# Learning rate; bits a weight of what a step changes, on average, and where each weight of 0.02 moves by the rate, as
# in the first step of Adam.
_BITS_OF_RATE = ((1e-5, 2.2, 2.4), (2e-5, 2.4, 2.8), (1e-4, 3.7, 5.9), (5e-4, 6.2, 10.5), (3e-3, 6.2, 12.8))
TAG_BYTES = 64  # before each piece: whose it is


def host_memory(config: RunConfig, shape: ModelShape, layout: RankLayout, on_disk: OnDisk) -> RankMemory:
    states, splits = config.train.optimizer_states, config.train.precision == "bf16"
    compute, kept = 2 if splits else 4, _kept(states)
    shares = {weight: padded_share(weight, layout.world_size) for weight in shape.alike}
    states_there, sums_there = dict(on_disk.states), dict(on_disk.gradients)
    low = gradients = moments = waiting = 0
    size, sources = batch_size(config.train, layout.world_size), config.data.source_count
    micro_batches = size.micro_batches(layout.world_size, sources)
    passes = micro_batches == 1
    for weight, count in shape.alike.items():
        here = count - states_there.get(weight, 0)
        low += here * (low_bytes(shares[weight]) if splits else 0)
        moments += here * 2 * moment_bytes(states, shares[weight], numel(weight[1:]))
        summed = count - sums_there.get(weight, 0)
        gradients += summed * kept * shares[weight]
        # For other hosts: with one micro-batch a step only that of an embedding to which rows are added.
        added_to = int(weight == shape.embedding and shape.embedding_is_added_to)
        waiting += (min(summed, added_to) if passes else summed) * shares[weight]
    others = layout.nodes - 1
    tokens = micro_batch_tokens(config, layout.world_size)
    row_numel = max(numel(weight[1:]) for weight in shape.alike)
    copies = min(layout.numa_nodes, layout.ranks_per_node)
    streamed, summing = _windows_bytes(config, shares, on_disk, layout)
    own = sum(shares[weight] * count for weight, count in shape.alike.items())
    copied = own if passes else 0
    if shape.embedding_is_added_to and not passes:
        copied = min(shares[shape.embedding], tokens * micro_batches * layout.ranks_per_node * shape.width)
    return RankMemory(
        weights=low,
        gradients=gradients + others * waiting * sent_itemsize(config) + summing,
        gradients_from_start=True,
        own_gradients=gradients,
        moments=moments,
        update=SCRATCH_BYTES + (2 * max(shares.values()) if others and splits else 0),  # what a weight was before
        forward=0,
        backward=0,
        evaluation=0,
        shared_weights=(shape.numel - _elsewhere(shape, on_disk)) * compute * copies,
        buffers=layout.ranks_per_node
        * (
            ring_bytes(row_numel, looked_up_bytes(tokens, shape.width, compute), compute)
            + _between_hosts(config, own, others, copied)
        ),
        streamed=streamed,
    )


def sent_itemsize(config: RunConfig) -> int:
    """Of a gradient that travels to another host."""
    return 2 if config.shard.reduce_dtype == "bf16" else _kept(config.train.optimizer_states)


def published_bytes(config: RunConfig, first_step: bool = False) -> float:
    """Of a weight that travels to another host after an update (distributed/collectives/weight_patch.py).

    In bf16 two bits and a byte for each that changes by more than a unit in the last place: how many do depends on the
    rate, here as benchmarks/patches.py measures it.
    """
    if config.train.precision == "fp32":
        return 4.0
    rates, later, first = zip(*_BITS_OF_RATE, strict=True)
    bits = first if first_step else later
    rate = min(max(config.train.learning_rate, rates[0]), rates[-1])
    above = next(at for at, each in enumerate(rates) if each >= rate)
    if above == 0:
        return float(bits[0]) / 8
    part = math.log(rate / rates[above - 1]) / math.log(rates[above] / rates[above - 1])
    return float(bits[above - 1] + part * (bits[above] - bits[above - 1])) / 8


def _between_hosts(config: RunConfig, own: int, others: int, copied: int) -> int:
    """Of a rank that owns so many parameters: what is received ahead and what is on its way out, at most. `copied`: of
    another host's gradients, what leaves from memory of its own, not from where sums are kept."""
    if not others:
        return 0
    sums = sum(min(EXCHANGE_BYTES, others * each * sent_itemsize(config)) for each in (own, copied))
    if config.train.precision == "fp32":
        return sums  # weights leave from where they lie, and come there
    bytes_each = published_bytes(config, first_step=True)
    arriving = int(min(EXCHANGE_BYTES, others * own * 2) / 2 * bytes_each)  # pages that are not written take no memory
    return sums + arriving + int(own * bytes_each) + 2 * PUBLISHED_NUMEL


@dataclass(frozen=True)
class DiskUse:
    """Of all ranks, bytes: what lies on disks, and what a step moves."""

    size: int
    update: int  # read and written by updates
    update_first: int  # of that, before the next forward pass can begin; the rest while it computes
    beside_read: int  # while forward and backward compute
    beside_written: int
    written: int  # of all that is moved


def disk_use(config: RunConfig, shape: ModelShape, layout: RankLayout, on_disk: OnDisk, micro_batches: int) -> DiskUse:
    """`micro_batches`: of a rank and optimizer step. What rounding to pages adds is left out."""
    splits = config.train.precision == "bf16"
    of_states = sum(count * _state_bytes(config, weight) for weight, count in on_disk.states)
    # Every host has sums of the whole gradient. They travel once, and are the owner's then.
    sums = _kept(config.train.optimizer_states) * sum(count * numel(weight) for weight, count in on_disk.gradients)
    exchanged = (layout.nodes - 1) * sums
    looked_up = shape.embedding if shape.embedding_learns and dict(on_disk.states).get(shape.embedding) else None
    first = 0 if looked_up is None else 2 * _state_bytes(config, looked_up)
    learned, frozen = ((2 if splits else 4) * sum(of) for of in (_learned(shape, on_disk), _frozen(shape, on_disk)))
    update = 2 * (of_states + learned) + sums + 2 * exchanged
    return DiskUse(
        size=of_states + learned + frozen + layout.nodes * sums,
        update=update,
        update_first=update if layout.nodes > 1 else first + (update - first) // shape.layers,
        # Layers come in the forward and in the backward pass, but for those that are still there when it turns.
        beside_read=(micro_batches - 1) * layout.nodes * sums + micro_batches * 2 * (learned + frozen),
        beside_written=micro_batches * layout.nodes * sums,
        written=of_states + learned + micro_batches * layout.nodes * sums + (sums if layout.nodes > 1 else 0),
    )


def _state_bytes(config: RunConfig, weight: Shape) -> int:
    states, splits = config.train.optimizer_states, config.train.precision == "bf16"
    return sum(state_bytes(numel(weight), states, numel(weight[1:]), splits).values())


def _learned(shape: ModelShape, on_disk: OnDisk) -> list[int]:
    """Elements of each streamed layer that lie on disk and learn."""
    there = {weight for weight, _ in on_disk.states}
    return _of_streamed(shape, on_disk, lambda kind: sum(numel(each) for each in kind.learned if each in there))


def _frozen(shape: ModelShape, on_disk: OnDisk) -> list[int]:
    """Elements of each streamed layer that lie on disk and learn nothing."""
    return _of_streamed(shape, on_disk, lambda kind: sum(numel(each) for each in kind.frozen if each in on_disk.frozen))


def _of_streamed(shape: ModelShape, on_disk: OnDisk, of_kind: Callable[[LayerKind], int]) -> list[int]:
    if not on_disk.layers:
        return []  # a search over settings asks a hundred thousand times
    of_layer = {at: count for kind in shape.kinds for count in [of_kind(kind)] for at in kind.positions}
    return [of_layer[at] for at in streamed_layers(shape.layers, on_disk.layers)]


def _elsewhere(shape: ModelShape, on_disk: OnDisk) -> int:
    """Elements of the shared copy that are not in memory while others are."""
    of_layers = map(sum, zip(_learned(shape, on_disk), _frozen(shape, on_disk), strict=True))
    return sum(sorted(of_layers)[:-RESIDENT_LAYERS])


def _windows_bytes(
    config: RunConfig, shares: Mapping[Shape, int], on_disk: OnDisk, layout: RankLayout
) -> tuple[int, int]:
    """Of a rank, buffers for windows: in an update or, with more on several hosts, in the exchange of sums before it;
    beside forward and backward, for sums and for layers."""
    # A stream for each host; of each other one, messages that come and that go.
    exchanging = layout.nodes * STREAM_BUFFERS + (layout.nodes - 1) * 2 * (WINDOWS_AHEAD + 1) if layout.nodes > 1 else 0
    states, splits = config.train.optimizer_states, config.train.precision == "bf16"
    summed = dict(on_disk.gradients)
    streamed = summing = reading = 0
    for weight, _ in on_disk.states:
        longest = longest_window(shares[weight], states, numel(weight[1:]))
        sums_bytes = paged(_kept(states) * longest) if weight in summed else 0
        fields = state_bytes(longest, states, numel(weight[1:]), splits)
        own = paged(longest * (2 if splits else 4)) if on_disk.layers else 0
        streamed = max(streamed, STREAM_BUFFERS * (sums_bytes + own + sum(map(paged, fields.values()))))
        streamed = max(streamed, exchanging * sums_bytes)
        summing = max(summing, SUMS_BUFFERS * sums_bytes)
        reading = max(reading, STREAM_BUFFERS * own)
    for weight in on_disk.frozen:
        longest = longest_window(padded_share(weight, layout.world_size), states, numel(weight[1:]))
        reading = max(reading, STREAM_BUFFERS * paged(longest * (2 if splits else 4)))
    return streamed, summing + reading


def _kept(states: str) -> int:
    """Bytes of an element of a gradient sum."""
    return 4 if states == "fp32" else 2


def ring_bytes(row_numel: int, looked_up: int, itemsize: int) -> int:
    """Of a rank's ring: two of its largest pieces fit, be it one row of a weight or the rows of a look-up."""
    return max(RING_BYTES, 2 * (TAG_BYTES + row_numel * itemsize), 2 * looked_up)


def looked_up_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Of the piece in which the gradient of a look-up of so many tokens travels: their count, their ids, their rows."""
    return align(8) + align(8 * tokens) + align(tokens * width * itemsize)


def piece_edges(rows: int, row_numel: int, itemsize: int) -> tuple[int, ...]:
    """Where a weight is cut into pieces of whole rows, each small enough for the ring."""
    step = max(1, _PIECE_BYTES // (row_numel * itemsize))
    return (*range(0, rows, step), rows)

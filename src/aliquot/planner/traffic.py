"""Bytes that a run moves: between hosts, through sockets of one host, through shared memory, from and to disks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from aliquot.config.schema import RunConfig
from aliquot.data.batch_size import micro_batch_tokens
from aliquot.distributed.collectives.buffer_sizes import PATCH_BLOCK, PATCH_CODE_BYTES
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_memory import KEPT_NUMEL, persistent_numel
from aliquot.engines.host.host_memory import published_bytes, sent_itemsize
from aliquot.engines.state_placement import SHARDED, Unsharded
from aliquot.models.model_shape import ModelShape, numel

_ONE_BY_ONE, _INTERVALS = 1000, 64


@dataclass(frozen=True)
class Traffic:
    """Of all ranks together. `wire` and `local` are payload; headers add less than 1 %."""

    wire_bytes: int  # per optimizer step, sent between hosts
    wire_weights_bytes: int  # of these, what owners send of weights that they have updated, where that is one phase
    local_bytes: int  # per optimizer step, sent among ranks of a host through sockets
    shared_bytes: int  # per optimizer step, staged in shared memory
    disk_read_bytes: int  # at start
    export_bytes: int
    forward: tuple[int, int] = (0, 0)  # of an evaluated micro-batch: between hosts, local
    forward_gathered: int = 0  # then: of weights whole on each rank
    forward_once: bool = False  # weights stay gathered from the first on
    gathered_bytes: int = 0  # per optimizer step, of weights whole on each rank of engines fsdp and deepspeed
    reduced_bytes: int = 0  # the same of gradients


def traffic(
    config: RunConfig,
    engine: str,
    shape: ModelShape,
    layout: RankLayout,
    micro_batches: int,
    kept: Unsharded = SHARDED,
) -> Traffic:
    """`micro_batches`: of a rank and optimizer step; `kept`: by engine fsdp."""
    compute = 2 if config.train.precision == "bf16" else 4
    added = 0 if config.adapter is None else shape.learned_numel  # beside the model that is read
    read = (shape.numel - added) * shape.dtype_bytes if config.model.path is not None else 0
    export = (added or shape.numel) * _exported_itemsize(config, shape) if config.checkpoint.export else 0
    wire = weights = local = shared = gathers = reduced = gathered = 0
    forward = (0, 0)
    if engine == "host":
        # Every host sends each other one that one's gradient sums, and gets its weights back.
        weights = int((layout.nodes - 1) * _published(config, shape, layout, micro_batches))
        wire = weights + (layout.nodes - 1) * _reduced(config, shape, layout, micro_batches) * sent_itemsize(config)
        shared = micro_batches * layout.world_size * _staged(config, shape, layout, compute)
    elif engine == "fsdp":
        gathers, reduced = _collected(shape, layout, micro_batches, compute, kept)
        wire, local, shared = _fsdp(config, layout, gathers, reduced) if layout.world_size > 1 else (0, 0, 0)
        gathered = compute * sum(shape.padded_groups(layout.world_size))
        forward = (0, 0) if shared else _ring(layout, gathered)
    elif engine == "deepspeed":
        # What is wanted again soon stays gathered (deepspeed_memory.py), small weights until they are updated;
        # gradients are reduced in the compute dtype.
        small = persistent_numel(config, shape, layout)
        twice = shape.numel - min(shape.numel, KEPT_NUMEL)
        gathers = compute * (micro_batches * max(0, shape.numel + twice - small) + small)
        reduced = micro_batches * compute * shape.numel
        wire, local = _ring(layout, gathers + reduced * (2 if layout.device == "cpu" else 1))
        gathered = compute * max(0, shape.numel - small)
        forward = _ring(layout, gathered)
    once = engine == "fsdp" and kept.weights
    return Traffic(wire, weights, local, shared, read, export, forward, gathered, once, gathers, reduced)


def _exported_itemsize(config: RunConfig, shape: ModelShape) -> int:
    """By `model.dtype`; auto: an adapter's is fp32, a model's what its files have, or what it is trained in."""
    if config.model.dtype != "auto":
        return 4 if config.model.dtype == "float32" else 2
    if config.adapter is not None:
        return 4
    if config.model.path is not None:
        return shape.dtype_bytes
    return 4 if config.train.precision == "fp32" else 2


def _staged(config: RunConfig, shape: ModelShape, layout: RankLayout, compute: int) -> int:
    """A rank's gradients of one micro-batch; of the input embedding a row a token (engines/host/host_gradients.py)."""
    if not shape.embedding_learns:
        return shape.learned_numel * compute
    rows = micro_batch_tokens(config, layout.world_size) * (8 + shape.width * compute)
    tied = shape.head is None
    dense = shape.learned_numel - (0 if tied else numel(shape.embedding))
    return dense * compute + rows


def _reduced(config: RunConfig, shape: ModelShape, layout: RankLayout, micro_batches: int) -> int:
    """Elements of a host's gradient sums that go to owners (engines/host/sparse_rows_codec.py).

    An embedding that is not the output head sends the rows of its distinct tokens, whose number follows from Zipf's
    law. A tied embedding sends all rows, and the rows of the last micro-batch once more."""
    if not shape.embedding_learns:
        return shape.learned_numel
    vocabulary, width = shape.embedding
    tokens = micro_batch_tokens(config, layout.world_size) * layout.ranks_per_node
    if shape.head is None:
        return shape.learned_numel + _different(vocabulary, tokens) * width
    rows = _different(vocabulary, tokens * micro_batches)
    return shape.learned_numel - vocabulary * width + (rows if rows < 0.9 * vocabulary else vocabulary) * width


def _published(config: RunConfig, shape: ModelShape, layout: RankLayout, micro_batches: int) -> float:
    """Bytes that tell another host what an update has made of all weights.

    Of an embedding that only looks up, rows move while their first moment does, some 1 / (1 - beta1) steps; a block in
    which none moves says nothing, and no other row has a difference that follows in a byte. Decay moves a few weights
    everywhere. (distributed/collectives/weight_patch.py)
    """
    each = published_bytes(config)
    if config.train.precision == "fp32" or shape.head is None or not shape.embedding_learns:
        return shape.learned_numel * each
    vocabulary, width = shape.embedding
    moved = micro_batch_tokens(config, layout.world_size) * micro_batches * layout.world_size
    moving = _different(vocabulary, int(moved / (1 - config.train.adam_beta1)))
    blocks = vocabulary * width / PATCH_BLOCK
    told = blocks if config.train.weight_decay else -blocks * math.expm1(-moving / blocks)
    of_embedding = min(told * PATCH_BLOCK, vocabulary * width) * PATCH_CODE_BYTES
    of_embedding += moving * width * (each - PATCH_CODE_BYTES)
    return (shape.learned_numel - vocabulary * width) * each + of_embedding


@cache
def _different(vocabulary: int, drawn: int) -> int:
    """Sum over all ranks r of 1 - exp(-drawn / (r x H)), H the sum of 1 / r: one by one as far as they differ much, the
    rest as an integral over log r (Simpson's rule), which is off by less than a thousandth of a row."""
    one_by_one = min(vocabulary, _ONE_BY_ONE)

    def over_all(of_rank: Callable[[float], float]) -> float:
        first = math.fsum(map(of_rank, range(1, one_by_one + 1)))
        low, high = math.log(one_by_one + 0.5), math.log(vocabulary + 0.5)
        width = (high - low) / _INTERVALS
        points = (math.exp(low + width * at) for at in range(_INTERVALS + 1))
        weights = (1 if at in (0, _INTERVALS) else 4 if at % 2 else 2 for at in range(_INTERVALS + 1))
        return first + width / 3 * math.fsum(w * r * of_rank(r) for w, r in zip(weights, points, strict=True))

    harmonic = over_all(lambda rank: 1 / rank)
    return int(over_all(lambda rank: -math.expm1(-drawn / (rank * harmonic))))


def _collected(
    shape: ModelShape, layout: RankLayout, micro_batches: int, compute: int, kept: Unsharded
) -> tuple[int, int]:
    """Bytes of weights that are gathered in the forward and the backward pass, the root's once, and of gradients that
    are reduced in fp32. What is `kept` is once a step."""
    root, *others = shape.padded_groups(layout.world_size)
    gathers = compute * (root + sum(others) if kept.weights else micro_batches * (root + 2 * sum(others)))
    learned = sum(shape.learned_padded_groups(layout.world_size))
    return gathers, (1 if kept.gradients else micro_batches) * 4 * learned


def _fsdp(config: RunConfig, layout: RankLayout, gathers: int, reduced: int) -> tuple[int, int, int]:
    """Over gloo and nccl a collective is a ring: each rank sends (N - 1) / N of it, and of N edges as many as there are
    hosts lead to another one. gloo's reduce-scatter is an all-reduce, twice the bytes; nccl's is not."""
    on_one_host = layout.device == "cpu" and layout.nodes == 1 and config.shard.collectives != "gloo"
    if on_one_host:
        # engines/fsdp/fsdp_collectives.py: each rank stages its shard, and all of its gradients.
        return 0, 0, gathers + layout.world_size * reduced
    return *_ring(layout, gathers + reduced * (2 if layout.device == "cpu" else 1)), 0


def _ring(layout: RankLayout, size_bytes: int) -> tuple[int, int]:
    """(between hosts, among ranks of a host) that collectives over `size_bytes` send, all ranks together."""
    sent = (layout.world_size - 1) * size_bytes
    wire = sent * layout.nodes // layout.world_size if layout.nodes > 1 else 0
    return wire, sent - wire

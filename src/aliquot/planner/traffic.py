"""Bytes that a run moves: between hosts, through sockets of one host, through shared memory, and from disks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from aliquot.config.schema import RunConfig
from aliquot.data.workload import micro_batch_tokens
from aliquot.distributed.collectives.buffer_sizes import PATCH_BLOCK, PATCH_CODE_BYTES
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed import deepspeed_memory
from aliquot.engines.deepspeed.deepspeed_memory import REUSED_NUMEL, persistent_numel
from aliquot.engines.engine_plan import SHARDED, Unsharded
from aliquot.engines.fsdp.fsdp_memory import gathered_bytes, replicas, sent_gradient_bytes, shares_memory
from aliquot.engines.host.host_memory import published_bytes, sent_itemsize
from aliquot.models.model_shape import ModelShape, numel


@dataclass(frozen=True)
class Traffic:
    """Bytes that all ranks together move. `wire` and `local` are payload; headers add less than 1 %."""

    wire_bytes: int  # per optimizer step, sent between hosts
    wire_weights_bytes: int  # the part of `wire_bytes` that is updated weights (engine host)
    local_bytes: int  # per optimizer step, sent through sockets among ranks of the same host
    shared_bytes: int  # per optimizer step, staged in shared memory
    forward: tuple[int, int] = (0, 0)  # per micro-batch of an evaluation: (between hosts, within hosts)
    forward_gathered: int = 0  # per micro-batch of an evaluation: weights to all-gather on each rank
    forward_once: bool = False  # weights stay gathered after the first micro-batch
    gathered_bytes: int = 0  # per optimizer step, weights that each rank of engine fsdp or deepspeed all-gathers
    reduced_bytes: int = 0  # per optimizer step, gradients that engine fsdp or deepspeed reduces
    once: tuple[int, int] = (0, 0)  # the parts of `wire_bytes` in only (the first forward, the last backward) pass


def traffic(
    config: RunConfig,
    engine: str,
    shape: ModelShape,
    layout: RankLayout,
    micro_batches: int,
    unsharded: Unsharded = SHARDED,
) -> Traffic:
    """Return the traffic of a run with `micro_batches` for each rank and optimizer step.

    Args:
        unsharded: whether engine fsdp keeps weights or gradients unsharded within a step.
    """
    itemsize = config.train.compute_itemsize
    wire = weights = local = shared = gathers = reduced = gathered = 0
    forward = once = (0, 0)
    if engine == "host":
        # A host sends every other host gradient sums for the weights of the receiver, and its own updated weights.
        weights = int((layout.nodes - 1) * _published_bytes(config, shape, layout, micro_batches))
        sums = _reduced_numel(config, shape, layout, micro_batches) * sent_itemsize(config)
        wire = weights + (layout.nodes - 1) * sums
        shared = micro_batches * layout.world_size * _staged_bytes(config, shape, layout, itemsize)
    elif engine == "fsdp":
        copies = replicas(config, layout)
        replica = replace(layout, nodes=layout.nodes // copies)  # the ranks that divide the weights
        groups = gathered_bytes(config, shape, replica.world_size)
        gathered = sum(groups)
        # Each micro-batch gathers the layers twice, for the forward and the backward pass, and the root group once.
        # Unsharded weights are gathered once a step, and unsharded gradients are reduced once a step.
        gathers = gathered if unsharded.weights else micro_batches * (2 * gathered - groups[0])
        learned = sum(shape.padded_groups(replica.world_size, learned=True))
        reduced = (1 if unsharded.gradients else micro_batches) * 4 * learned
        if shares_memory(config, layout):
            # Each rank writes its shard and all of its gradients to shared memory (engines/fsdp/fsdp_collectives.py).
            shared = copies * (gathers + replica.world_size * reduced) if replica.world_size > 1 else 0
        else:
            reduced = reduced // 4 * sent_gradient_bytes(config, layout)
            wire, local = _ring(replica, gathers + _reduce_passes(layout) * reduced, copies)
            forward = _ring(replica, gathered, copies)
            once = (
                _ring(replica, gathers, copies)[0] if unsharded.weights else 0,
                _ring(replica, _reduce_passes(layout) * reduced, copies)[0] if unsharded.gradients else 0,
            )
        # Replicas all-reduce the gradients that a rank owns, once per step and in fp32: an all-reduce sends twice what
        # an all-gather sends.
        sums = 2 * (copies - 1) * 4 * learned
        wire, once = wire + sums, (once[0], once[1] + sums)
    elif engine == "deepspeed":
        # Weights that are needed again soon stay gathered (deepspeed_memory.py). Small weights stay gathered until
        # their update.
        small = persistent_numel(config, shape, layout)
        twice = shape.numel - min(shape.numel, REUSED_NUMEL)
        gathers = itemsize * (micro_batches * max(0, shape.numel + twice - small) + small)
        reduced = micro_batches * deepspeed_memory.sent_gradient_bytes(config, shape, layout) * shape.numel
        wire, local = _ring(layout, gathers + _reduce_passes(layout) * reduced)
        gathered = itemsize * max(0, shape.numel - small)
        forward = _ring(layout, gathered)
    forward_once = engine == "fsdp" and unsharded.weights
    return Traffic(wire, weights, local, shared, forward, gathered, forward_once, gathers, reduced, once)


def _staged_bytes(config: RunConfig, shape: ModelShape, layout: RankLayout, itemsize: int) -> int:
    """Return the bytes of gradients that a rank of engine host stages per micro-batch.

    The gradient of the embedding has a row for each token (engines/host/host_gradients.py).
    """
    if not shape.embedding_learns:
        return shape.learned_numel * itemsize
    rows = micro_batch_tokens(config, layout.world_size) * (8 + shape.width * itemsize)
    dense = shape.learned_numel - (0 if shape.head is None else numel(shape.embedding))
    return dense * itemsize + rows


def _reduced_numel(config: RunConfig, shape: ModelShape, layout: RankLayout, micro_batches: int) -> int:
    """Return the elements of gradient sums that a host sends to owners of weights (engines/host/sparse_rows_codec.py).

    Of an untied embedding, a host sends the rows of distinct tokens, whose number follows from Zipf's law. Of a tied
    embedding, a host sends all rows, and the rows of the last micro-batch a second time.
    """
    if not shape.embedding_learns:
        return shape.learned_numel
    vocabulary, width = shape.embedding
    tokens = micro_batch_tokens(config, layout.world_size) * layout.ranks_per_node
    if shape.head is None:
        return shape.learned_numel + _distinct_tokens(vocabulary, tokens) * width
    rows = _distinct_tokens(vocabulary, tokens * micro_batches)
    return shape.learned_numel - vocabulary * width + (rows if rows < 0.9 * vocabulary else vocabulary) * width


def _published_bytes(config: RunConfig, shape: ModelShape, layout: RankLayout, micro_batches: int) -> float:
    """Return the bytes of patches that send all updated weights to one host (distributed/collectives/weight_patch.py).

    After a token occurs, its row in an untied embedding changes for about 1 / (1 - beta1) steps, like the first moment
    of the row. A block without changed rows costs nothing. With weight decay all blocks cost bytes, because a few
    weights change in each block.
    """
    per_weight = published_bytes(config)
    if config.train.chosen_precision == "fp32" or shape.head is None or not shape.embedding_learns:
        return shape.learned_numel * per_weight
    vocabulary, width = shape.embedding
    tokens = micro_batch_tokens(config, layout.world_size) * micro_batches * layout.world_size
    changing = _distinct_tokens(vocabulary, int(tokens / (1 - config.train.adam_beta1)))
    blocks = vocabulary * width / PATCH_BLOCK
    sent = blocks if config.train.weight_decay else -blocks * math.expm1(-changing / blocks)
    embedding = min(sent * PATCH_BLOCK, vocabulary * width) * PATCH_CODE_BYTES
    embedding += changing * width * (per_weight - PATCH_CODE_BYTES)
    return (shape.learned_numel - vocabulary * width) * per_weight + embedding


@cache
def _distinct_tokens(vocabulary: int, drawn: int) -> int:
    """Return the expected distinct tokens among `drawn` tokens by Zipf's law: the k-th token has frequency ~ 1 / k."""
    import numpy as np

    frequencies = 1 / np.arange(1, vocabulary + 1)
    return int(-np.expm1(-drawn * frequencies / frequencies.sum()).sum())


def _reduce_passes(layout: RankLayout) -> int:
    """Return how often a reduce-scatter sends its bytes: twice on CPU, because gloo implements it as an all-reduce."""
    return 2 if layout.device == "cpu" else 1


def _ring(layout: RankLayout, size_bytes: int, rings: int = 1) -> tuple[int, int]:
    """Return the bytes (between hosts, within hosts) that all ranks send in ring collectives over `size_bytes`.

    Each rank sends (N - 1) / N of the bytes. Of the N edges of the ring, one for each host leads to another host.
    `layout` is that of one of `rings` equal rings.
    """
    sent = (layout.world_size - 1) * size_bytes
    wire = sent * layout.nodes // layout.world_size if layout.nodes > 1 else 0
    return rings * wire, rings * (sent - wire)

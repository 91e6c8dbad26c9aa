"""Memory of engine deepspeed: what ZeRO-3 of DeepSpeed 0.19.8 allocates, by its source.

The five phases in which it tells its memory while it builds (see_memory_usage) are those of the ledger. With `own`
elements of a rank, ceil(numel / ranks) of each weight:

after load               the partitions that zero.Init made, 2 bytes an element of `own` (partition_parameters.py).
after bf16 partitions    stage3.py, _create_fp16_partitions_with_defragmentation: all of them copied into one flat
                         buffer, and freed one by one. The large ones go back to the system; what comes from the heap
                         stays with the allocator: partitions below 16 MiB, on Llama-3-8B with 4 ranks those of the
                         attention products, 640 MiB: + 0.63 GiB.
after fp32 master        _create_fp32_partitions: a clone in fp32, 4 bytes: + 7.48 GiB.
after optimizer state    initialize_optimizer_states: no moments, which Adam makes in its first step, but with
                         offload_optimizer an fp32 gradient of every sub-group, 4 bytes: + 7.48 GiB. Without it one
                         buffer of the largest sub-group, which is dropped again.
after ZeRO init          _setup_for_real_optimizer: grad_partitions_flat_buffer in bf16, 2 bytes, + 3.74 GiB, and what
                         the first collectives leave: create_reduce_and_remove_grad_hooks gathers every weight once.
                         + 0.33 GiB is one layer's three MLP weights whole (336 MiB); + 4.07 GiB together.
"""

from __future__ import annotations

from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings
from aliquot.engines.rank_memory import RankMemory
from aliquot.models.model_shape import ModelShape, Shape, numel

_HEAP_BYTES = 16 << 20  # partitions below come from the allocator's heap and stay there when they are freed
# stage3_max_reuse_distance: a weight stays whole if it is wanted again within so many elements, and on the way up from
# the loss that is twice what lies above it. stage3_max_live_parameters.
_MAX_REUSE, _MAX_LIVE = 10**9, 10**9
KEPT_NUMEL = _MAX_REUSE // 2
_PERSISTENT_NUMEL = 100_000  # stage3_param_persistence_threshold where the JSON is silent


def persistent_numel(config: RunConfig, shape: ModelShape, layout: RankLayout) -> int:
    """Elements of the weights that stay gathered until an update changes them (parameter_offload.py)."""
    threshold = _settings(config, shape, layout).get("stage3_param_persistence_threshold", _PERSISTENT_NUMEL)
    return sum(numel(weight) for weight in shape.weights if numel(weight) <= threshold)


def deepspeed_memory(config: RunConfig, shape: ModelShape, layout: RankLayout) -> RankMemory:
    """What a rank holds while it trains."""
    zero = _settings(config, shape, layout)
    compute = 2 if config.train.precision == "bf16" else 4
    weights = shape.weights
    own = sum(_partition(weight, layout.world_size) for weight in weights)
    largest = max(numel(weight) for weight in weights)
    offloaded = _offloads(zero, "offload_optimizer")
    group = min(own, int(zero.get("sub_group_size", 10**9)) // layout.world_size + largest // layout.world_size)
    reuse = int(zero.get("stage3_max_reuse_distance", _MAX_REUSE))
    live = min(shape.numel, reuse // 2, int(zero.get("stage3_max_live_parameters", _MAX_LIVE)))
    prefetched = min(int(zero.get("stage3_prefetch_bucket_size", 5 * 10**7)), shape.numel)
    gathered = compute * (max(live, largest) + prefetched)
    # Of the bucket only what gradients fill is ever touched. Its content exists again as the input of the
    # reduce-scatter (reduce_scatter_coalesced), and on CPU once more: gloo's is an all-reduce of a clone of it.
    bucket = min(max(int(zero.get("reduce_bucket_size", 5 * 10**8)), largest), shape.numel)
    copies = 3 if layout.device == "cpu" else 2
    return RankMemory(
        weights=(compute + 4) * own if compute == 2 or offloaded else 4 * own,
        gradients=(compute + (4 if offloaded else 0)) * own,
        gradients_from_start=True,
        moments=8 * own,
        # The sub-group's gradients flat and in fp32, and the square root of its second moments.
        update=(compute + 4 + 4) * group,
        forward=gathered,
        backward=gathered + copies * compute * bucket,
        evaluation=gathered,
        shared_weights=0,
        buffers=0,
        # On CPU the copies of the bucket, each step made anew, do not find their places again: heap that lay free grew
        # by two of them in twenty steps.
        holes=2 * compute * bucket if layout.device == "cpu" else 0,
    )


def building(config: RunConfig, shape: ModelShape, layout: RankLayout) -> list[tuple[str, dict[str, int]]]:
    """Private bytes in each phase of the ledger in which DeepSpeed builds its optimizer, beside the process itself."""
    zero = _settings(config, shape, layout)
    weights = shape.weights
    compute = 2 if config.train.precision == "bf16" else 4
    parts = [_partition(weight, layout.world_size) for weight in weights]
    own = sum(parts)
    left = sum(compute * part for part in parts if compute * part < _HEAP_BYTES)
    offloaded = _offloads(zero, "offload_optimizer")
    layer = [numel(weight) for kind in shape.kinds[:1] for weight in kind.weights]
    widest = sorted(layer)[-3:]
    held: dict[str, int] = {"weights": compute * own}
    told = [("after load", dict(held))]
    held["allocator"] = left
    told.append(("after bf16 partitions", dict(held)))
    held["weights"] += 4 * own if compute == 2 or offloaded else 0
    told.append(("after fp32 master", dict(held)))
    held["gradients"] = 4 * own if offloaded else 0
    told.append(("after optimizer state", dict(held)))
    held["gradients"] += compute * own
    held["gathered"] = compute * sum(widest)
    told.append(("after ZeRO init", dict(held)))
    return told


def _settings(config: RunConfig, shape: ModelShape, layout: RankLayout) -> dict[str, Any]:
    settings, _ = deepspeed_settings(config, layout.world_size, shape.width)
    zero: dict[str, Any] = settings["zero_optimization"]
    return zero


def _offloads(zero: dict[str, Any], section: str) -> bool:
    return bool(zero.get(section, {}).get("device", "none") == "cpu")


def _partition(weight: Shape, ranks: int) -> int:
    return -(-numel(weight) // ranks)

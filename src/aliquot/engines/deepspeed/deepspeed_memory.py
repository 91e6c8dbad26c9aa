"""The memory of engine deepspeed: the allocations of DeepSpeed 0.19.8 ZeRO-3, read from its source code.

DeepSpeed reports its memory in five phases while it builds (see_memory_usage); the memory ledger has the same phases. A
rank owns ceil(numel / ranks) elements of each weight, its partitions:

after load               the partitions that zero.Init made, 2 bytes per owned element (partition_parameters.py).
after bf16 partitions    stage3.py, _create_fp16_partitions_with_defragmentation: all partitions copied into one flat
                         buffer, and freed one by one. Large ones return to the system. Those below 16 MiB come from the
                         heap and stay with the allocator.
after fp32 master        _create_fp32_partitions: a clone in fp32, 4 bytes.
after optimizer state    initialize_optimizer_states: no moments, which Adam makes in its first step. With
                         offload_optimizer an fp32 gradient of every sub-group, 4 bytes.
after ZeRO init          _setup_for_real_optimizer: grad_partitions_flat_buffer in bf16, 2 bytes. Then
                         create_reduce_and_remove_grad_hooks gathers every weight once, and one layer's three MLP
                         weights stay whole.
"""

from __future__ import annotations

from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings
from aliquot.engines.engine_plan import RankMemory
from aliquot.models.model_shape import ModelShape, Shape, numel

_HEAP_BYTES = 16 << 20  # smaller partitions come from the allocator's heap and stay there after they are freed
# stage3_max_reuse_distance: a weight stays whole if it is used again within so many elements. In the backward pass the
# distance is twice the size of the layers above the weight. The second is stage3_max_live_parameters.
_MAX_REUSE, _MAX_LIVE = 10**9, 10**9
REUSED_NUMEL = _MAX_REUSE // 2
_PERSISTENT_NUMEL = 100_000  # stage3_param_persistence_threshold, if the JSON does not set it


def persistent_numel(config: RunConfig, shape: ModelShape, layout: RankLayout) -> int:
    """Return the elements of the weights that stay gathered until an update (parameter_offload.py)."""
    threshold = _settings(config, shape, layout).get("stage3_param_persistence_threshold", _PERSISTENT_NUMEL)
    return sum(numel(weight) for weight in shape.weights if numel(weight) <= threshold)


def deepspeed_memory(config: RunConfig, shape: ModelShape, layout: RankLayout) -> RankMemory:
    """Return the memory of a rank in training."""
    zero = _settings(config, shape, layout)
    compute = 2 if config.train.precision == "bf16" else 4
    weights = shape.weights
    owned = sum(_partition(weight, layout.world_size) for weight in weights)
    largest = max(numel(weight) for weight in weights)
    offloaded = _offloads(zero, "offload_optimizer")
    group = min(owned, int(zero.get("sub_group_size", 10**9)) // layout.world_size + largest // layout.world_size)
    reuse = int(zero.get("stage3_max_reuse_distance", _MAX_REUSE))
    live = min(shape.numel, reuse // 2, int(zero.get("stage3_max_live_parameters", _MAX_LIVE)))
    prefetched = min(int(zero.get("stage3_prefetch_bucket_size", 5 * 10**7)), shape.numel)
    gathered = compute * (max(live, largest) + prefetched)
    # Only the part of the bucket that gradients fill takes memory. The input of the reduce-scatter is a copy of it
    # (reduce_scatter_coalesced). On CPU there is a third, because gloo's reduce-scatter is an all-reduce of a clone.
    bucket = min(max(int(zero.get("reduce_bucket_size", 5 * 10**8)), largest), shape.numel)
    copies = 3 if layout.device == "cpu" else 2
    return RankMemory(
        weights=(compute + 4) * owned if compute == 2 or offloaded else 4 * owned,
        gradients=(compute + (4 if offloaded else 0)) * owned,
        gradients_from_start=True,
        moments=8 * owned,
        # The sub-group's gradients flat and in fp32, and the square root of its second moments.
        update=(compute + 4 + 4) * group,
        forward=gathered,
        backward=gathered + copies * compute * bucket,
        evaluation=gathered,
        # On CPU the copies of the bucket are allocated anew in each step and fragment the heap: unused heap grew by two
        # copies in twenty steps.
        holes=2 * compute * bucket if layout.device == "cpu" else 0,
    )


def build_phases(config: RunConfig, shape: ModelShape, layout: RankLayout) -> list[tuple[str, dict[str, int]]]:
    """Return the private bytes by phase while DeepSpeed builds its optimizer, in addition to the process itself."""
    zero = _settings(config, shape, layout)
    weights = shape.weights
    compute = 2 if config.train.precision == "bf16" else 4
    parts = [_partition(weight, layout.world_size) for weight in weights]
    owned = sum(parts)
    left = sum(compute * part for part in parts if compute * part < _HEAP_BYTES)
    offloaded = _offloads(zero, "offload_optimizer")
    layer = [numel(weight) for kind in shape.kinds[:1] for weight in kind.weights]
    widest = sorted(layer)[-3:]
    private: dict[str, int] = {"weights": compute * owned}
    phases = [("after load", dict(private))]
    private["allocator"] = left
    phases.append(("after bf16 partitions", dict(private)))
    private["weights"] += 4 * owned if compute == 2 or offloaded else 0
    phases.append(("after fp32 master", dict(private)))
    private["gradients"] = 4 * owned if offloaded else 0
    phases.append(("after optimizer state", dict(private)))
    private["gradients"] += compute * owned
    private["gathered"] = compute * sum(widest)
    phases.append(("after ZeRO init", dict(private)))
    return phases


def _settings(config: RunConfig, shape: ModelShape, layout: RankLayout) -> dict[str, Any]:
    settings, _ = deepspeed_settings(config, layout.world_size, shape.width)
    zero: dict[str, Any] = settings["zero_optimization"]
    return zero


def _offloads(zero: dict[str, Any], section: str) -> bool:
    return bool(zero.get(section, {}).get("device", "none") == "cpu")


def _partition(weight: Shape, ranks: int) -> int:
    return -(-numel(weight) // ranks)

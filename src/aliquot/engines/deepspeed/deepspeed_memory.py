"""The memory of engine deepspeed, derived from the allocations in the source code of DeepSpeed 0.19.8 (ZeRO-3).

DeepSpeed reports its memory after five phases of its initialization (see_memory_usage). The memory ledger has the same
phases. A rank owns a partition of each weight, ceil(numel / ranks) elements. The phases allocate:

after load               partition_parameters.py: the partitions from zero.Init, 2 bytes per owned element.
after bf16 partitions    stage3.py, _create_fp16_partitions_with_defragmentation: DeepSpeed copies all partitions into
                         one flat buffer, and frees the partitions one by one. Partitions below 16 MiB come from the
                         heap and stay with the allocator; larger ones return to the system.
after fp32 master        _create_fp32_partitions: an fp32 copy, 4 bytes per owned element.
after optimizer state    initialize_optimizer_states: no moments, because Adam creates moments in its first step. With
                         offload_optimizer, an fp32 gradient of every sub-group, 4 bytes per owned element.
after ZeRO init          _setup_for_real_optimizer: grad_partitions_flat_buffer in the dtype of gradient sums, 4 bytes
                         per owned element in fp32. Then create_reduce_and_remove_grad_hooks gathers every weight once,
                         and the three MLP weights of one layer stay gathered.
"""

from __future__ import annotations

from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings, offloads_optimizer
from aliquot.engines.engine_plan import RankMemory
from aliquot.models.model_shape import ModelShape, Shape, numel

_HEAP_BYTES = 16 << 20  # smaller partitions come from the allocator's heap and stay there after they are freed
# DeepSpeed's defaults of stage3_max_reuse_distance and stage3_max_live_parameters. A gathered weight stays gathered if
# DeepSpeed uses the weight again within the reuse distance, which counts elements. Between the uses of a weight in the
# forward and in the backward pass, the distance is twice the size of the layers above the weight.
_MAX_REUSE, _MAX_LIVE = 10**9, 10**9
REUSED_NUMEL = _MAX_REUSE // 2
_PERSISTENT_NUMEL = 100_000  # stage3_param_persistence_threshold, if the JSON does not set it


def persistent_numel(config: RunConfig, shape: ModelShape, layout: RankLayout) -> int:
    """Return the number of elements of small weights, which DeepSpeed keeps gathered until an update.

    The source is DeepSpeed's parameter_offload.py.
    """
    zero = _settings(config, shape, layout)["zero_optimization"]
    threshold = zero.get("stage3_param_persistence_threshold", _PERSISTENT_NUMEL)
    return sum(numel(weight) for weight in shape.weights if numel(weight) <= threshold)


def sent_gradient_bytes(config: RunConfig, shape: ModelShape, layout: RankLayout) -> int:
    """Return the bytes of a gradient that DeepSpeed sends."""
    return _itemsize(_settings(config, shape, layout)["communication_data_type"])


def deepspeed_memory(config: RunConfig, shape: ModelShape, layout: RankLayout) -> RankMemory:
    """Return the memory of a rank in training with engine deepspeed."""
    settings = _settings(config, shape, layout)
    zero, summed = settings["zero_optimization"], _itemsize(settings["data_types"]["grad_accum_dtype"])
    compute, sent = config.train.compute_itemsize, sent_gradient_bytes(config, shape, layout)
    weights = shape.weights
    owned = sum(_partition(weight, layout.world_size) for weight in weights)
    largest = max(numel(weight) for weight in weights)
    offloaded = offloads_optimizer(settings)
    group = min(owned, int(zero.get("sub_group_size", 10**9)) // layout.world_size + largest // layout.world_size)
    reuse = int(zero.get("stage3_max_reuse_distance", _MAX_REUSE))
    live = min(shape.numel, reuse // 2, int(zero.get("stage3_max_live_parameters", _MAX_LIVE)))
    prefetched = min(int(zero.get("stage3_prefetch_bucket_size", 5 * 10**7)), shape.numel)
    gathered = compute * (max(live, largest) + prefetched)
    # Only the filled part of the gradient bucket takes memory. The input of the reduce-scatter is a copy of the bucket
    # (reduce_scatter_coalesced), made from another copy if gradients are sent in another dtype. On CPU there is one
    # more copy, because gloo's reduce-scatter all-reduces a clone.
    bucket = min(max(int(zero.get("reduce_bucket_size", 5 * 10**8)), largest), shape.numel)
    copies = (2 if layout.device == "cpu" else 1) + (1 if sent != compute else 0)
    return RankMemory(
        weights=(compute + 4) * owned if compute == 2 or offloaded else 4 * owned,
        gradients=(summed + (4 if offloaded else 0)) * owned,
        gradients_from_start=True,
        moments=8 * owned,
        # For one sub-group: flat gradients, fp32 gradients if these differ, and the square root of the second moments.
        update=(summed + (4 if summed != 4 else 0) + 4) * group,
        forward=gathered,
        backward=gathered + (compute + copies * sent) * bucket,
        evaluation=gathered,
        # On CPU, each step allocates the copies of the bucket anew, which fragments the heap: in 20 steps, the unused
        # heap grew by the size of two copies.
        holes=2 * sent * bucket if layout.device == "cpu" else 0,
    )


def build_phases(config: RunConfig, shape: ModelShape, layout: RankLayout) -> list[tuple[str, dict[str, int]]]:
    """Return the private bytes after each phase of DeepSpeed's initialization, without the process's base memory."""
    settings, compute = _settings(config, shape, layout), config.train.compute_itemsize
    parts = [compute * _partition(weight, layout.world_size) for weight in shape.weights]
    numel_owned, left = sum(parts) // compute, sum(part for part in parts if part < _HEAP_BYTES)
    offloaded = offloads_optimizer(settings)
    widest = sorted(numel(weight) for kind in shape.kinds[:1] for weight in kind.weights)[-3:]
    loaded = {"weights": sum(parts)}
    copied = {**loaded, "allocator": left}
    mastered = {**copied, "weights": sum(parts) + (4 * numel_owned if compute == 2 or offloaded else 0)}
    initialized = {**mastered, "gradients": 4 * numel_owned if offloaded else 0}
    summed = initialized["gradients"] + _itemsize(settings["data_types"]["grad_accum_dtype"]) * numel_owned
    return [
        ("after load", loaded),
        ("after bf16 partitions", copied),
        ("after fp32 master", mastered),
        ("after optimizer state", initialized),
        ("after ZeRO init", {**initialized, "gradients": summed, "gathered": compute * sum(widest)}),
    ]


def _settings(config: RunConfig, shape: ModelShape, layout: RankLayout) -> dict[str, Any]:
    return deepspeed_settings(config, layout.world_size, shape.width)[0]


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype, as DeepSpeed's JSON names it."""
    return 4 if dtype in ("fp32", "torch.float32") else 2


def _partition(weight: Shape, ranks: int) -> int:
    return -(-numel(weight) // ranks)

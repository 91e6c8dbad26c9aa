"""Plan the memory of a rank, and decide which states go to disk or stay unsharded, and which layers are copied.

The sizes of weights, gradients and moments come from the engine. States go to disk if memory is short. Weights and
gradients stay unsharded on a GPU within a step if memory suffices. Engine host copies the layers for which a GPU has no
memory to the GPU for each use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_memory import build_phases, deepspeed_memory
from aliquot.engines.engine_plan import SHARDED, OnDisk, RankMemory, Unsharded, is_single_gpu
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory, pinned_bytes, replicas, single_gpu_memory
from aliquot.engines.host.host_memory import device_memory, host_memory
from aliquot.models.model_shape import ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import SMALLEST
from aliquot.planner.memory_phases import cpu_process, gpu_process, host_phases, host_process_of_gpu, phases
from aliquot.planner.micro_batch_cost import MicroBatchCost
from aliquot.planner.plan import PhaseMemory

UNCERTAINTY = 0.08  # plans of peak memory were off by up to this fraction: benchmarks/foresight.py
MARGIN = UNCERTAINTY  # fraction of the limit that placement leaves free


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a rank: the sizes of its state, the memory of each phase, and what is on disk or unsharded."""

    held: RankMemory
    phases: tuple[PhaseMemory, ...]  # phases of GPU memory if the rank computes on a GPU, otherwise of host memory
    host_phases: tuple[PhaseMemory, ...]  # phases of host memory if the rank computes on a GPU
    on_disk: OnDisk
    unsharded: Unsharded
    copied_layers: int = 0  # with engine host on GPUs, decoder layers that are copied for each use


@dataclass(frozen=True, eq=False)
class MemoryPlanner:
    """Plans the memory of a rank."""

    config: RunConfig
    engine: str
    shape: ModelShape
    layout: RankLayout
    cost: MicroBatchCost
    index_bytes: int  # index of the data
    snapshot_bytes: int  # copies and write buffers of a running save
    kernel_bytes: int
    limit_bytes_per_node: float  # of all ranks
    host_limit_bytes_per_node: float  # of all ranks, if they compute on GPUs
    keeps_holes: bool  # the allocator is glibc

    def plan(self, micro_batches: int) -> MemoryPlan:
        """Return the memory plan with the least on disk, and the most unsharded on GPUs, that fits into the limit."""
        on_disk, unsharded = OnDisk(), SHARDED
        if self.config.shard.offload == "disk" and self.engine == "host":
            streams = self.layout.nodes == 1 and self.layout.device == "cpu" and self.shape.packs
            on_disk = least_on_disk(
                self.shape, self.layout, streams, lambda choice: self._excess(self._plan(choice), on_gpu=False)
            )
        if self.layout.device == "cuda" and self.engine == "host" and self.shape.packs:

            def fits(layers: int) -> bool:
                return self._excess(self._plan(on_disk, SHARDED, layers), on_gpu=True) <= 0

            layers = 0 if fits(0) else bisect_left(range(self.shape.layers), True, key=fits)
            return self._plan(on_disk, SHARDED, layers)
        if self._is_single_gpu:
            unsharded = Unsharded(weights=True, gradients=micro_batches > 1)
        elif self.layout.device == "cuda" and self.engine == "fsdp" and self.shape.packs:
            unsharded = most_unsharded(
                micro_batches, lambda choice: self._excess(self._plan(on_disk, choice), on_gpu=True) <= 0
            )
        return self._plan(on_disk, unsharded)

    def _excess(self, made: MemoryPlan, on_gpu: bool) -> float:
        """Return the bytes by which a rank exceeds its limit minus the margin; negative if the rank fits.

        `on_gpu`: if the rank computes on a GPU, of GPU memory, otherwise of host memory.
        """
        ranks = self.layout.ranks_per_node
        limited, limit = made.phases, self.limit_bytes_per_node
        if made.host_phases and not on_gpu:
            limited, limit = made.host_phases, self.host_limit_bytes_per_node
        return max(phase.per_rank(ranks) for phase in limited) - (1 - MARGIN) * limit / ranks

    def _plan(self, on_disk: OnDisk, unsharded: Unsharded = SHARDED, copied_layers: int = 0) -> MemoryPlan:
        config = self.config
        held = self._held(on_disk, unsharded)
        if self.layout.device == "cpu":
            compiles = config.train.compile == "layers"
            process = cpu_process(held, self.index_bytes, self.snapshot_bytes, self.kernel_bytes, compiles)
            building = build_phases(config, self.shape, self.layout) if self.engine == "deepspeed" else []
            made = phases(config, held, self.cost, process, building, self.keeps_holes)
            return MemoryPlan(held, made, (), on_disk, unsharded)
        if self.engine == "host":  # without NCCL
            on_gpu = device_memory(config, self.shape, copied_layers)
            made = phases(config, on_gpu, self.cost, gpu_process(nccl_groups=0))
            process = host_process_of_gpu(held, self.index_bytes, self.snapshot_bytes)
            inactive = replace(
                self.cost, saved_bytes=0, layer_bytes=0, forward_bytes=0, backward_bytes=0, evaluation_bytes=0,
                largest_bytes=0,
            )  # fmt: skip
            on_host = phases(config, held, inactive, process)
            return MemoryPlan(held, made, on_host, on_disk, unsharded, copied_layers)
        on_gpu = in_host = held
        if config.shard.offload == "cpu":
            # Sums of unsharded gradients stay on the GPU until they are reduced.
            gradients = held.gradients if unsharded.gradients else 0
            on_gpu = replace(held, weights=0, gradients=gradients, moments=0, update=0)
            if self.engine == "fsdp":
                pinned, pinned_gradients = pinned_bytes(config, self.shape, self.layout)
                in_host = replace(held, weights=pinned, own_gradients=pinned_gradients)
        made = phases(config, on_gpu, self.cost, gpu_process(self._nccl_groups))
        on_host = host_phases(in_host, config.shard.offload == "cpu", self.index_bytes, self.snapshot_bytes)
        return MemoryPlan(held, made, on_host, on_disk, unsharded)

    @property
    def _nccl_groups(self) -> int:
        """The number of groups of ranks: all ranks, and with replicas the ranks of a node and those of equal shards."""
        if self.layout.world_size == 1:
            return 0
        return 3 if self.engine == "fsdp" and replicas(self.config, self.layout) > 1 else 1

    @property
    def _is_single_gpu(self) -> bool:
        return self.engine == "fsdp" and is_single_gpu(self.config, self.layout.device, self.layout.world_size)

    def _held(self, on_disk: OnDisk, unsharded: Unsharded) -> RankMemory:
        config, shape, layout, cost = self.config, self.shape, self.layout, self.cost
        if self.engine == "host":
            return host_memory(config, shape, layout, on_disk)
        if self.engine == "deepspeed":
            return deepspeed_memory(config, shape, layout)
        if self._is_single_gpu:
            return single_gpu_memory(config, shape, unsharded)
        return fsdp_memory(config, shape, layout, cost.backward_bytes, cost.layer_bytes, unsharded)


def least_on_disk(shape: ModelShape, layout: RankLayout, streams: bool, excess: Callable[[OnDisk], float]) -> OnDisk:
    """Return the fewest states on disk with which a rank fits, or everything if the rank never fits.

    Optimizer states go to disk first, then gradient sums, then whole layers. Large weights come before small ones, so
    that few weights have states on disk and each disk access is long.

    Args:
        streams: engine host may keep whole layers on disk and read them for each use.
        excess: bytes by which a rank exceeds its limit.
    """

    def is_large(weight: Shape) -> bool:
        return padded_share(weight, layout.world_size) >= SMALLEST

    shapes = sorted(filter(is_large, shape.alike), key=numel, reverse=True)
    frozen = tuple(filter(is_large, dict.fromkeys(weight for kind in shape.kinds for weight in kind.frozen)))
    states = [("states", weight) for weight in shapes for _ in range(shape.alike[weight])]
    # Gradient sums of the input embedding stay in memory.
    sums = [("sums", weight) for weight in shapes for _ in range(shape.alike[weight] - (weight == shape.embedding))]
    layers = [("layers", ())] * (shape.layers if streams else 0)

    def first(count: int) -> OnDisk:
        counts = Counter([*states, *sums, *layers][:count])
        weights, gradients = (
            tuple((weight, number) for (kind, weight), number in counts.items() if kind == piece)
            for piece in ("states", "sums")
        )
        return OnDisk(weights, gradients, counts["layers", ()], frozen if counts["layers", ()] else ())

    def fits(count: int) -> bool:
        return excess(first(count)) <= 0

    fewest = 0
    # Within each kind, every further piece frees memory. The first piece of a kind also needs buffers.
    for end in accumulate((len(states), len(sums), len(layers))):
        if not fits(fewest):
            fewest = bisect_left(range(end), True, fewest, key=fits)
    return first(fewest)


def most_unsharded(micro_batches: int, fits: Callable[[Unsharded], bool]) -> Unsharded:
    """Return whether a GPU keeps weights and gradients unsharded within a step of `micro_batches`.

    Weights have priority, because each byte of unsharded weights saves (2 x micro-batches - 1) bytes of all-gather. A
    byte of unsharded gradients saves only micro-batches - 1 bytes of reduce-scatter.
    """
    several = micro_batches > 1
    choices = [Unsharded(True, several), Unsharded(True, False), Unsharded(False, several)]
    return next((choice for choice in choices if fits(choice)), Unsharded())

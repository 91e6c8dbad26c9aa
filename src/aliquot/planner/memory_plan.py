"""The placement of states, on disk if memory is short or whole on a GPU if memory suffices, and memory by phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_memory import build_phases, deepspeed_memory
from aliquot.engines.engine_plan import SHARDED, Counts, OnDisk, RankMemory, Unsharded
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory
from aliquot.engines.host.host_memory import host_memory
from aliquot.models.model_shape import ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import SMALLEST
from aliquot.planner.fit import UNCERTAINTY
from aliquot.planner.micro_batch_cost import MicroBatchCost
from aliquot.planner.phase_memory import cpu_process, gpu_process, phases
from aliquot.planner.plan import PhaseMemory

MARGIN = UNCERTAINTY  # of the limit that placement leaves free
_ON_DISK_NOTHING = OnDisk()


@dataclass(frozen=True)
class MemoryPlan:
    held: RankMemory
    phases: tuple[PhaseMemory, ...]  # of the memory that the rank computes in
    on_disk: OnDisk
    unsharded: Unsharded


@dataclass(frozen=True, eq=False)
class MemoryPlanner:
    """Plans the memory of a rank."""

    config: RunConfig
    engine: str
    shape: ModelShape
    layout: RankLayout
    cost: MicroBatchCost
    index_bytes: int  # of the data
    snapshot_bytes: int  # copies and pieces of a save
    kernel_bytes: int
    limit_bytes_per_node: float  # of all ranks

    def plan(self, micro_batches: int) -> MemoryPlan:
        """Return the memory with as little on disk as fits, and as much whole on GPUs as fits."""
        on_disk, unsharded = _ON_DISK_NOTHING, SHARDED
        if self.config.shard.offload == "disk" and self.engine == "host":
            streams = self.layout.nodes == 1 and self.shape.packs
            on_disk = least_on_disk(self.shape, self.layout, streams, self._excess)
        if self.layout.device == "cuda" and self.engine == "fsdp" and self.shape.packs:
            unsharded = most_unsharded(micro_batches, lambda choice: self._excess(_ON_DISK_NOTHING, choice) <= 0)
        held, made = self._phases(on_disk, unsharded)
        return MemoryPlan(held, made, on_disk, unsharded)

    def _excess(self, on_disk: OnDisk, unsharded: Unsharded = SHARDED) -> float:
        """Bytes by which a rank exceeds its limit, less the margin."""
        ranks = self.layout.ranks_per_node
        most = max(phase.per_rank(ranks) for phase in self._phases(on_disk, unsharded)[1])
        return most - (1 - MARGIN) * self.limit_bytes_per_node / ranks

    def _phases(self, on_disk: OnDisk, unsharded: Unsharded) -> tuple[RankMemory, tuple[PhaseMemory, ...]]:
        config = self.config
        held = self._held(on_disk, unsharded)
        if self.layout.device == "cpu":
            compiles = config.train.compile == "layers"
            process = cpu_process(held, self.index_bytes, self.snapshot_bytes, self.kernel_bytes, compiles)
            return held, phases(config, held, self.cost, process, self._building)
        on_gpu = held
        if config.shard.offload == "cpu":
            # Sums of whole gradients stay on the GPU until their reduction.
            gradients = held.gradients if unsharded.gradients else 0
            on_gpu = replace(held, weights=0, gradients=gradients, moments=0, update=0)
        return held, phases(config, on_gpu, self.cost, gpu_process(self.layout.world_size), [])

    def _held(self, on_disk: OnDisk, unsharded: Unsharded) -> RankMemory:
        config, shape, layout, cost = self.config, self.shape, self.layout, self.cost
        if self.engine == "host":
            return host_memory(config, shape, layout, on_disk)
        if self.engine == "deepspeed":
            return deepspeed_memory(config, shape, layout)
        return fsdp_memory(config, shape, layout, cost.backward_bytes, cost.layer_bytes, unsharded)

    @property
    def _building(self) -> list[tuple[str, dict[str, int]]]:
        return build_phases(self.config, self.shape, self.layout) if self.engine == "deepspeed" else []


def least_on_disk(shape: ModelShape, layout: RankLayout, streams: bool, excess: Callable[[OnDisk], float]) -> OnDisk:
    """Return the least that must lie on disk, or everything if no less suffices.

    States go before gradients, gradients before whole layers. Large weights go before small weights, because then few
    weights have states on disk, in long windows.

    Args:
        streams: engine host may read whole layers for each use.
        excess: bytes by which a rank exceeds its limit.
    """
    if excess(_ON_DISK_NOTHING) <= 0:
        return _ON_DISK_NOTHING

    def is_large(weight: Shape) -> bool:
        return padded_share(weight, layout.world_size) >= SMALLEST

    shapes = sorted(filter(is_large, shape.alike), key=numel, reverse=True)
    # Gradient sums of the input embedding stay in memory.
    sums = {weight: shape.alike[weight] - (weight == shape.embedding) for weight in shapes}
    frozen = tuple(filter(is_large, dict.fromkeys(weight for kind in shape.kinds for weight in kind.frozen)))
    everything = OnDisk(
        tuple((weight, shape.alike[weight]) for weight in shapes),
        tuple((weight, count) for weight, count in sums.items() if count),
        shape.layers if streams else 0,
        frozen if streams else (),
    )
    if excess(everything) > 0:
        return everything
    chosen = _ON_DISK_NOTHING
    candidates: list[tuple[Literal["states", "gradients"], Shape, int]] = [
        *(("states", weight, shape.alike[weight]) for weight in shapes),
        *(("gradients", weight, count) for weight, count in sums.items()),
    ]
    for kind, weight, count in candidates:
        with_count = partial(_with_weights, chosen, kind, weight)
        if excess(with_count(count)) <= 0:
            return _fewest(with_count, count, excess)
        chosen = with_count(count)

    def with_layers(count: int) -> OnDisk:
        return replace(chosen, layers=count, frozen=everything.frozen if count else ())

    return _fewest(with_layers, everything.layers, excess)


def most_unsharded(micro_batches: int, fits: Callable[[Unsharded], bool]) -> Unsharded:
    """Return the most that a GPU can keep whole within a step of `micro_batches`.

    Weights go first: a byte of weights saves (2 x micro-batches - 1) bytes of all-gather, a byte of gradients
    micro-batches - 1 bytes of reduce-scatter.
    """
    several = micro_batches > 1
    choices = [Unsharded(True, several), Unsharded(True, False), Unsharded(False, several)]
    return next((choice for choice in choices if fits(choice)), Unsharded())


def _fewest(with_count: Callable[[int], OnDisk], enough: int, excess: Callable[[OnDisk], float]) -> OnDisk:
    """Bisect for the smallest count without excess."""
    low, high = 0, enough
    while low < high:
        middle = (low + high) // 2
        if excess(with_count(middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    return with_count(high)


def _with_weights(chosen: OnDisk, kind: Literal["states", "gradients"], weight: Shape, count: int) -> OnDisk:
    counts: Counts = (*getattr(chosen, kind), (weight, count)) if count else getattr(chosen, kind)
    return replace(chosen, states=counts) if kind == "states" else replace(chosen, gradients=counts)

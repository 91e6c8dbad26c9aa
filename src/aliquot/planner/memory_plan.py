"""Plan the memory of a rank in each phase of a run, and decide which states go to disk or stay unsharded.

The sizes of weights, gradients and moments come from the engine. States go to disk if memory is short. Weights and
gradients stay unsharded on a GPU within a step if memory suffices. Categories of private memory: process, weights,
gradients, moments, gathered, activations, loss, buffers, streamed, snapshot, data and allocator. Categories of shared
memory, which counts once per host: process, weights, buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_memory import build_phases, deepspeed_memory
from aliquot.engines.engine_plan import SHARDED, Counts, OnDisk, RankMemory, Unsharded, is_single_gpu
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory, pinned_bytes, replicas, single_gpu_memory
from aliquot.engines.host.host_memory import device_memory, host_memory
from aliquot.models.model_shape import ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import SMALLEST
from aliquot.planner.micro_batch_cost import MicroBatchCost, evaluates
from aliquot.planner.plan import PhaseMemory
from aliquot.tensor_io.parts import MEMORY_BYTES

UNCERTAINTY = 0.08  # plans of peak memory were off by up to this fraction: benchmarks/foresight.py
MARGIN = UNCERTAINTY  # fraction of the limit that placement leaves free
_ON_DISK_NOTHING = OnDisk()
MIB = 1 << 20

# The memory of a rank without its model: Python, torch, transformers and the modules of training. START is at the start
# of the process, PROCESS during training. SHARED counts pages of libraries that all ranks of a host share. The numbers
# are private_bytes and shared_bytes of the ledger for a model of 1 M parameters, minus the memory of the model (torch
# 2.13.0+cpu, transformers 5.23, Python 3.11, x86-64 Linux 6; tcmalloc and glibc differ by 2 %).
START_PRIVATE_BYTES, START_SHARED_BYTES = 164 * MIB, 88 * MIB
PROCESS_PRIVATE_BYTES, PROCESS_SHARED_BYTES = 308 * MIB, 116 * MIB
# The launcher of a node: a process with Python and torch.
LAUNCHER_BYTES = 182 * MIB
# A process that sends metrics to a dashboard, with its client (wandb 0.31 offline, mlflow 3.17 over a database).
DASHBOARD_BYTES = {"wandb": 86 * MIB, "mlflow": 188 * MIB}
# Memory that glibc cannot reuse, per byte of activations and gathered weights: 0.1 to 0.9, 0.37 on average (12 runs of
# 40 steps, benchmarks/foresight.py). tcmalloc and jemalloc stay within the slack for the largest block.
_GLIBC_HOLES = 0.37
COMPILER_BYTES = 64 * MIB  # torch.compile after compiling the layers of a Llama (two cores with AMX)
# Estimates, none measured on a GPU yet: the CUDA context of a process, each group of ranks of NCCL, and host memory of
# CUDA's libraries.
CONTEXT_BYTES, NCCL_BYTES, CUDA_HOST_BYTES = 600 * MIB, 512 * MIB, 1024 * MIB


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a rank: the sizes of its state, the memory of each phase, and what is on disk or unsharded."""

    held: RankMemory
    phases: tuple[PhaseMemory, ...]  # phases of GPU memory if the rank computes on a GPU, otherwise of host memory
    host_phases: tuple[PhaseMemory, ...]  # phases of host memory if the rank computes on a GPU
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
    index_bytes: int  # index of the data
    snapshot_bytes: int  # copies and write buffers of a running save
    kernel_bytes: int
    limit_bytes_per_node: float  # of all ranks
    host_limit_bytes_per_node: float  # of all ranks, if they compute on GPUs
    keeps_holes: bool  # the allocator is glibc

    def plan(self, micro_batches: int) -> MemoryPlan:
        """Return the memory plan with the least on disk, and the most unsharded on GPUs, that fits into the limit."""
        on_disk, unsharded = _ON_DISK_NOTHING, SHARDED
        if self.config.shard.offload == "disk" and self.engine == "host":
            streams = self.layout.nodes == 1 and self.layout.device == "cpu" and self.shape.packs
            on_disk = least_on_disk(self.shape, self.layout, streams, self._excess)
        if self._is_single_gpu:
            unsharded = Unsharded(weights=True, gradients=micro_batches > 1)
        elif self.layout.device == "cuda" and self.engine == "fsdp" and self.shape.packs:
            unsharded = most_unsharded(micro_batches, lambda choice: self._excess(_ON_DISK_NOTHING, choice) <= 0)
        return self._plan(on_disk, unsharded)

    def _excess(self, on_disk: OnDisk, unsharded: Unsharded = SHARDED) -> float:
        """Return the bytes by which a rank exceeds its limit minus the margin; negative if the rank fits."""
        ranks = self.layout.ranks_per_node
        made = self._plan(on_disk, unsharded)
        limited, limit = made.phases, self.limit_bytes_per_node
        if self.engine == "host" and made.host_phases:  # states on disk free host memory, not GPU memory
            limited, limit = made.host_phases, self.host_limit_bytes_per_node
        return max(phase.per_rank(ranks) for phase in limited) - (1 - MARGIN) * limit / ranks

    def _plan(self, on_disk: OnDisk, unsharded: Unsharded) -> MemoryPlan:
        config = self.config
        held = self._held(on_disk, unsharded)
        if self.layout.device == "cpu":
            compiles = config.train.compile == "layers"
            process = cpu_process(held, self.index_bytes, self.snapshot_bytes, self.kernel_bytes, compiles)
            holes = _GLIBC_HOLES if self.keeps_holes else 0.0
            made = phases(config, held, self.cost, process, self._building, holes)
            return MemoryPlan(held, made, (), on_disk, unsharded)
        if self.engine == "host":  # without NCCL
            made = phases(config, device_memory(config, self.shape), self.cost, gpu_process(nccl_groups=0), [])
            process = host_process_of_gpu(held, self.index_bytes, self.snapshot_bytes)
            on_host = phases(config, held, self.cost.without_activations(), process, [])
            return MemoryPlan(held, made, on_host, on_disk, unsharded)
        on_gpu = in_host = held
        if config.shard.offload == "cpu":
            # Sums of unsharded gradients stay on the GPU until they are reduced.
            gradients = held.gradients if unsharded.gradients else 0
            on_gpu = replace(held, weights=0, gradients=gradients, moments=0, update=0)
            if self.engine == "fsdp":
                pinned, pinned_gradients = pinned_bytes(config, self.shape, self.layout)
                in_host = replace(held, weights=pinned, own_gradients=pinned_gradients)
        made = phases(config, on_gpu, self.cost, gpu_process(self._nccl_groups), [])
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
        layout = self.layout
        return self.engine == "fsdp" and is_single_gpu(layout.device, layout.world_size, self.config.shard.offload)

    def _held(self, on_disk: OnDisk, unsharded: Unsharded) -> RankMemory:
        config, shape, layout, cost = self.config, self.shape, self.layout, self.cost
        if self.engine == "host":
            return host_memory(config, shape, layout, on_disk)
        if self.engine == "deepspeed":
            return deepspeed_memory(config, shape, layout)
        if self._is_single_gpu:
            return single_gpu_memory(config, shape, unsharded)
        return fsdp_memory(config, shape, layout, cost.backward_bytes, cost.layer_bytes, unsharded)

    @property
    def _building(self) -> list[tuple[str, dict[str, int]]]:
        return build_phases(self.config, self.shape, self.layout) if self.engine == "deepspeed" else []


def least_on_disk(shape: ModelShape, layout: RankLayout, streams: bool, excess: Callable[[OnDisk], float]) -> OnDisk:
    """Return the fewest states on disk with which a rank fits, or everything if the rank never fits.

    Optimizer states go to disk first, then gradient sums, then whole layers. Large weights come before small ones, so
    that few weights have states on disk and each disk access is long.

    Args:
        streams: engine host may keep whole layers on disk and read them for each use.
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
    """Return whether a GPU keeps weights and gradients unsharded within a step of `micro_batches`.

    Weights have priority, because each byte of unsharded weights saves (2 x micro-batches - 1) bytes of all-gather. A
    byte of unsharded gradients saves only micro-batches - 1 bytes of reduce-scatter.
    """
    several = micro_batches > 1
    choices = [Unsharded(True, several), Unsharded(True, False), Unsharded(False, several)]
    return next((choice for choice in choices if fits(choice)), Unsharded())


def _fewest(with_count: Callable[[int], OnDisk], enough: int, excess: Callable[[OnDisk], float]) -> OnDisk:
    """Bisect for the smallest count with which a rank fits."""
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


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of a rank apart from its model and micro-batches: of its GPU, or of the host without GPUs."""

    start: int  # when the process begins
    start_shared: int
    training: int
    training_shared: int
    data: int  # index of the data
    loading: int  # buffers between files and tensors
    snapshot: int  # copies of states that a save has not written yet, and its write buffers


def cpu_process(held: RankMemory, index_bytes: int, snapshot: int, kernel_bytes: int, compiles: bool) -> ProcessMemory:
    """Return the memory of a rank on CPU. `kernel_bytes`: oneDNN kernels beyond PROCESS_PRIVATE_BYTES."""
    training = PROCESS_PRIVATE_BYTES + kernel_bytes + (COMPILER_BYTES if compiles else 0)
    return ProcessMemory(
        start=START_PRIVATE_BYTES,
        start_shared=START_SHARED_BYTES,
        training=training,
        training_shared=PROCESS_SHARED_BYTES,
        data=index_bytes,
        loading=MEMORY_BYTES,
        snapshot=0 if held.streamed else snapshot,
    )


def gpu_process(nccl_groups: int) -> ProcessMemory:
    """Return the GPU memory of the process of a rank. Data and file buffers are in host memory."""
    context = CONTEXT_BYTES + nccl_groups * NCCL_BYTES
    return ProcessMemory(context, 0, context, 0, data=0, loading=0, snapshot=0)


def host_process_of_gpu(held: RankMemory, index_bytes: int, snapshot: int) -> ProcessMemory:
    """Return the host memory of the process of a rank that computes on a GPU with engine host."""
    process = PROCESS_PRIVATE_BYTES + CUDA_HOST_BYTES
    started = replace(cpu_process(held, index_bytes, snapshot, 0, compiles=False), start=process, training=process)
    return replace(started, start_shared=PROCESS_SHARED_BYTES)


def helper_process_bytes(config: RunConfig, ranks: int) -> int:
    """Return the bytes of the launcher and of the dashboard clients of a node."""
    dashboards = sum(DASHBOARD_BYTES.get(service, 0) for service in config.observe.report_to)
    return dashboards + (LAUNCHER_BYTES if ranks > 1 else 0)


def phases(
    config: RunConfig,
    held: RankMemory,
    cost: MicroBatchCost,
    process: ProcessMemory,
    building: list[tuple[str, dict[str, int]]],
    holes: float = 0.0,
) -> tuple[PhaseMemory, ...]:
    """Return the memory of a rank in each phase of a run; the memory ledger measures the same phases.

    From the first forward pass on, memory never falls from one phase to the next, because allocators keep freed memory.

    Args:
        building: name and private bytes of each phase in which DeepSpeed initializes, without the bytes of the process.
        holes: bytes that the allocator cannot reuse, per byte of the largest forward or backward pass.
    """
    start = PhaseMemory("process start", {"process": process.start}, {"process": process.start_shared})
    states = {
        "process": process.training,
        "data": process.data,
        "weights": held.weights,
        "gradients": held.gradients if held.gradients_from_start else 0,
        "moments": held.moments,
    }
    shared_process = {"process": process.training_shared}
    shared = {**shared_process, "weights": held.shared_weights}
    built = [PhaseMemory(name, {"process": process.training, **sizes}, shared_process) for name, sizes in building]
    built.append(PhaseMemory("model built", states, shared_process))
    loaded = PhaseMemory("weights loaded", {**states, "buffers": process.loading}, shared)
    ready = PhaseMemory("optimizer state", {**states, "buffers": process.loading}, shared)

    loss = max(0, cost.forward_bytes - cost.saved_bytes)
    forward = {"gathered": held.forward, "activations": cost.saved_bytes, "loss": loss}
    backward = {"gathered": held.backward, "activations": cost.backward_bytes}
    most = max(sum(forward.values()), sum(backward.values()))
    with_gradients = {**states, "gradients": held.gradients}
    with_buffers = {**shared, "buffers": held.buffers}
    update = {"buffers": held.update}
    first_step = [
        PhaseMemory("first forward", {**states, **forward}, shared),
        PhaseMemory("first backward", {**with_gradients, **_with_freed(backward, most)}, with_buffers),
        PhaseMemory(
            "first step", {**with_gradients, **_with_freed(update, most), "streamed": held.streamed}, with_buffers
        ),
    ]
    # Fragmentation: smaller blocks may occupy the former place of the largest block, which then needs new memory.
    slack = cost.largest_bytes + held.holes
    if not held.streamed:
        slack += int(holes * most)
    else:
        # One half of the slack is memory that the allocator keeps unused (`Plan.allocator_cache_bytes`). The other half
        # is for holes that freed layers leave between saved activations.
        slack = max(2 * slack, most - cost.saved_bytes)
    gathered = max(held.forward, held.backward)
    steady = {"gathered": gathered, "activations": most - gathered}
    if evaluates(config):
        evaluation = {"gathered": held.evaluation, "activations": cost.evaluation_bytes}
        steady = max(steady, evaluation, key=lambda sizes: sum(sizes.values()))
    steady |= {"allocator": slack, "snapshot": process.snapshot, "streamed": held.streamed}
    steady_peak = PhaseMemory("steady peak", {**with_gradients, **steady}, with_buffers)
    return (start, *built, loaded, ready, *first_step, steady_peak)


def host_phases(held: RankMemory, offloads: bool, index_bytes: int, snapshot: int) -> tuple[PhaseMemory, ...]:
    """Return the host memory of a rank that computes on a GPU, phase by phase.

    Args:
        held: sizes that the engine would have without offload.
        offloads: weights, gradients and moments are in host memory.
    """
    shared = {"process": PROCESS_SHARED_BYTES}
    process = {"process": PROCESS_PRIVATE_BYTES + CUDA_HOST_BYTES}
    states = {**process, "data": index_bytes}
    gradients: dict[str, int] = {}
    update: dict[str, int] = {}
    if offloads:
        states |= {"weights": held.weights, "moments": held.moments}
        gradients = {"gradients": held.own_gradients or held.gradients}
        update = {"buffers": MEMORY_BYTES + held.update}
    if held.gradients_from_start:
        states |= gradients
    # Files are read through buffers of pinned memory, which torch does not free.
    loaded = {**states, "buffers": MEMORY_BYTES}
    trained = {**loaded, **gradients, **update}
    sizes_of_phases = {
        "process start": process,
        "model built": states,
        "weights loaded": loaded,
        "optimizer state": loaded,
        "first forward": loaded,
        "first backward": trained,
        "first step": trained,
        "steady peak": {**trained, "snapshot": snapshot},
    }
    return tuple(PhaseMemory(name, sizes, shared) for name, sizes in sizes_of_phases.items())


def _with_freed(sizes: dict[str, int], most: int) -> dict[str, int]:
    """Add freed memory that the allocator still keeps, because an earlier phase needed `most` bytes."""
    return {**sizes, "allocator": max(0, most - sum(sizes.values()))}

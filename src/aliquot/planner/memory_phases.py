"""The memory of a rank in each phase of a run: of the host, or of a GPU and its host.

Categories of private memory: process, weights, gradients, moments, gathered, activations, loss, buffers, streamed,
snapshot, data and allocator. Categories of shared memory, which counts once per host: process, weights, buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aliquot.config.schema import RunConfig
from aliquot.engines.engine_plan import RankMemory
from aliquot.planner.micro_batch_cost import MicroBatchCost
from aliquot.planner.plan import PhaseMemory
from aliquot.tensor_io.parts import MEMORY_BYTES

MIB = 1 << 20

# The memory of a rank without its model: Python, torch, transformers and the modules of training. START is at the start
# of the process, PROCESS during training. SHARED counts pages of libraries that all ranks of a host share. The numbers
# are private_bytes and shared_bytes of the ledger for a model of 1 M parameters, minus the memory of the model (torch
# 2.13.0+cpu, transformers 5.23, Python 3.11, x86-64 Linux 6; tcmalloc and glibc differ by 2 %).
START_PRIVATE_BYTES, START_SHARED_BYTES = 164 * MIB, 88 * MIB
PROCESS_PRIVATE_BYTES, PROCESS_SHARED_BYTES = 308 * MIB, 116 * MIB
# The launcher of a node: a process with Python and torch.
LAUNCHER_BYTES = 182 * MIB
# The client of a dashboard in rank 0, with its own processes (wandb 0.31 offline, mlflow 3.17 over a database).
DASHBOARD_BYTES = {"wandb": 54 * MIB, "mlflow": 132 * MIB}
# Memory that glibc cannot reuse, per byte of activations and gathered weights: 0.1 to 0.9, 0.37 on average (12 runs of
# 40 steps, benchmarks/foresight.py). tcmalloc and jemalloc stay within the slack for the largest block.
_GLIBC_HOLES = 0.37
COMPILER_BYTES = 64 * MIB  # torch.compile after compiling the layers of a Llama (two cores with AMX)
# Estimates, none measured on a GPU yet: the CUDA context of a process, each group of ranks of NCCL, and host memory of
# CUDA's libraries.
CONTEXT_BYTES, NCCL_BYTES, CUDA_HOST_BYTES = 600 * MIB, 512 * MIB, 1024 * MIB


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
    process, on_cpu = PROCESS_PRIVATE_BYTES + CUDA_HOST_BYTES, cpu_process(held, index_bytes, snapshot, 0, False)
    return replace(on_cpu, start=process, start_shared=PROCESS_SHARED_BYTES, training=process)


def helper_process_bytes(config: RunConfig, ranks: int) -> int:
    """Return the bytes of the launcher and of the dashboard clients of a node."""
    dashboards = sum(DASHBOARD_BYTES.get(service, 0) for service in config.observe.report_to)
    return dashboards + (LAUNCHER_BYTES if ranks > 1 else 0)


def phases(
    config: RunConfig,
    held: RankMemory,
    cost: MicroBatchCost,
    process: ProcessMemory,
    building: Sequence[tuple[str, dict[str, int]]] = (),
    keeps_holes: bool = False,
) -> tuple[PhaseMemory, ...]:
    """Return the memory of a rank in each phase of a run; the memory ledger measures the same phases.

    From the first forward pass on, memory never falls from one phase to the next, because allocators keep freed memory.

    Args:
        building: name and private bytes of each phase in which DeepSpeed initializes, without the bytes of the process.
        keeps_holes: the allocator is glibc.
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

    loss = max(0, cost.forward_bytes - cost.saved_bytes)
    forward = {"gathered": held.forward, "activations": cost.saved_bytes, "loss": loss}
    backward = {"gathered": held.backward, "activations": cost.backward_bytes}
    most = max(sum(forward.values()), sum(backward.values()))
    with_gradients = {**states, "gradients": held.gradients}
    with_buffers = {**shared, "buffers": held.buffers}
    first_step = [
        PhaseMemory("first forward", {**states, **forward}, shared),
        PhaseMemory("first backward", {**with_gradients, **_with_freed(backward, most)}, with_buffers),
        PhaseMemory(
            "first step",
            {**with_gradients, **_with_freed({"buffers": held.update}, most), "streamed": held.streamed},
            with_buffers,
        ),
    ]
    # Fragmentation: smaller blocks may occupy the former place of the largest block, which then needs new memory.
    slack = cost.largest_bytes + held.holes
    # Of a streamed run, one half of the slack is memory that the allocator keeps unused (`Plan.allocator_cache_bytes`).
    # The other half is for holes that freed layers leave between saved activations.
    slack = max(2 * slack, most - cost.saved_bytes) if held.streamed else slack + int(_GLIBC_HOLES * most) * keeps_holes
    gathered = max(held.forward, held.backward)
    steady = {"gathered": gathered, "activations": most - gathered}
    if config.data.has_evaluation:
        evaluation = {"gathered": held.evaluation, "activations": cost.evaluation_bytes}
        steady = max(steady, evaluation, key=lambda sizes: sum(sizes.values()))
    steady |= {"allocator": slack, "snapshot": process.snapshot, "streamed": held.streamed}
    steady_peak = PhaseMemory("steady peak", {**with_gradients, **steady}, with_buffers)
    return (start, *built, loaded, replace(loaded, name="optimizer state"), *first_step, steady_peak)


def host_phases(held: RankMemory, offloads: bool, index_bytes: int, snapshot: int) -> tuple[PhaseMemory, ...]:
    """Return the host memory of a rank that computes on a GPU, phase by phase.

    Args:
        held: sizes that the engine would have without offload.
        offloads: weights, gradients and moments are in host memory.
    """
    shared = {"process": PROCESS_SHARED_BYTES}
    process = {"process": PROCESS_PRIVATE_BYTES + CUDA_HOST_BYTES}
    offloaded = {"weights": held.weights, "moments": held.moments} if offloads else {}
    gradients = {"gradients": held.own_gradients or held.gradients} if offloads else {}
    states = {**process, "data": index_bytes, **offloaded, **(gradients if held.gradients_from_start else {})}
    # Files are read through buffers of pinned memory, which torch does not free.
    loaded = {**states, "buffers": MEMORY_BYTES}
    trained = {**loaded, **gradients, "buffers": MEMORY_BYTES + (held.update if offloads else 0)}
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
